"""The pictures beside the grid: that their arrays say what the trace holds, and that each is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import diff, plots
from analysis.diff import ByteState, RowState
from analysis.diff.ownership import Mark, Ownership, Span
from analysis.diff.page_bytes import compare_pages, compare_rows
from analysis.diff.rates import rates_from_summary, summary
from analysis.event_text import BufferPage
from analysis.pictures import KINDS, NothingToDrawError, Wanted, picture
from analysis.plots.rows import shrunk
from analysis.plots.style import inline_svg
from capture_hooks.layouts import layout
from replay import cli
from replay.judge import JudgeOptions, judge
from replay.trace.builder import TraceBuilder
from replay.trace.reader import open_trace
from replay.verdict import Verdict
from tests.scenarios import pattern
from tests.scenarios.scene import Job, Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken

FP8 = layout("fp8")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """S2 in two layers: A's late write lands in two pages of B, which is room 7001."""
    scene = overtaken(Scene(tmp_path_factory.mktemp("late"), layers=(2, 6)), later="after")
    scene.read(Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15]), logits=True)
    scene.close()
    return scene.paths[0]


@pytest.fixture(scope="module")
def late_verdict(late: Path) -> Verdict:
    with open_trace(late) as trace:
        return judge(trace, JudgeOptions(reexecute=False))


# Bytes


def test_bytes_are_told_apart_by_how_many_bits_differ() -> None:
    right = np.full(FP8.page_bytes, 0b0000_1111, np.uint8)
    seen = right.copy()
    seen[0] ^= 0b0000_0001
    seen[1] ^= 0b1111_0000
    seen[2] = 0
    seen[8192] ^= 0b0000_0011

    states = compare_pages(FP8, right, seen, 64)

    assert states[:4].tolist() == [
        ByteState.FEW_BITS, ByteState.MANY_BITS, ByteState.ZEROED, ByteState.EQUAL
    ]  # fmt: skip
    assert states[8192] == ByteState.FEW_BITS
    assert (states != ByteState.EQUAL).sum() == 4


def test_rows_behind_the_prompt_are_nobodys() -> None:
    states = compare_pages(FP8, np.zeros(FP8.page_bytes, np.uint8), np.ones(FP8.page_bytes, np.uint8), 36)

    assert set(states[: 36 * 128]) == {ByteState.FEW_BITS}
    assert set(states[36 * 128 : 8192]) == {ByteState.OUTSIDE}
    assert set(states[8192 : 8192 + 36 * 4]) == {ByteState.FEW_BITS}
    assert set(states[8192 + 36 * 4 :]) == {ByteState.OUTSIDE}


def test_without_bytes_a_row_differs_as_a_whole_and_its_scale_exactly() -> None:
    values = np.zeros(64, bool)
    values[3] = True
    right = np.zeros(256, np.uint8)
    seen = right.copy()
    seen[4 * 5] = 7

    states = compare_rows(FP8, values, (right, seen), 64)

    assert np.flatnonzero(states == ByteState.ROW_DIFFERS).tolist() == list(range(3 * 128, 4 * 128))
    assert np.flatnonzero(states == ByteState.MANY_BITS).tolist() == [8192 + 20]


def test_the_page_is_compared_with_the_first_later_look_that_differs(late: Path) -> None:
    with open_trace(late) as trace:
        page = diff.page_bytes(trace, 7001, 0, "index_k", 2, 2)
        whole = diff.page_bytes(trace, 7001, 0, "index_k", 2, 0)

    assert page is not None
    assert page.stages == ("store", "later")
    assert page.pages == (26, 14)
    expected = (pattern.page(1, 2, 2) != pattern.page(0, 2, 0)).sum()
    assert page.differing == expected
    assert whole is not None
    assert whole.differing == 0


def test_a_page_of_digests_shows_its_rows(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, keep="digests"), later="after")
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        page = diff.page_bytes(trace, 7001, 0, "index_k", 0, 2)

    assert page is not None
    assert page.differing is None
    assert (page.states[: FP8.scale_base] == ByteState.ROW_DIFFERS).all()


def test_a_page_that_chunks_fill_is_whole_only_after_the_last(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = Job(5, 0, 64, [1], [2])
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, 40)
    scene.store(job, 40, 64)
    scene.send(job)
    scene.arrive(job)
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        page = diff.page_bytes(trace, 5, 0, "index_k", 0, 0)
        rows = diff.row_grid(trace, 5)
        grid = diff.stage_grid(trace, Verdict("clean"), 5)

    assert page is not None
    assert page.differing == 0
    assert rows is not None
    assert (rows.states == RowState.EQUAL).all()
    assert grid is not None
    assert not (grid.states == diff.State.DIFFERS).any()


# Rows


