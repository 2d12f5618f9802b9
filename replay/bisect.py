"""The ladder: compares the stages of every cell and keeps the cells where bytes that matter differ.

The comparison is by *units*: the digest of each row's values, then the scale word of each row, ``2 * rows``
numbers a page. Values and scales are told apart because a torn copy cuts them at different rows. Only units of
valid rows count. Whole columns of content ids are compared first; units are read only for pages that differ
(a last page may differ legitimately past its valid rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.appended import own_units, rewritten_units
from replay.cells import Cells, build_cells
from replay.local_writes import LocalWrites
from replay.order import Moment
from replay.page_columns import BufferInfo, column_at
from replay.timeline import Timeline
from replay.units import units_of

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

#: Cells whose units are held at once: 16,384 cells x 8 stages x 1 KB = 128 MB.
CHUNK = 16_384

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Case:
    """One cell in which something differs, with everything a classifier may ask about it.

    The ``*_bad`` masks are the units that are wrong at each rung.
    """

    timeline: Timeline
    cell: int
    process: int
    request: int
    slot: int
    logical: int
    page: int
    buffer: BufferInfo
    valid: Bool  #: units that matter
    rows: dict[
        str, int
    ]  #: stage -> row of Timeline.snapshots; "RD" the first wrong read, "OWN" the reader's own ST
    units: dict[str, U64]  #: stage -> units
    source_bad: Bool = field(default_factory=lambda: np.zeros(0, bool))
    wire_bad: Bool = field(default_factory=lambda: np.zeros(0, bool))
    later_bad: Bool = field(default_factory=lambda: np.zeros(0, bool))
    appended_bad: Bool = field(default_factory=lambda: np.zeros(0, bool))
    read_bad: Bool = field(default_factory=lambda: np.zeros(0, bool))
    reads: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  #: all read snapshots of the cell
    #: Whether the descriptors bring the page whole from its own source: "right", "wrong", "unknown" (no sends seen)
    delivery: Literal["right", "wrong", "unknown"] = "unknown"

    @property
    def layout(self) -> Layout:
        """Page format of the destination buffer."""
        return self.buffer.layout

    def same(self, stage: str, other: str) -> Bool:
        """Units that are equal in two stages; all False where one is missing."""
        if stage not in self.units or other not in self.units:
            return np.zeros(len(self.valid), bool)
        return np.asarray(self.units[stage] == self.units[other])

    def has(self, *stages: str) -> bool:
        """Whether all of ``stages`` were seen."""
        return all(stage in self.units for stage in stages)

    def moment(self, stage: str) -> Moment:
        """The interval of a stage's snapshot."""
        return self.timeline.snapshots.moment_of(self.rows[stage])

    def data(self, stage: str) -> U8 | None:
        """Page bytes of a stage, None where they were not kept."""
        if stage not in self.rows:
            return None
        content = int(self.timeline.snapshots.content[self.rows[stage]])
        contents = self.timeline.trace.contents
        if content < 0 or not contents.has_data[content]:
            return None
        return np.asarray(contents.data(np.array([content]))[0])

    @property
    def sent_here(self) -> bool:
        """Whether the side that is judged sent the page itself: its looks at the send say nothing of its reads."""
        row = self.rows.get("SE", self.rows.get("SE+", -1))
        return row >= 0 and int(self.timeline.snapshots.process[row]) == self.process

    @property
    def room(self) -> int:
        """Room of the request."""
        return self.timeline.requests[self.request][0]


@dataclass(slots=True)
class Ladder:
    """Result of the byte rungs."""

    cells: Cells
    cases: list[Case]
    pages_judged: dict[str, int]
    missing: dict[str, Bool]  #: stage -> expected cells that lack it
    reads_checked: int
    unjudged_reads: int  #: read snapshots with nothing to compare them with
    requests: I64  #: numbers of the requests that have cells


