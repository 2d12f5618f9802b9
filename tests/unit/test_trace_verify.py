from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replay.trace.builder import TraceBuilder
from replay.trace.schema import CHUNK_BYTES
from replay.trace.verify import verify
from tests.unit.trace_samples import pages, small_trace


def edited(path: Path, change: Callable[[Any], None]) -> list[str]:
    with h5py.File(path, "a") as file:
        change(file)
    return [problem.what for problem in verify(path).problems]


def added(name: str, index: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[name][index] += 1

    return change


@pytest.mark.parametrize(
    ("name", "index", "says"),
    [
        ("contents/digests", (1, 0), ["content 1: its page digest is not that of its rows"]),
        ("contents/row_values", 64, ["content 1: its page digest", "content 1: its row check"]),
        ("contents/row_scales", 129, ["content 2: its page digest", "content 2: its row check"]),
        ("contents/row_check", 2, ["content 2: its row check is not that of its rows"]),
        ("blobs/contents.data/key", (2, 1), ["blob 2: its bytes do not have its key"]),
        ("blobs/contents.data/start", 1, ["blob 1: its bytes do not have its key"]),
        ("blobs/read.logits/key", (0, 0), ["blob 0: its bytes do not have its key"]),
    ],
)
def test_a_digest_that_is_not_that_of_its_bytes_is_found(
    name: str, index: Any, says: list[str], tmp_path: Path
) -> None:
    found = edited(small_trace(tmp_path / "t.h5"), added(name, index))
    for text in says:
        assert any(what.startswith(text) for what in found), found


def test_page_bytes_of_another_content_are_found(tmp_path: Path) -> None:
    def swap(file: Any) -> None:
        file["contents/blob"][:2] = file["contents/blob"][:2][::-1]

    found = edited(small_trace(tmp_path / "t.h5"), swap)
    assert found == [f"content {index}: its digests are not those of its bytes" for index in (0, 1)]


def test_page_bytes_of_another_length_are_found(tmp_path: Path) -> None:
    def shorten(file: Any) -> None:
        file["blobs/contents.data/length"][0] = 100

    assert "content 0 has 100 bytes, a page of format fp8 has 8448" in edited(
        small_trace(tmp_path / "t.h5"), shorten
    )


def test_a_damaged_chunk_is_named_and_blobs_outside_it_are_still_checked(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    count = 3 * CHUNK_BYTES // 8448
    with TraceBuilder(path) as builder:
        process = builder.process(role="prefill")
        process.buffer(buffer=0)
        process.snapshot(stage="ST", buffer=0, pages=np.arange(count), data=pages(count))
        process.read(room=1, logits=np.zeros(CHUNK_BYTES // 4))
    with h5py.File(path) as file:
        at = file["blobs/read.logits/bytes"].id.get_chunk_info(0)
        pages_at = file["blobs/contents.data/bytes"].id.get_chunk_info(1)
    data = bytearray(path.read_bytes())
    data[at.byte_offset + at.size // 2] ^= 0x10
    data[pages_at.byte_offset + 20_000] ^= 1  # stored raw: only the keys can tell
    path.write_bytes(data)
    found = [problem.what for problem in verify(path).problems]
    assert any("frame cannot be decoded" in what and "(chunk 0)" in what for what in found), found
    touched = (CHUNK_BYTES + 20_000) // 8448
    assert f"blob {touched}: its bytes do not have its key" in found
    assert f"content {touched}: its digests are not those of its bytes" in found
    assert sum("do not have its key" in what for what in found) == 1


def test_contents_that_were_given_a_digest_by_hand_and_nothing_else_have_nothing_to_check(
    tmp_path: Path,
) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="prefill")
        process.snapshot(stage="ST", pages=[1, 2], digests=[[1, 2], [3, 4]])
        process.snapshot(stage="ST", pages=[1], digests=[[1, 2]], data=pages(1)[:, :100])
    assert verify(tmp_path / "t.h5").problems == []
