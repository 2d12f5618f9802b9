from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.compare_text import comparison_text
from replay.align import Pair
from replay.cli import run
from replay.compare import compare
from replay.comparison import Comparison, Difference
from replay.trace.reader import open_trace
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job
from tests.scenarios.test_s3_sent_before_written import too_early


def scene(folder: Path, name: str, **how: Any) -> Scene:
    (folder / name).mkdir()
    return Scene(folder / name, **how)


def healthy(folder: Path, name: str, *, rooms: tuple[int, int] = (7000, 7001), **how: Any) -> Path:
    made = scene(folder, name, **how)
    made.healthy(Job(rooms[0], 0, 192, [21, 22, 23], [5, 6, 7]))
    made.healthy(Job(rooms[1], 1, 100, [24, 25], [8, 9]))
    made.close()
    return made.paths[0]


def compared(good: Path, bad: Path) -> Comparison:
    with open_trace(good) as left, open_trace(bad) as right:
        return compare(left, right)


def test_the_same_run_is_equal_at_every_stage(tmp_path: Path) -> None:
    path = healthy(tmp_path, "good")
    found = compared(path, path)
    assert not found.differences
    assert {stage for stage, n in found.compared.items() if n} >= {"store", "source", "wire", "destination"}
    assert run(["diff", str(path), str(path)]) == 0


def test_other_pages_and_other_rooms_are_no_difference(tmp_path: Path) -> None:
    good = healthy(tmp_path, "good")
    made = scene(tmp_path, "bad")
    made.healthy(Job(8101, 1, 100, [3, 4], [30, 31]))
    made.healthy(Job(8100, 0, 192, [13, 12, 11], [33, 32, 34]))
    made.close()
    found = compared(good, made.paths[0])
    assert {(p.good[0], p.bad[0], p.by) for p in found.pairs} == {
        (7000, 8100, "order"),
        (7001, 8101, "order"),
    }
    assert not found.differences


def test_the_client_s_id_aligns_before_the_order_does(tmp_path: Path) -> None:
    paths = []
    for name, rooms in (("good", (1, 2)), ("bad", (12, 11))):
        made = scene(tmp_path, name)
        for q, room in enumerate(rooms):
            job = Job(room, q, 64, [20 + q], [5 + q])
            made.prefill.emit("request", room=room, phase="start", rows=64, rid=f"{q}" * 32)
            made.healthy(job)
        made.close()
        paths.append(made.paths[0])
    found = compared(*paths)
    assert {(p.good[0], p.bad[0], p.by) for p in found.pairs} == {(1, 12, "rid"), (2, 11, "rid")}
    assert not found.differences


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_the_first_difference_is_the_earliest_stage_with_its_rows_and_bytes(
    tmp_path: Path, keep: Any
) -> None:
    """S3: rows 40.. of page 1 had not been written at the send, in both areas."""
    bad = too_early(scene(tmp_path, "bad", keep=keep))
    bad.close()
    good = scene(tmp_path, "good", keep=keep)
    good.healthy(Job(7000, 0, 192, [31, 32, 33], [5, 6, 7]))
    good.close()
    found = compared(good.paths[0], bad.paths[0])
    if not found.pairs:
        pytest.fail("the request of the scenario has another length")
    first = found.differences[0]
    assert (first.stage, first.look, first.pair.bad[0], first.layer, first.logical) == (
        "source", "SE before", 7000, 0, 1,
    )  # fmt: skip
    assert (first.value_rows, first.scale_rows) == (((40, 63),), ((40, 63),))
    assert first.byte_ranges[0] == (5120, 8192)
    assert (first.bytes_differing is None) == (keep == "digests")
    if keep == "bytes":
        assert first.bytes_differing == 3127
    assert [d.stage for d in found.differences] == sorted(
        (d.stage for d in found.differences),
        key=["store", "source", "wire", "completion", "destination"].index,
    )


def test_scales_alone_are_told_from_values(tmp_path: Path) -> None:
    good = healthy(tmp_path, "good")
    made = scene(tmp_path, "bad")
    job = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    made.start(job)
    made.announce(job)
    made.store(job, 0, 192)
    made.prefill.memory[0][22, 8192 + 4 * 17] ^= 1
    made.send(job)
    made.arrive(job)
    made.close()
    found = compared(good, made.paths[0])
    first = found.differences[0]
    assert (first.stage, first.value_rows, first.scale_rows, first.bytes_differing) == (
        "source",
        (),
        ((17, 17),),
        1,
    )