def climb(timeline: Timeline, progress: Progress | None = None, local: LocalWrites | None = None) -> Ladder:
    """Compare ST = SE = RC = LT = RD for every cell of the trace."""
    local = local or LocalWrites(timeline)
    cells = build_cells(timeline, local.origins)
    snaps = timeline.snapshots
    content = {name: column_at(snaps.content, rows) for name, rows in cells.stage.items()}
    matters = cells.valid > 0
    suspect = np.zeros(len(cells), bool)
    for first, second in (
        ("ST", "SE"),
        ("ST", "SE+"),
        ("SE", "RC"),
        ("SE+", "RC"),
        ("RC", "LT"),
        ("ST", "RC"),
    ):
        both = (content[first] >= 0) & (content[second] >= 0)
        suspect |= both & (content[first] != content[second]) & matters
    bad_reads, checked, unjudged = _bad_reads(timeline, cells, local, content, progress)
    reads_of: dict[int, tuple[int, Bool, Bool]] = {}
    for row, number, differs, appended in bad_reads:
        if number in reads_of:
            continue
        reads_of[number] = (row, differs, appended)
        suspect[number] = True
    cases = list(_cases(timeline, cells, local, content, np.flatnonzero(suspect), reads_of, progress))
    matters &= cells.said
    expected = cells.expected & matters
    return Ladder(
        cells=cells,
        cases=cases,
        pages_judged={
            name: int(((rows >= 0) & matters).sum()) for name, rows in content.items() if name != "CP"
        },
        missing={name: expected & (content[name] < 0) for name in ("ST", "SE", "RC")},
        reads_checked=checked,
        unjudged_reads=unjudged,
        requests=np.unique(cells.request),
    )


def _groups(timeline: Timeline, slots: I64) -> Iterator[Bool]:
    """Masks of rows whose pages have the same number of rows (formats of a trace may differ)."""
    rows = np.zeros(max(1, len(timeline.slots)), np.int64)
    for buffer in timeline.buffers:
        rows[timeline.slot_of_buffer[buffer.number]] = buffer.layout.rows
    for count in np.unique(rows[slots]):
        yield rows[slots] == count


def _bad_reads(
    timeline: Timeline, cells: Cells, local: LocalWrites, content: dict[str, I64], progress: Progress | None
) -> tuple[list[tuple[int, int, Bool, Bool]], int, int]:
    """Read snapshots that differ from what the page should hold: (row, cell, prompt units, appended units)."""
    snaps = timeline.snapshots
    reads, number = cells.reads, cells.read_cell
    base = content["RC"].copy()
    for name in ("SE+", "SE", "ST"):
        # What the sender looks at as it posts is no source of its own reads: the pass that wrote the page made them.
        sent_here = column_at(snaps.process, cells.stage[name]) == cells.process
        found_there = np.where(sent_here & (name != "ST"), -1, content[name])
        base = np.where(base < 0, found_there, base)
    own = column_at(snaps.content, cells.own_store)
    source = np.where(content["SE"] >= 0, content["SE"], content["SE+"])
    source = np.where(source < 0, content["ST"], source)
    seen = snaps.content[reads]
    judged = (seen >= 0) & ((base[number] >= 0) | (own[number] >= 0) | (cells.valid[number] == 0))
    same = (seen == base[number]) | ((seen == own[number]) & (cells.valid[number] == 0))
    candidates = np.flatnonzero(judged & ~same)
    found: list[tuple[int, int, Bool, Bool]] = []
    for group in _groups(timeline, cells.slot[number[candidates]]):
        chosen = candidates[group]
        for start in range(0, len(chosen), CHUNK):
            part = chosen[start : start + CHUNK]
            if progress is not None:
                progress("reads", start, len(chosen))
            found += _compare_reads(timeline, cells, local, part, base, source)
    found.sort(key=lambda item: (int(snaps.process[item[0]]), int(snaps.seq[item[0]])))
    said = cells.said[number]
    return found, int((judged & said).sum()), int((~judged & said).sum())


