"""The stage x page grid: what is equal, what differs, what nobody saw; and that the picture is drawn."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.diff import JUDGED, SNAPSHOTS, StageGrid, State, busiest_request, stage_grid
from analysis.plots import save
from analysis.plots import stage_grid as draw
from analysis.plots.reads import short
from replay import cli
from replay.trace.builder import TraceBuilder
from replay.trace.reader import Trace, open_trace
from replay.verdict import Finding, PageFinding, RequestId, Verdict
from tests.scenarios import pattern

CLEAN = Verdict("clean", cleared=("store", "table", "read-kernel"))
ROOM = 7
STAGE = {
    label: number
    for number, label in enumerate([label for label, *_ in SNAPSHOTS] + [label for label, _ in JUDGED])
}


def write(path: Path, looks: dict[str, list[np.ndarray]], *, rows: int = 128, freed_before: str = "") -> Path:
    """A trace of one request in one layer, with one snapshot a stage: source pages 5.., destination pages 9.. ."""
    with TraceBuilder(path) as builder:
        prefill, decode = builder.process(role="prefill"), builder.process(role="decode")
        for side in (prefill, decode):
            side.buffer(buffer=1, name="index_k", layer=3, format="fp8", pages=32, pitch=8448)
        decode.request(room=ROOM, rows=rows)
        for stage, pages in looks.items():
            side, first = (prefill, 5) if stage in ("ST", "SE") else (decode, 9)
            if stage == freed_before:
                side.free(room=ROOM, pages=[9])
            side.snapshot(
                stage=stage,
                moment="before" if stage == "SE" else "",
                room=ROOM,
                buffer=1,
                logical=list(range(len(pages))),
                pages=[first + k for k in range(len(pages))],
                data=np.stack(pages),
            )
    return path


def pages(count: int = 2, request: int = 0) -> list[np.ndarray]:
    return [pattern.page(request, 0, k) for k in range(count)]


def grid_of(path: Path, verdict: Verdict = CLEAN) -> StageGrid:
    with open_trace(path) as trace:
        grid = stage_grid(trace, verdict, ROOM)
    assert grid is not None
    return grid


def states(grid: StageGrid, stage: str) -> list[State]:
    return [State(state) for state in grid.states[STAGE[stage], 0]]


def finding(stage: str, *logical: int) -> Finding:
    found = tuple(PageFinding(k, 9 + k) for k in logical)
    return Finding(
        "F14", "late-foreign-write", stage, "certain", RequestId(ROOM), "decode", 0, "index_k", 3, found
    )


def test_a_page_that_changed_before_the_read_differs_there_and_nowhere_else(tmp_path: Path) -> None:
    foreign = [pages()[0], pattern.page(1, 0, 1)]
    path = write(tmp_path / "t.h5", {"ST": pages(), "SE": pages(), "RC": pages(), "RD": foreign})

    grid = grid_of(path, Verdict("divergent", (finding("destination", 1),), cleared=CLEAN.cleared))

    assert grid.layers == (("index_k", 3),)
    assert grid.logical.tolist() == [0, 1]
    assert grid.physical.tolist() == [9, 10]
    for stage in ("store", "source", "arrival"):
        assert states(grid, stage) == [State.EQUAL, State.EQUAL]
    assert states(grid, "reads") == [State.EQUAL, State.DIFFERS]
    assert states(grid, "later") == [State.NOT_SEEN, State.NOT_SEEN]
    assert np.argwhere(grid.found).tolist() == [[STAGE["reads"], 0, 1]]


def test_rows_behind_the_prompt_count_for_nothing(tmp_path: Path) -> None:
    """Control C1: 100 rows, so rows 36 to 63 of page 1 are nobody's."""
    changed = pages()
    changed[1] = changed[1].copy()
    changed[1][36 * 128 : 8192] = 0
    path = write(tmp_path / "t.h5", {"ST": pages(), "RC": changed}, rows=100)
    assert states(grid_of(path), "arrival") == [State.EQUAL, State.EQUAL]

    changed[1][35 * 128] ^= 1
    path = write(tmp_path / "u.h5", {"ST": pages(), "RC": changed}, rows=100)
    assert states(grid_of(path), "arrival") == [State.EQUAL, State.DIFFERS]


def test_a_scale_alone_makes_a_page_differ(tmp_path: Path) -> None:
    changed = pages()
    changed[0] = changed[0].copy()
    changed[0][8192] ^= 1
    path = write(tmp_path / "t.h5", {"ST": pages(), "RC": changed})

    assert states(grid_of(path), "arrival") == [State.DIFFERS, State.EQUAL]