def test_rows_behind_the_length_do_not_count_and_appended_rows_come_last(tmp_path: Path) -> None:
    paths = []
    for name, odd in (("good", 0), ("bad", 1)):
        made = scene(tmp_path, name)
        job = Job(7000, 0, 100, [21, 22], [5, 6])
        made.decode.memory[0][6, 120 * 64 :] = odd
        made.start(job)
        made.announce(job)
        made.store(job, 0, 100)
        made.send(job)
        made.arrive(job)
        made.append(job)
        made.decode.memory[0][6, 36 * 128] ^= odd
        made.read(job)
        made.close()
        paths.append(made.paths[0])
    found = compared(*paths)
    assert {(d.appended, d.value_rows, d.scale_rows) for d in found.differences} == {(True, ((36, 36),), ())}


def test_logits_within_the_tolerance_are_equal_and_beyond_it_are_not(tmp_path: Path) -> None:
    def read(name: str, factor: float) -> Path:
        made = scene(tmp_path, name)
        job = made.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
        made.read(
            job, logits=True, change=lambda m: m.update(logits=(m["logits"] * factor).astype(np.float32))
        )
        made.close()
        return made.paths[0]

    good = read("good", 1.0)
    near, far = compared(good, read("near", 1.0005)), compared(good, read("far", 1.5))
    assert not near.differences
    assert 0 < near.largest_logit_difference < 1e-3
    assert [d.stage for d in far.differences] == ["read-kernel"]
    assert "192 rows" in far.differences[0].detail or "of 192" in far.differences[0].detail


def test_reads_follow_the_ladder_and_infinite_logits_are_compared_without_a_warning(tmp_path: Path) -> None:
    def reads(name: str, *, bad: bool) -> Path:
        def first(m: dict[str, Any]) -> None:
            m["logits"][5] = np.inf
            if bad:
                m["top_k"][3] = -1

        def second(m: dict[str, Any]) -> None:
            m["logits"][:2] = np.inf
            if bad:
                m["logits"][1] = 0.0

        made = scene(tmp_path, name)
        job = made.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
        for change in (first, second):
            made.read(job, logits=True, change=change)
        made.close()
        return made.paths[0]

    paths = reads("good", bad=False), reads("bad", bad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compared(*paths)
    told = [(d.stage, d.read, d.detail) for d in found.differences]
    assert told == [
        ("read-kernel", 2, "logits of 1 of 192 rows differ by more than 0.001 of the largest"),
        ("top-k", 1, "192 valid entries in the good run, 191 in the bad one"),
    ]


def test_traces_without_a_common_request_are_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = healthy(tmp_path, "good")
    made = scene(tmp_path, "bad")
    made.healthy(Job(9000, 0, 77, [21, 22], [5, 6]))
    made.close()
    assert run(["diff", str(good), str(made.paths[0])]) == 3
    assert "NOTHING COMPARABLE" in capsys.readouterr().out


def test_pages_of_two_formats_are_left_out_and_said(tmp_path: Path) -> None:
    good = healthy(tmp_path, "good")
    bad = healthy(tmp_path, "bad", format="bf16")
    found = compared(good, bad)
    assert not found.comparable
    assert "page formats differ" in found.not_compared


def test_the_command_says_and_writes_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = too_early(scene(tmp_path, "bad"))
    bad.close()
    good = scene(tmp_path, "good")
    good.healthy(Job(7000, 0, 192, [31, 32, 33], [5, 6, 7]))
    good.close()
    paths = [str(good.paths[0]), str(bad.paths[0])]
    assert run(["diff", *paths, "-v", "-o", str(tmp_path / "out.json")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("DIFFERENT  source: first difference at SE before")
    assert "Two right runs may differ" in text
    assert max(map(len, text.splitlines())) <= 80
    assert run(["diff", *paths, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body == json.loads((tmp_path / "out.json").read_text())
    assert (body["schema"], body["result"]) == ("kv-replay/diff/1", "different")
    told = (Path(__file__).parents[2] / "docs/diff-json.md").read_text()
    for field in (*body, *body["differences"][0], *body["aligned"][0]):
        assert f"`{field}`" in told or field in told, field
    assert run(["diff", paths[0]]) == 2
    (tmp_path / "junk.h5").write_bytes(b"no")
    assert run(["diff", paths[0], str(tmp_path / "junk.h5")]) == 4


def test_names_of_a_trace_reach_the_terminal_as_text_and_one_of_anything_is_one() -> None:
    pair = Pair((1, 0), (1, 0), "room", 64)
    hostile = "\x1b[2Jindex_k"
    item = Difference("wire", "RC", pair, "decode", 0, hostile, 3, 0, 5, 6, value_rows=((7, 7),),
                      byte_ranges=((900, 901),), bytes_differing=1)  # fmt: skip
    found = Comparison([pair], [], [], {"wire": 1}, {"no partner": 1}, [item])

    text = comparison_text(found, verbose=True)

    assert text.count("?[2Jindex_k") == 2
    assert "\x1b" not in text
    flat = " ".join(text.split())
    assert flat.count("values of row 7, bytes [900,901), 1 byte differs") == 2
    assert "1 request by room" in flat
    assert "1 look: no partner" in flat
