"""Who owned a physical page when, who wrote to it, and who looked, in the order that the trace proves.

Positions are places in that order, not times: a request lives for seconds on a page and is overtaken within
microseconds. Times stand beside them, for hosts whose clocks compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.event_text import BufferPage, Entry
from analysis.timeline_text import page_entries

if TYPE_CHECKING:
    from replay.trace.reader import Trace
    from replay.verdict import Finding

F64 = npt.NDArray[np.float64]

#: Positions that one picture can hold.
MAX_POSITIONS = 400
#: Kinds of entries whose runs by one request are one position.
_RUNS = ("read", "look")
#: States after which a transfer writes no more. A handle that is released early is no proof of it.
_OVER = ("done", "error")

Lane = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted: ``kind`` is "owned", "write" (a transfer into the page) or "send" (one out of it).

    ``begin`` and ``end`` are positions; ``open``: no end was recorded.
    """

    kind: str
    lane: int
    begin: int
    end: int
    open: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something at one position: ``kind`` is "store", "copy", "read", "look" or "announce"; ``count`` in a row."""

    kind: str
    lane: int
    at: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Ownership:
    """The life of one physical page.

    Attributes:
        place: The page.
        owner: Role and rank of its process.
        lanes: (room, attempt) of each request that had to do with it, in order of appearance.
        spans: What lasted.
        marks: What happened at one position.
        contested: (writer's lane, owner's lane, begin, end): a write was in flight while another owned the page.
        ms: float64[positions], milliseconds since the first; NaN where clocks do not compare.
        left_out: requests that had the page at other times and are not shown.
    """

    place: BufferPage
    owner: str
    lanes: tuple[Lane, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    contested: tuple[tuple[int, int, int, int], ...]
    ms: F64
    left_out: int = 0


def page_of(trace: Trace, findings: Iterable[Finding]) -> tuple[BufferPage, Lane] | None:
    """The first page that one of ``findings`` names, and the request it is about."""
    for finding in findings:
        for process, info in enumerate(trace.processes):
            if finding.pages and (info.role, info.rank) == (finding.role, finding.rank):
                place = BufferPage(process, finding.buffer, finding.layer, finding.pages[0].physical)
                return place, (finding.request.room, finding.request.attempt)
    return None


def ownership(trace: Trace, place: BufferPage, about: Lane | None = None) -> Ownership | None:
    """The life of ``place``; None where nothing touched it.

    ``about`` is the request in question: then only it, those whose ownership or writes overlap its own, and the owners
    before and after it are shown. Without it the whole life is, up to ``MAX_POSITIONS`` positions.
    """
    entries = [entry for entry in page_entries(trace, place) if entry.room >= 0 or entry.transfer >= 0]
    named = _named(entries, place)
    shown = _chosen(named, about)
    kept = [(entry, lane) for entry, lane in named if lane in shown]
    positions = _positions(kept)[:MAX_POSITIONS]
    if not positions:
        return None
    lanes = list(dict.fromkeys(lane for _, lane, _ in positions))
    spans, marks = _drawn(positions, lanes, place)
    info = trace.processes[place.process]
    one_host = len({trace.processes[entry.moment.process].host for entry, _, _ in positions}) == 1
    ns = np.array([entry.begin_ns for entry, _, _ in positions], np.float64)
    return Ownership(
        place=place,
        owner=f"{info.role} rank {info.rank}",
        lanes=tuple(lanes),
        spans=tuple(spans),
        marks=tuple(marks),
        contested=tuple(_contested(spans)),
        ms=(ns - ns[0]) / 1e6 if one_host else np.full(len(ns), np.nan),
        left_out=len({lane for _, lane in named} - set(lanes)),
    )


def _named(entries: Iterable[Entry], place: BufferPage) -> list[tuple[Entry, Lane]]:
    """Each entry with its request; a sender's states may name their transfer alone."""
    owner: dict[tuple[int, int], Lane] = {}
    found = []
    for entry in entries:
        transfer = (entry.moment.process, entry.transfer)
        if entry.room >= 0:
            lane = (entry.room, max(entry.attempt, 0))
            if entry.kind == "send":
                owner[transfer] = lane
        elif transfer in owner:
            lane = owner[transfer]
        else:
            continue
        found.append((entry, lane))
    return found


def _chosen(named: Sequence[tuple[Entry, Lane]], about: Lane | None) -> set[Lane]:
    """The requests to show."""
    everyone = {lane for _, lane in named}
    if about not in everyone:
        return everyone
    reach: dict[Lane, list[int]] = {}
    owned: dict[Lane, int] = {}
    for number, (entry, lane) in enumerate(named):
        reach.setdefault(lane, [number, number])[1] = number
        if entry.kind == "alloc":
            owned.setdefault(lane, number)
    begin, end = reach[about]
    shown = {lane for lane, (first, last) in reach.items() if first <= end and last >= begin}
    before = [lane for lane, at in owned.items() if at < owned.get(about, begin) and lane not in shown]
    after = [lane for lane, at in owned.items() if at > end and lane not in shown]
    return shown | set(before[-1:]) | set(after[:1])


def _kind(entry: Entry) -> str:
    names = {"snapshot": "look", "receive": "announce", "transfer_state": "state"}
    if entry.state in _OVER:
        return "over"
    return names.get(entry.kind, entry.kind)


def _positions(kept: Iterable[tuple[Entry, Lane]]) -> list[tuple[Entry, Lane, int]]:
    """(first entry, request, how many in a row) of each position."""
    found: list[tuple[Entry, Lane, int]] = []
    for entry, lane in kept:
        kind = _kind(entry)
        if kind == "state":
            continue
        if found and kind in _RUNS and (_kind(found[-1][0]), found[-1][1]) == (kind, lane):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((entry, lane, 1))
    return found


def _drawn(
    positions: Sequence[tuple[Entry, Lane, int]], lanes: Sequence[Lane], place: BufferPage
) -> tuple[list[Span], list[Mark]]:
    spans: list[Span] = []
    marks: list[Mark] = []
    owning: dict[Lane, int] = {}
    flying: dict[tuple[int, int], tuple[int, str, int]] = {}
    last = len(positions) - 1
    for at, (entry, lane, count) in enumerate(positions):
        kind, number = _kind(entry), lanes.index(lane)
        transfer = (entry.moment.process, entry.transfer)
        if kind == "alloc":
            owning.setdefault(lane, at)
        elif kind == "free":
            spans.append(Span("owned", number, owning.pop(lane, 0), at))
        elif kind == "send":
            flying[transfer] = at, "send" if entry.moment.process == place.process else "write", number
        elif kind == "over":
            if transfer in flying:
                begin, what, writer = flying.pop(transfer)
                spans.append(Span(what, writer, begin, at))
        else:
            marks.append(Mark(kind, number, at, count))
    spans += [Span("owned", lanes.index(lane), begin, last, True) for lane, begin in owning.items()]
    spans += [Span(what, writer, begin, last, True) for begin, what, writer in flying.values()]
    return sorted(spans, key=lambda span: (span.lane, span.begin)), marks


def _contested(spans: Sequence[Span]) -> list[tuple[int, int, int, int]]:
    found = []
    for write in spans:
        for owned in spans:
            begin, end = max(write.begin, owned.begin), min(write.end, owned.end)
            if (write.kind, owned.kind) == ("write", "owned") and write.lane != owned.lane and begin < end:
                found.append((write.lane, owned.lane, begin, end))
    return found