def test_without_a_store_the_first_sight_is_what_others_are_compared_with(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", {"SE": pages(), "RC": pages(request=1)})

    grid = grid_of(path)

    assert states(grid, "store") == [State.NOT_SEEN, State.NOT_SEEN]
    assert states(grid, "source") == [State.EQUAL, State.EQUAL]
    assert states(grid, "arrival") == [State.DIFFERS, State.DIFFERS]


def test_what_decode_appends_to_a_spoilt_page_is_not_the_store(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        prefill, decode = builder.process(role="prefill"), builder.process(role="decode")
        for side in (prefill, decode):
            side.buffer(buffer=1, name="index_k", layer=3, format="fp8", pages=32, pitch=8448)
        for side, stage, request in ((prefill, "ST", 0), (decode, "RC", 0), (decode, "ST", 1)):
            data = np.stack(pages(request=request))
            side.snapshot(stage=stage, room=ROOM, buffer=1, logical=[0, 1], pages=[9, 10], data=data)

    assert states(grid_of(tmp_path / "t.h5"), "store") == [State.EQUAL, State.EQUAL]


def test_pages_that_decode_appended_are_not_the_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", {"ST": pages(2), "RD": pages(3)}, rows=128)

    assert grid_of(path).logical.tolist() == [0, 1]


def test_a_look_after_the_request_was_freed_is_left_out(tmp_path: Path) -> None:
    """Look-alike M11: one more step of a finished request sees the next owner's bytes."""
    path = write(tmp_path / "t.h5", {"ST": pages(), "RC": pages(), "RD": pages(request=1)}, freed_before="RD")

    assert states(grid_of(path), "reads") == [State.NOT_SEEN, State.NOT_SEEN]


def test_later_rungs_come_from_the_verdict(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", {"ST": pages()})

    grid = grid_of(path, Verdict("divergent", (finding("table", 1),), cleared=("read-kernel",)))

    assert states(grid, "table") == [State.NOT_JUDGED, State.DIFFERS]
    assert states(grid, "read kernel") == [State.EQUAL, State.EQUAL]
    assert states(grid, "top-k") == [State.NOT_JUDGED, State.NOT_JUDGED]


def test_a_finding_without_pages_marks_them_all(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", {"ST": pages()})

    grid = grid_of(path, Verdict("divergent", (finding("completion"),)))

    assert grid.found[STAGE["arrival"]].all()


def test_the_busiest_request_is_the_one_of_the_first_finding_or_of_most_pages(tmp_path: Path) -> None:
    with open_trace(write(tmp_path / "t.h5", {"ST": pages()})) as trace:
        assert busiest_request(trace, CLEAN) == (ROOM, 0)
        other = Finding("F14", "x", "wire", "likely", RequestId(3, 1), "decode", 0, "index_k", 0, ())
        assert busiest_request(trace, Verdict("divergent", (other,))) == (3, 1)
        assert stage_grid(trace, CLEAN, 99) is None


def hand_made(page_count: int, layer_count: int) -> StageGrid:
    rng = np.random.default_rng(page_count)
    shape = (len(STAGE), layer_count, page_count)
    return StageGrid(
        ROOM,
        0,
        tuple(STAGE),
        tuple(("index_k", layer) for layer in range(layer_count)),
        np.arange(page_count),
        np.arange(page_count) + 40,
        rng.integers(0, 4, shape).astype(np.uint8),
        rng.random(shape) < 0.1,
    )


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    return width, height


@pytest.mark.parametrize(("page_count", "layer_count"), [(1, 1), (6, 4), (200, 21)])
def test_any_size_of_request_fits_a_screen(page_count: int, layer_count: int, tmp_path: Path) -> None:
    path = tmp_path / "grid.png"

    save(draw(hand_made(page_count, layer_count), "DIVERGENT  " + "very long " * 40), path)

    width, height = png_size(path)
    assert 500 < width < 2000
    assert 400 < height < 1800


def test_the_same_grid_gives_the_same_bytes_and_its_words_are_text(tmp_path: Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        save(draw(hand_made(6, 2), "DIVERGENT  destination: late foreign write\nroom 7"), path)

    text = first.read_text()
    assert text == second.read_text()
    for word in ("late foreign write", "read kernel", "as stored", "not judged"):
        assert word in text


def test_a_row_names_the_look_that_it_shows_and_the_verdicts_rows_name_none() -> None:
    figure = draw(hand_made(1, 1), "x")

    assert [text.get_text() for text in figure.texts if text.get_text() != "x"] == [
        "store (ST)", "source (SE)", "source, after (SE+)", "arrival (RC)", "later (LT)", "reads (RD)",
        "table", "read kernel", "top-k",
    ]  # fmt: skip


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"png or \.svg"):
        save(draw(hand_made(1, 1), ""), tmp_path / "a.pdf")


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    save(draw(hand_made(2, 2), "x"), tmp_path / "a.svg")

    assert dict(matplotlib.rcParams) == before


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    import replay.judge

    def judge(trace: Trace, *_: Any) -> Verdict:
        return Verdict("divergent", (finding("destination", 1),))

    monkeypatch.setattr(replay.judge, "judge", judge)


@pytest.mark.usefixtures("judged")
def test_the_command_draws_and_never_writes_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = write(tmp_path / "t.h5", {"ST": pages(), "RD": pages(request=1)}), tmp_path / "stages.png"

    assert cli.run(["plot", str(trace), "-o", str(out)]) == 0
    assert "room 7: 2 pages in 1 layer\n" in capsys.readouterr().out
    assert png_size(out)[0] > 500
    assert cli.run(["plot", str(trace), "-o", str(out)]) == 2
    assert cli.run(["plot", str(trace), "-o", str(out), "--force", "--request", "7.0"]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["stages.png", "t.h5"]


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(
    "args", [["-o", "a.pdf"], ["-o", "a.png", "--request", "x"], ["-o", "a.png", "--request", "8"], []]
)
def test_the_command_refuses_what_it_cannot_draw(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = write(tmp_path / "t.h5", {"ST": pages()})

    assert cli.run(["plot", str(trace), *args]) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.h5"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1e-5, "<0.001"), (0.0086, "0.0086"), (1.26, "1.3"), (99.4, "99"), (99.6, "100"), (152.0, "150"),
        (20_480.0, "20,000"), (987_654.0, "990,000"), (1.9e6, "2×10⁶"), (3e38, "3×10³⁸"), (np.inf, "inf"),
    ],
)  # fmt: skip
def test_errors_of_logits_are_written_as_people_write_them(value: float, text: str) -> None:
    assert short(value) == text