def test_rows_and_chunks_lie_where_they_were_sent(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = Job(5, 0, 150, [1, 2, 3], [7, 8, 9])
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, 150)
    scene.send(job, [0, 1], chunk=0, last=False)
    transfer = scene.post(job, [2], chunk=1)
    scene.land(transfer)
    scene.decode.memory[0][8, 5 * 128] ^= 1
    scene.decode.memory[0][9, 8192] ^= 1
    scene.done(transfer)
    scene.arrive(job)
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        grid = diff.row_grid(trace, 5)

    assert grid is not None
    assert grid.chunks.tolist() == [0, 128]
    assert grid.stages == ("store", "source", "source, after", "arrival")
    arrival = grid.states[3, 0]
    assert arrival.shape == (150,)
    assert np.flatnonzero(arrival != RowState.EQUAL).tolist() == [69, 128]
    assert arrival[69] == RowState.VALUES
    assert arrival[128] == RowState.SCALES


def test_one_bad_row_in_a_hundred_thousand_stays_visible() -> None:
    states = np.full((1, 2, 100_000), RowState.EQUAL, np.uint8)
    states[0, 1, 77_777] = RowState.VALUES

    small, step = shrunk(states)

    assert small.shape[2] <= 1200
    assert np.argwhere(small == RowState.VALUES).tolist() == [[0, 1, 77_777 // step]]


# Ownership


def test_a_write_in_flight_over_another_ownership_is_contested(late: Path) -> None:
    with open_trace(late) as trace:
        page = diff.ownership(trace, BufferPage(1, "index_k", 2, 14), (7001, 0))

    assert page is not None
    assert page.owner == "decode rank 0"
    assert [room for room, _ in page.lanes] == [9009, 7000, 7001]
    owned = {page.lanes[s.lane][0]: s for s in page.spans if s.kind == "owned"}
    writes = {page.lanes[s.lane][0]: s for s in page.spans if s.kind == "write"}
    assert owned[7000].end < owned[7001].begin < writes[7000].end
    assert owned[7001].open
    assert [(page.lanes[w][0], page.lanes[o][0]) for w, o, *_ in page.contested] == [(7000, 7001)]
    assert {mark.kind for mark in page.marks} >= {"look", "read", "announce"}
    assert np.all(np.diff(page.ms) >= 0)


def test_a_healthy_page_has_nothing_contested(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(5, 0, 64, [1], [2]), finish=True)
    scene.healthy(Job(6, 1, 64, [3], [2]), finish=True)
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        page = diff.ownership(trace, BufferPage(1, "index_k", 0, 2))

    assert page is not None
    assert [room for room, _ in page.lanes] == [5, 6]
    assert page.contested == ()
    assert not any(span.open for span in page.spans)


def test_what_is_said_of_a_transfer_does_not_end_it(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        side = builder.process(role="decode")
        side.buffer(buffer=0, name="index_k", layer=0, format="fp8", pages=8, pitch=8448, address=1 << 32)
        side.send(room=5, transfer=1, source=[[1 << 32, 10]], destination=[[0, 10]], agent="x")
        side.transfer_state(room=5, transfer=1, state="posted", detail="not done")
        side.alloc(room=6, pages=[0])
    with open_trace(tmp_path / "t.h5") as trace:
        page = diff.ownership(trace, BufferPage(0, "index_k", 0, 0))

    assert page is not None
    assert [span.open for span in page.spans if span.kind == "send"] == [True]


def test_clocks_of_two_hosts_are_not_shown_side_by_side(tmp_path: Path) -> None:
    scene = Scene(tmp_path, skew_ns=10**12)
    scene.healthy(Job(5, 0, 64, [1], [2]))
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        page = diff.ownership(trace, BufferPage(1, "index_k", 0, 2))

    assert page is not None
    assert np.isnan(page.ms).all()


# Reads


def test_a_right_kernel_on_wrong_bytes_selects_other_rows(late: Path) -> None:
    with open_trace(late) as trace:
        grid = diff.read_grid(trace, 7001)

    assert grid is not None
    assert grid.layers == (("index_k", 2), ("index_k", 6))
    assert grid.error.shape == (2, 1)
    assert (grid.error < 1).all()
    assert (grid.kernel_overlap == 1).all()
    # All 256 rows fit into a top-k of 512, so the right bytes select the same rows.
    assert (grid.overlap == 1).all()


def test_what_wrong_bytes_select_is_measured_against_the_right_ones(tmp_path: Path) -> None:
    def only_sixteen(more: dict[str, Any]) -> None:
        more["k"] = 16
        more["top_k"] = more["top_k"][:16]

    def off(more: dict[str, Any]) -> None:
        more["logits"] = more["logits"] * np.float32(1.5)

    scene = overtaken(Scene(tmp_path), later="after")
    job = Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15])
    scene.read(job, logits=True, change=only_sixteen)
    scene.read(job, logits=True, change=off)
    scene.close()
    with open_trace(scene.paths[0]) as trace:
        grid = diff.read_grid(trace, 7001)

    assert grid is not None
    assert grid.steps[0] < grid.steps[1]
    assert grid.kernel_overlap[0, 0] == 1
    assert 0 < grid.overlap[0, 0] < 1
    assert grid.error[0, 0] < 1 < grid.error[0, 1]


# Rates


def test_the_interval_holds_the_share_and_narrows_with_more_requests() -> None:
    assert diff.wilson(0, 0) == (0.0, 1.0)
    low, high = diff.wilson(0, 96)
    assert low == 0
    assert 0.03 < high < 0.05
    low, high = diff.wilson(18, 100)
    assert low == pytest.approx(0.1170, abs=1e-3)
    assert high == pytest.approx(0.2667, abs=1e-3)


def test_a_trace_is_a_point(late: Path, late_verdict: Verdict) -> None:
    with open_trace(late) as trace:
        point = diff.rate_of(trace, late_verdict)

    # Room 9009 was served before, room 7001 was hit; room 7000 was never read.
    assert point == diff.Rate(concurrency=1, requests=2, hit=1)


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    levels = [diff.Rate(4, 95, 0), diff.Rate(60, 70, 6)]
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary(levels, {"fault": "x"})))

    assert rates_from_summary(path) == levels


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "x", "levels": []}', '{"schema": "kv-replay/demo/1", "levels": []}',
             '{"schema": "kv-replay/demo/1", "levels": [{"concurrency": 4, "requests": 1, "hit": 2}]}']
)  # fmt: skip
def test_another_file_is_no_summary(text: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="summary"):
        rates_from_summary(path)