def _compare_reads(
    timeline: Timeline, cells: Cells, local: LocalWrites, part: I64, base: I64, source: I64
) -> Iterator[tuple[int, int, Bool, Bool]]:
    snaps = timeline.snapshots
    rows, number = cells.reads[part], cells.read_cell[part]
    now = units_of(timeline, snaps.content[rows])
    count = now.shape[1] // 2
    row_of_unit = np.tile(np.arange(count), 2)
    valid = cells.valid[number]
    # Rows that exist at the read; where nobody told the length, only the prompt rows are judged.
    told = snaps.rows[rows]
    exists = np.where(told >= 0, np.clip(told - cells.logical[number] * count, 0, count), valid)
    in_prompt = row_of_unit < np.minimum(valid, exists)[:, None]
    appended = (row_of_unit >= valid[:, None]) & (row_of_unit < exists[:, None])
    differs = np.zeros(now.shape, bool)
    present = base[number] >= 0
    if present.any():
        differs[present] |= (now[present] != units_of(timeline, base[number][present])) & in_prompt[present]
    if appended.any():
        should, known = own_units(timeline, cells, number)
        # A row that was stored only after the read was not there yet: a length that is too long, no other's bytes.
        there = (known >= 0) & (snaps.begin_seq[np.maximum(known, 0)] < snaps.seq[rows][:, None])
        appended &= np.tile(there, 2)
        wrong = (now != should) & appended
        for at in np.flatnonzero(wrong.any(axis=1)).tolist():
            again, seen = rewritten_units(timeline, cells, local, int(number[at]), int(rows[at]))
            wrong[at] = (now[at] != again) & appended[at] & np.tile(seen >= 0, 2)
        differs |= wrong
    # Bytes that arrived after the completion was told are right by now: the wire rung has them already.
    healed = source[number] >= 0
    if healed.any():
        differs[healed] &= (now[healed] != units_of(timeline, source[number][healed])) | ~in_prompt[healed]
    for index in np.flatnonzero(differs.any(axis=1)):
        hit = differs[index]
        yield int(rows[index]), int(number[index]), hit & in_prompt[index], hit & appended[index]


def _cases(
    timeline: Timeline,
    cells: Cells,
    local: LocalWrites,
    content: dict[str, I64],
    suspects: I64,
    reads_of: dict[int, tuple[int, Bool, Bool]],
    progress: Progress | None,
) -> Iterator[Case]:
    snaps = timeline.snapshots
    for group in _groups(timeline, cells.slot[suspects]):
        chosen = suspects[group]
        for start in range(0, len(chosen), CHUNK):
            part = chosen[start : start + CHUNK]
            if progress is not None:
                progress("pages", start, len(chosen))
            units: dict[str, tuple[Bool, U64]] = {}
            for name, ids in content.items():
                present = ids[part] >= 0
                if present.any():
                    read = units_of(timeline, ids[part][present])
                    full = np.zeros((len(part), read.shape[1]), np.uint64)
                    full[present] = read
                    units[name] = (present, full)
            yield from _chunk_cases(timeline, cells, local, part, units, reads_of, snaps.page)


