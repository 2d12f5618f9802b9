"""``replay geometry``: hazards in the inventories of two sides, each alone and none where they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.layouts import LAYOUTS, OPAQUE
from replay.cli import run
from replay.trace.builder import TraceBuilder

BASE = {"prefill": 0x1000_0000, "decode": 0x9000_0000}


def side(
    path: Path,
    role: str,
    *,
    changes: dict[int, dict[str, Any]] | None = None,
    layers: tuple[int, ...] = (2, 4, 6),
    registered: tuple[int, ...] | None = None,
) -> Path:
    """A trace of one side with an index-K buffer a layer and one opaque buffer."""
    with TraceBuilder(path) as builder:
        process = builder.process(role=role, run=role)
        for number, layer in enumerate(layers):
            fields: dict[str, Any] = {
                "buffer": number, "name": "index_k", "layer": layer, "format": "fp8", "pages": 10, "pitch": 8448,
                "address": BASE[role] + number * 0x10_0000, "item_length": 8448, "tokens_per_row": 4,
            }  # fmt: skip
            fields |= (changes or {}).get(number, {})
            process.buffer(**fields)
            if registered is None or number in registered:
                process.registration(
                    agent=role, address=fields["address"], length=fields["pages"] * fields["pitch"]
                )
        process.buffer(
            buffer=9, name="c4", layer=2, format=OPAQUE, pages=10, pitch=37440, item_length=37440, address=64
        )
    return path


def hazards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], **decode: Any
) -> tuple[int, list[tuple[str, str]]]:
    """Exit code and (kind, where) of each hazard between a usual prefill side and this decode side."""
    paths = [side(tmp_path / "prefill.h5", "prefill"), side(tmp_path / "decode.h5", "decode", **decode)]
    code = run(["geometry", *map(str, paths), "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "kv-replay/geometry/1"
    return code, [(h["kind"], h["where"]) for h in body["hazards"]]


def test_sides_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys) == (0, [])


def test_another_number_of_pages_is_no_hazard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {number: {"pages": 17} for number in range(3)}
    assert hazards(tmp_path, capsys, changes=more) == (0, [])


def test_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = LAYOUTS["fp4"].page_bytes
    fp4 = {n: {"format": "fp4", "pitch": size, "item_length": size} for n in range(3)}
    code, found = hazards(tmp_path, capsys, changes=fp4)
    assert code == 1
    assert found == [
        (kind, f"index_k layer {layer}") for layer in (2, 4, 6) for kind in ("format", "item-length")
    ]


def test_an_item_length_of_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 pages of 16,384 bytes, and the transfer is told those of fp8: the side alone shows it."""
    wrong = {1: {"format": "bf16", "pitch": 16384}}
    code, found = hazards(tmp_path, capsys, changes=wrong)
    assert code == 1
    assert ("item-length", "decode 0: index_k layer 4") in found
    assert ("format", "index_k layer 4") in found


def test_another_pitch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = {2: {"pitch": 16896, "item_length": 16896}}
    assert hazards(tmp_path, capsys, changes=slab) == (1, [("item-length", "index_k layer 6")])
    apart = {2: {"pitch": 4224}}  # the told length is that of two pages
    (tmp_path / "b").mkdir()
    code, found = hazards(tmp_path / "b", capsys, changes=apart)
    assert code == 1
    assert ("pitch", "index_k layer 6") in found


def test_a_missing_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys, layers=(2, 4)) == (1, [("missing-buffer", "index_k layer 6")])


def test_memory_that_is_not_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys, registered=(0, 1)) == (
        1,
        [("not-registered", "decode 0: index_k layer 6")],
    )


def test_nothing_registered_yet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys, registered=()) == (0, [])


def test_another_order_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys, layers=(2, 6, 4)) == (
        1,
        [("layer-pairing", "prefill 0 -> decode 0: index_k")],
    )


def test_another_page_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = {number: {"tokens_per_row": 1} for number in range(3)}
    code, found = hazards(tmp_path, capsys, changes=every)
    assert (code, found) == (1, [("page-size", f"index_k layer {layer}") for layer in (2, 4, 6)])


def test_a_layer_with_fewer_pages_than_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards(tmp_path, capsys, changes={1: {"pages": 4}}) == (
        1,
        [("index-space", "decode 0: index_k layer 4")],
    )


def test_text_and_a_side_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = side(tmp_path / "prefill.h5", "prefill")
    assert run(["geometry", str(one)]) == 3
    assert "there is no such process" in capsys.readouterr().err
    other = side(tmp_path / "decode.h5", "decode", layers=(2, 4))
    assert run(["geometry", str(one), str(other)]) == 1
    out = capsys.readouterr().out
    assert "prefill 0 (4 buffers) and decode 0 (3)" in out
    assert "missing-buffer (F01)  index_k layer 6: prefill has it, decode has not" in out
    assert run(["geometry", str(tmp_path / "nowhere.h5")]) == 2
