"""Two traces side by side: the same requests in a good run and in a bad one, look by look and row by row.

Requests are paired first, then the looks at their pages by process, layer, logical page and stage, and their reads
(``compare_reads.py``). Physical pages and clocks have no part in it. Rows are compared as stored, values and scales
apart; only rows that both runs have count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.align import align
from replay.compare_reads import compare_reads
from replay.comparison import Comparison, Difference
from replay.page_columns import row_numbers
from replay.ranges import byte_ranges, ranges
from replay.timeline import Timeline
from replay.trace.reader import Trace
from replay.units import units_of
from replay.verdict import STAGES

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]

#: Looks in the order of the ladder: (stage of the ladder, stage and moments of the snapshot).
LOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("store", "ST", ("",)),
    ("source", "SE", ("before", "")),
    ("source", "SE", ("after",)),
    ("wire", "RC", ("",)),
    ("completion", "LT", ("", "end")),
    ("destination", "RD", ("before", "")),
    ("destination", "RD", ("after",)),
)
#: Looks whose units are held at once: 2 x 8,192 x 1 KB = 16 MB.
_CHUNK = 8192


def compare(good: Trace, bad: Trace, progress: Progress | None = None) -> Comparison:
    """Compare two traces.

    Raises:
        TraceError: one of them is damaged.
    """
    left, right = Timeline(good), Timeline(bad)
    pairs, alone_good, alone_bad = align(left, right)
    found = Comparison(pairs, alone_good, alone_bad)
    _pages(left, right, found, progress)
    compare_reads(left, right, found)
    numbers = {id(pair): n for n, pair in enumerate(pairs)}
    found.differences.sort(
        key=lambda d: (
            d.appended,
            STAGES.index(d.stage),
            max(d.read, 0),
            numbers[id(d.pair)],
            d.layer,
            d.logical,
        )
    )
    return found


@dataclass(frozen=True, slots=True)
class _Looks:
    """Looks of one trace at the pages of paired requests; ``key`` columns are the same in both traces."""

    key: I64  #: int64[n, 7]: pair, look, read, role and rank, buffer and layer, logical
    row: I64  #: row of Timeline.snapshots
    rows: I64  #: rows of the page that exist at this look
    prompt: I64  #: rows of it that the prompt fills


def _pages(left: Timeline, right: Timeline, found: Comparison, progress: Progress | None) -> None:
    sides = sorted({(p.role, p.rank) for t in (left, right) for p in t.trace.processes})
    slots = sorted({*left.slots, *right.slots})
    one = _looks(left, [pair.good for pair in found.pairs], sides, slots)
    other = _looks(right, [pair.bad for pair in found.pairs], sides, slots)
    here, there = _common(one.key, other.key)
    for start in range(0, len(here), _CHUNK):
        if progress is not None:
            progress("comparing looks at pages", start, len(here))
        part = slice(start, start + _CHUNK)
        for mask in _by_layout(left, right, one.row[here[part]], other.row[there[part]], found):
            _compare(left, right, one, other, here[part][mask], there[part][mask], sides, slots, found)


def _looks(
    timeline: Timeline,
    requests: list[tuple[int, int]],
    sides: list[tuple[str, int]],
    slots: list[tuple[str, int]],
) -> _Looks:
    snaps = timeline.snapshots
    pair_of = np.full(len(timeline.requests) + 1, -1, np.int64)
    for number, name in enumerate(requests):
        pair_of[timeline.request_number(*name)] = number
    look = np.full(len(snaps.stage), -1, np.int64)
    for number, (_, stage, moments) in enumerate(LOOKS):
        look[(snaps.stage == stage) & np.isin(snaps.moment.astype(str), moments)] = number
    side = np.array([sides.index((p.role, p.rank)) for p in timeline.trace.processes] or [0], np.int64)
    slot = np.array([slots.index(name) for name in timeline.slots] or [0], np.int64)
    gone = timeline.owners.lost(snaps.process, snaps.request, snaps.page, snaps.seq)
    rows = np.flatnonzero(
        (pair_of[snaps.request] >= 0)
        & (look[snaps.event] >= 0)
        & (snaps.slot >= 0)
        & (snaps.content >= 0)
        & ~gone
    )
    chosen = look[snaps.event[rows]]
    key = np.stack(
        [
            pair_of[snaps.request[rows]],
            chosen,
            np.full(len(rows), -1, np.int64),
            side[snaps.process[rows]],
            slot[snaps.slot[rows]],
            snaps.logical[rows],
        ],
        1,
    )
    reads = np.flatnonzero(np.array([name == "RD" for _, name, _ in LOOKS])[chosen])
    key[reads, 2] = _ordinal(key[reads][:, [0, 3, 4]], snaps.step[rows[reads]])
    # The last look of each kind counts: chunks of a prompt look at a page more than once.
    latest = np.lexsort((snaps.seq[rows], *key.T[::-1]))
    last = np.ones(len(rows), bool)
    last[:-1] = (key[latest][1:] != key[latest][:-1]).any(axis=1)
    keep = latest[last]
    rows, key = rows[keep], key[keep]
    per_page = np.array([_rows_of(timeline, name) for name in timeline.slots] or [0], np.int64)[
        snaps.slot[rows]
    ]
    start = snaps.logical[rows] * per_page
    told = timeline.request_rows[snaps.request[rows]]
    prompt = np.clip(told - start, 0, per_page)
    exist = np.where(snaps.rows[rows] >= 0, np.clip(snaps.rows[rows] - start, 0, per_page), prompt)
    return _Looks(key, rows, exist, np.minimum(prompt, exist))


def _rows_of(timeline: Timeline, name: tuple[str, int]) -> int:
    return next(b.layout.rows for b in timeline.buffers if (b.name, b.layer) == name)


def _ordinal(group: I64, step: I64) -> I64:
    """Number of each step among the distinct steps of its group (request, side, layer)."""
    if not len(step):
        return step
    names, inverse = np.unique(np.column_stack([group, step]), axis=0, return_inverse=True)
    new = np.ones(len(names), bool)
    new[1:] = (names[1:, :-1] != names[:-1, :-1]).any(axis=1)
    first = np.maximum.accumulate(np.where(new, np.arange(len(names)), 0))
    return np.asarray((np.arange(len(names)) - first)[inverse.reshape(-1)], np.int64)


def _common(one: I64, other: I64) -> tuple[I64, I64]:
    """Rows of both whose keys are equal, in the order of the keys; keys are distinct within each."""
    both = np.concatenate([one, other])
    if not len(both):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    number = row_numbers(both)
    _, here, there = np.intersect1d(number[: len(one)], number[len(one) :], return_indices=True)
    return here.astype(np.int64), there.astype(np.int64)


def _by_layout(left: Timeline, right: Timeline, one: I64, other: I64, found: Comparison) -> Iterator[Bool]:
    """Masks of looks whose pages have one format on both sides; the others are counted as not compared."""
    formats = sorted({b.layout.name for t in (left, right) for b in t.buffers})
    codes = [
        np.array([formats.index(b.layout.name) for b in t.buffers] or [0], np.int64) for t in (left, right)
    ]
    a, b = codes[0][left.snapshots.buffer[one]], codes[1][right.snapshots.buffer[other]]
    known = (left.trace.contents.rows[left.snapshots.content[one]] > 0) & (
        right.trace.contents.rows[right.snapshots.content[other]] > 0
    )
    for why, mask in (("page formats differ", a != b), ("no row digests were recorded", (a == b) & ~known)):
        if mask.any():
            found.not_compared[why] = found.not_compared.get(why, 0) + int(mask.sum())
    for code in np.unique(a[(a == b) & known]).tolist():
        yield (a == code) & (b == code) & known


def _compare(
    left: Timeline,
    right: Timeline,
    one: _Looks,
    other: _Looks,
    here: I64,
    there: I64,
    sides: list[tuple[str, int]],
    slots: list[tuple[str, int]],
    found: Comparison,
) -> None:
    """Compare looks of one page format, and note those that differ."""
    rows = np.minimum(one.rows[here], other.rows[there])
    looks = one.key[here, 1]
    for number, (stage, _, _) in enumerate(LOOKS):
        found.compared[stage] = found.compared.get(stage, 0) + int(((looks == number) & (rows > 0)).sum())
    mine, theirs = left.snapshots.content[one.row[here]], right.snapshots.content[other.row[there]]
    unlike = (left.trace.contents.digests[mine] != right.trace.contents.digests[theirs]).any(axis=1)
    chosen = np.flatnonzero(unlike & (rows > 0))
    if not len(chosen):
        return
    units, others = units_of(left, mine[chosen]), units_of(right, theirs[chosen])
    row_of_unit = np.tile(np.arange(units.shape[1] // 2), 2)
    differs = (units != others) & (row_of_unit < rows[chosen, None])
    for index in np.flatnonzero(differs.any(axis=1)).tolist():
        at = int(chosen[index])
        prompt = int(min(one.prompt[here[at]], other.prompt[there[at]]))
        in_prompt = row_of_unit < prompt
        places = (int(one.row[here[at]]), int(other.row[there[at]]))
        for appended, bad in ((False, differs[index] & in_prompt), (True, differs[index] & ~in_prompt)):
            if bad.any():
                key = one.key[here[at]].tolist()
                found.differences.append(
                    _difference(left, right, places, key, bad, appended, sides, slots, found)
                )


def _difference(
    left: Timeline,
    right: Timeline,
    places: tuple[int, int],
    key: list[int],
    bad: Bool,
    appended: bool,
    sides: list[tuple[str, int]],
    slots: list[tuple[str, int]],
    found: Comparison,
) -> Difference:
    pair, look, read, side, slot, logical = key
    stage, name, moments = LOOKS[look]
    layout = left.buffers[int(left.snapshots.buffer[places[0]])].layout
    half = len(bad) // 2
    spans, count = byte_ranges(
        layout, bad[:half], bad[half:], _data(left, places[0], layout), _data(right, places[1], layout)
    )
    return Difference(
        stage=stage,
        look=f"{name} {moments[0]}".strip(),
        pair=found.pairs[pair],
        role=sides[side][0],
        rank=sides[side][1],
        buffer=slots[slot][0],
        layer=slots[slot][1],
        logical=logical,
        page_good=int(left.snapshots.page[places[0]]),
        page_bad=int(right.snapshots.page[places[1]]),
        read=read,
        appended=appended,
        value_rows=ranges(bad[:half]),
        scale_rows=ranges(bad[half:]) if layout.scale_bytes else (),
        byte_ranges=spans,
        bytes_differing=count,
    )


def _data(timeline: Timeline, row: int, layout: Layout) -> npt.NDArray[np.uint8] | None:
    content = int(timeline.snapshots.content[row])
    contents = timeline.trace.contents
    if not contents.has_data[content]:
        return None
    data = np.asarray(contents.data(np.array([content]))[0])
    return data if len(data) == layout.page_bytes else None
