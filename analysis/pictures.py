"""From a trace and its verdict to each kind of picture: which request, which page, and what stands above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis import diff, plots
from analysis.diff.ownership import Lane, page_of
from analysis.event_text import BufferPage
from analysis.report import headline
from replay.verdict import Verdict
from replay.words import counted, verb

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from replay.trace.reader import Trace

#: Every kind of picture of one trace, in the order of the story.
KINDS = ("grid", "bytes", "rows", "ownership", "logits")
#: The kind that takes several traces.
RATE = "rate"


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure, what it is of in a few words, and how to read it."""

    kind: str
    figure: Figure
    said: str
    caption: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to draw, where the verdict is not to decide: a request, a page of it, or a physical page."""

    request: Lane | None = None
    logical: int | None = None
    layer: int | None = None
    place: BufferPage | None = None


class NothingToDrawError(Exception):
    """The trace does not hold what a picture needs; the message says what and why."""


def picture(kind: str, trace: Trace, verdict: Verdict, wanted: Wanted | None = None) -> Picture:
    """Draw one of :data:`KINDS`.

    Raises:
        NothingToDrawError: Where the trace does not hold what it takes.
    """
    wanted = wanted or Wanted()
    return {"grid": _grid, "bytes": _bytes, "rows": _rows, "ownership": _ownership, "logits": _logits}[kind](
        trace, verdict, wanted
    )


def room_text(request: Lane) -> str:
    """``room 7719``, with its attempt where it is not the first."""
    return f"room {request[0]}" + (f" attempt {request[1]}" if request[1] else "")


def _request(trace: Trace, verdict: Verdict, wanted: Wanted) -> Lane:
    chosen = wanted.request or diff.busiest_request(trace, verdict)
    if chosen is None:
        raise NothingToDrawError("this trace has no page of any request, so there is nothing to draw.")
    return chosen


def _grid(trace: Trace, verdict: Verdict, wanted: Wanted) -> Picture:
    request = _request(trace, verdict, wanted)
    grid = diff.stage_grid(trace, verdict, *request)
    if grid is None:
        raise NothingToDrawError(f"this trace has no page of {room_text(request)}.")
    said = (
        f"{room_text(request)}: {counted(len(grid.logical), 'page')} in {counted(len(grid.layers), 'layer')}"
    )
    return Picture(
        "grid",
        plots.stage_grid(grid, f"{headline(verdict)}\n{said}"),
        said,
        "Each box is one page in one layer at one stage, compared with the first stage that saw it. Rows that the "
        "prompt does not fill count for nothing.",
    )


def _bytes(trace: Trace, verdict: Verdict, wanted: Wanted) -> Picture:
    request, buffer, layer, logical = _page(trace, verdict, wanted)
    page = diff.page_bytes(trace, *request, buffer, layer, logical)
    name = f"logical page {logical} of {room_text(request)}, {buffer} layer {layer}"
    if page is None:
        raise NothingToDrawError(f"{name} was not seen at two stages, so there is nothing to compare.")
    count = page.differing
    differ = (
        "rows differ; the bytes were not kept"
        if count is None
        else f"{counted(count, 'byte')} {verb(count, 'differs', 'differ')}"
    )
    said = f"{name}: {page.stages[1]} (page {page.pages[1]}) against {page.stages[0]} (page {page.pages[0]})"
    return Picture(
        "bytes",
        plots.page_bytes(page, f"{name}\n{page.stages[1]} against {page.stages[0]}: {differ}"),
        said,
        f"Each small box is one byte of the page at stage '{page.stages[1]}' against stage '{page.stages[0]}', one "
        "line a row; values and scales lie apart in memory.",
    )


def _page(trace: Trace, verdict: Verdict, wanted: Wanted) -> tuple[Lane, str, int, int]:
    """(request, buffer, layer, logical page): as asked, else the first that a finding names, else the first seen."""
    named = None
    for finding in verdict.findings:
        request = (finding.request.room, finding.request.attempt)
        if finding.pages and wanted.request in (None, request) and wanted.layer in (None, finding.layer):
            named = request, finding.buffer, finding.layer, finding.pages[0].logical
            break
    request = _request(trace, verdict, wanted)
    if named is None:
        grid = diff.stage_grid(trace, verdict, *request)
        if grid is None or not grid.layers or not len(grid.logical):
            raise NothingToDrawError(f"this trace has no page of {room_text(request)}.")
        named = request, *grid.layers[0], int(grid.logical[0])
    request, buffer, layer, logical = named
    return (
        request,
        buffer,
        layer if wanted.layer is None else wanted.layer,
        logical if wanted.logical is None else wanted.logical,
    )


def _rows(trace: Trace, verdict: Verdict, wanted: Wanted) -> Picture:
    request = _request(trace, verdict, wanted)
    grid = diff.row_grid(trace, *request)
    if grid is None:
        raise NothingToDrawError(f"this trace has no row digests of {room_text(request)}.")
    said = f"{room_text(request)}: {counted(grid.states.shape[2], 'row')} in {counted(len(grid.layers), 'layer')}"
    return Picture(
        "rows",
        plots.row_grid(grid, f"{headline(verdict)}\n{said}"),
        said,
        "The prompt's rows from left to right, compared with the first stage that saw them. Thin lines are page "
        "borders, dashed ones the borders of the chunks in which they were sent.",
    )


def _ownership(trace: Trace, verdict: Verdict, wanted: Wanted) -> Picture:
    chosen = (wanted.place, wanted.request) if wanted.place is not None else _accused(trace, verdict, wanted)
    if chosen is None or chosen[0] is None:
        raise NothingToDrawError("no finding names a page; say which with --page BUFFER/LAYER/PAGE.")
    place, about = chosen
    page = diff.ownership(trace, place, about)
    if page is None:
        raise NothingToDrawError(f"nothing in this trace touched {place}.")
    said = f"{place}, {page.owner}: {counted(len(page.lanes), 'request')}"
    return Picture(
        "ownership",
        plots.ownership(page, f"{place}, {page.owner}\nwho owned it, and whose writes were in flight"),
        said,
        "One line a request, in the order that the trace proves, not to scale. A write that was in flight while "
        "another request owned the page is hatched.",
    )


def _accused(trace: Trace, verdict: Verdict, wanted: Wanted) -> tuple[BufferPage, Lane] | None:
    mine = [f for f in verdict.findings if wanted.request in (None, (f.request.room, f.request.attempt))]
    return page_of(trace, mine)


def _logits(trace: Trace, verdict: Verdict, wanted: Wanted) -> Picture:
    request = _request(trace, verdict, wanted)
    grid = diff.read_grid(trace, *request)
    if grid is None:
        raise NothingToDrawError(
            f"no read of {room_text(request)} was recorded with its logits and page bytes (KV_REPLAY_READ_EVERY)."
        )
    layers, steps = grid.error.shape
    said = f"{room_text(request)}: {counted(steps, 'recorded step')} in {counted(layers, 'layer')}"
    return Picture(
        "logits",
        plots.read_grid(grid, f"{headline(verdict)}\n{said}"),
        said,
        "Above: is the read kernel right on the bytes that it read? Below: how much of what it selected would the "
        "bytes as first seen have selected too?",
    )


def rate_picture(points: Sequence[diff.Rate], of: str) -> Picture:
    """Requests hit against the load."""
    hit, served = sum(point.hit for point in points), sum(point.requests for point in points)
    said = f"{counted(len(points), 'load')}: {hit:,} of {counted(served, 'request')} hit"
    return Picture(
        RATE,
        plots.rates(points, f"Requests hit against the load\n{of}"),
        said,
        "Share of the served requests that were hit at each load, with its 95 % interval.",
    )