def _chunk_cases(
    timeline: Timeline,
    cells: Cells,
    local: LocalWrites,
    part: I64,
    units: dict[str, tuple[Bool, U64]],
    reads_of: dict[int, tuple[int, Bool, Bool]],
    page: I64,
) -> Iterator[Case]:
    width = max((full.shape[1] for _, full in units.values()), default=0)
    if width == 0:
        return
    row_of_unit = np.tile(np.arange(width // 2), 2)
    valid = row_of_unit < cells.valid[part][:, None]

    def differ(first: str, second: str) -> Bool:
        if first not in units or second not in units:
            return np.zeros(valid.shape, bool)
        (has_first, left), (has_second, right) = units[first], units[second]
        both = (has_first & has_second)[:, None]
        return np.asarray((left != right) & both & valid)

    sort = np.argsort(cells.read_cell, kind="stable")
    by_cell = cells.reads[sort]
    low = np.searchsorted(cells.read_cell[sort], part, side="left")
    high = np.searchsorted(cells.read_cell[sort], part, side="right")
    has_rc = units["RC"][0] if "RC" in units else np.zeros(len(part), bool)
    has_se = units["SE"][0] if "SE" in units else np.zeros(len(part), bool)
    has_after = units["SE+"][0] if "SE+" in units else np.zeros(len(part), bool)
    # Rows that the last ST we have can know of; a later one may have been lost.
    told = column_at(timeline.snapshots.rows, cells.stage["ST"][part])
    told = np.where((cells.stage["ST"][part] >= 0) & (told >= 0), told, np.iinfo(np.int64).max // 2)
    stored = row_of_unit < (told - cells.logical[part] * (width // 2))[:, None]
    from_before, from_after = differ("SE", "RC"), differ("SE+", "RC")
    # What the wire carried is the source at some time between the two snapshots of it.
    wire_bad = np.where((has_se & has_after)[:, None], from_before & from_after, from_before | from_after)
    # Without any look at the source, its finished store stands for it.
    wire_bad |= differ("ST", "RC") & stored & ~(has_se | has_after)[:, None]
    # Bytes that equal the finished store are right, whatever the source looked like at the post.
    if "ST" in units and "RC" in units:
        wire_bad &= differ("ST", "RC") | ~(units["ST"][0] & has_rc)[:, None] | ~stored
    source_differs = (differ("ST", "SE") | differ("ST", "SE+")) & stored
    # A source that differed but whose bytes arrived right in the end harmed nothing (a hazard).
    source_bad = source_differs & np.where(has_rc[:, None], differ("ST", "RC") & ~wire_bad, True)
    later = differ("RC", "LT")
    for index, number in enumerate(part.tolist()):
        read_row, prompt_bad, appended_bad = reads_of.get(number, (-1, None, None))
        anything = source_differs[index] | wire_bad[index] | later[index]
        if prompt_bad is None and not anything.any():
            continue
        rows = {name: int(cells.stage[name][number]) for name in units if units[name][0][index]}
        have = {name: full[index] for name, (present, full) in units.items() if present[index]}
        if read_row >= 0:
            rows["RD"] = read_row
            have["RD"] = units_of(timeline, timeline.snapshots.content[[read_row]])[0]
        if appended_bad is not None and appended_bad.any():
            should, known = rewritten_units(timeline, cells, local, number, read_row)
            rows["OWN"] = int(known[int(np.flatnonzero(appended_bad)[0]) % (width // 2)])
            have["OWN"] = should
        buffer = _destination(timeline, cells, number, rows)
        if buffer is None:
            continue
        destination = next((rows[name] for name in ("RD", "LT", "RC") if name in rows), -1)
        none = np.zeros(width, bool)
        yield Case(
            timeline=timeline,
            cell=number,
            process=int(cells.process[number]),
            request=int(cells.request[number]),
            slot=int(cells.slot[number]),
            logical=int(cells.logical[number]),
            page=int(page[destination]) if destination >= 0 else -1,
            buffer=buffer,
            valid=valid[index],
            rows=rows,
            units=have,
            source_bad=source_bad[index],
            wire_bad=wire_bad[index],
            later_bad=later[index],
            appended_bad=none if appended_bad is None else appended_bad,
            read_bad=none if prompt_bad is None else prompt_bad,
            reads=by_cell[low[index] : high[index]],
        )


def _destination(timeline: Timeline, cells: Cells, number: int, rows: dict[str, int]) -> BufferInfo | None:
    for name in ("RD", "LT", "RC"):
        if name in rows:
            buffer = int(timeline.snapshots.buffer[rows[name]])
            return timeline.buffers[buffer] if buffer >= 0 else None
    process, slot = int(cells.process[number]), int(cells.slot[number])
    for info in timeline.buffers:
        if info.process == process and timeline.slot_of_buffer[info.number] == slot:
            return info
    return None