# Pictures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_each_kind_is_drawn_of_what_the_verdict_names(
    kind: str, ending: str, late: Path, late_verdict: Verdict, tmp_path: Path
) -> None:
    with open_trace(late) as trace:
        found = picture(kind, trace, late_verdict)
    path = tmp_path / f"x.{ending}"
    plots.save(found.figure, path)

    assert "7001" in found.said or "page 14" in found.said
    width, height = found.figure.get_size_inches()
    assert 4 < width < 14
    assert 2 < height < 14
    assert path.stat().st_size > 2000


def test_a_page_can_be_chosen(late: Path, late_verdict: Verdict) -> None:
    with open_trace(late) as trace:
        found = picture("bytes", trace, late_verdict, Wanted((9009, 0), 1, 6))
        assert "logical page 1 of room 9009, index_k layer 6" in found.said
        with pytest.raises(NothingToDrawError, match="room 1"):
            picture("grid", trace, late_verdict, Wanted((1, 0)))
        with pytest.raises(NothingToDrawError, match="not seen at two stages"):
            picture("bytes", trace, late_verdict, Wanted((9009, 0), 40, 6))


def test_names_of_a_trace_are_text_and_nothing_else() -> None:
    """A dollar sign begins a formula in matplotlib, and an SVG is markup."""
    hostile = "</text><script>alert(1)</script> $\\frac{x$"
    page = Ownership(
        BufferPage(0, hostile, 0, 1), hostile, ((1, 0),), (Span("owned", 0, 0, 1),), (Mark("read", 0, 1),),
        (), np.zeros(2),
    )  # fmt: skip
    text = inline_svg(plots.ownership(page, hostile), "a")

    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "\\frac{x$" in text


def test_pictures_of_one_page_share_no_id_and_follow_its_colours(late: Path, late_verdict: Verdict) -> None:
    import re

    with open_trace(late) as trace:
        texts = [inline_svg(picture(kind, trace, late_verdict).figure, kind) for kind in KINDS]

    ids = [name for text in texts for name in set(re.findall(r'\bid="([^"]+)"', text))]
    assert len(ids) == len(set(ids))
    for text in texts:
        assert text.startswith("<svg")
        for target in re.findall(r'(?:href="|url\()#([^")]+)', text):
            assert f'id="{target}"' in text
        assert "var(--ink, #1f2937)" in text
        assert "var(--paper, #ffffff)" in text
        assert not re.search(r'(?:href|src)="(?!#|data:)', text)


def test_the_command_draws_every_kind(late: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(*args: str) -> int:
        return cli.run(["plot", str(late), "-o", str(tmp_path / "x.png"), "--force", *args])

    for kind in (*KINDS, "rate"):
        assert drawn("--kind", kind) == 0
    assert drawn("--kind", "ownership", "--page", "index_k/2/15", "--process", "1") == 0
    assert "page 15 of index_k layer 2, decode rank 0" in capsys.readouterr().out
    assert drawn("--kind", "ownership", "--page", "index_k/2/15") == 2
    assert drawn("--kind", "bytes", "--logical", "99") == 2
    assert cli.run(["plot", "--list-kinds"]) == 0
    assert "who owned a physical page when" in capsys.readouterr().out
