"""Rows that the reading side appended itself, as its own store left them.

A row's reference is the first ST snapshot that covers it: later ones show the page again, with whatever happened to
the row in between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.cells import Cells
from replay.local_writes import LocalWrites
from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def own_units(timeline: Timeline, cells: Cells, numbers: I64) -> tuple[U64, I64]:
    """Reference units of appended rows for some cells (of one number of rows a page).

    Returns:
        ``(units uint64[k, 2 * rows], snapshot int64[k, rows])``: for each row the ST snapshot (a row of
        ``Timeline.snapshots``) whose units these are, -1 where no store of the reading side covers the row.
    """
    snaps, contents = timeline.snapshots, timeline.trace.contents
    low = np.searchsorted(cells.own_cell, numbers, side="left")
    high = np.searchsorted(cells.own_cell, numbers, side="right")
    picked = [cells.own_rows[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    rows = np.concatenate([np.zeros(0, np.int64), *picked])
    owner = np.repeat(np.arange(len(numbers)), high - low)
    known = snaps.content[rows] >= 0
    rows, owner = rows[known], owner[known]
    count = _rows_per_page(timeline, cells, numbers)
    units = np.zeros((len(numbers), 2 * count), np.uint64)
    snapshot = np.full((len(numbers), count), -1, np.int64)
    if not len(rows):
        return units, snapshot
    content = snaps.content[rows]
    values = contents.row_values(content)
    scales = contents.row_scales(content).astype(np.uint64)
    told = snaps.rows[rows] - cells.logical[numbers][owner] * count
    # Earlier looks override later ones; a look that tells no length comes first of all and is overridden by any.
    sequence = np.where(snaps.rows[rows] < 0, snaps.seq[rows] - (1 << 62), -snaps.seq[rows])
    for index in np.argsort(sequence, kind="stable").tolist():
        cell = int(owner[index])
        covered = count if int(snaps.rows[rows[index]]) < 0 else int(np.clip(told[index], 0, count))
        units[cell, :covered] = values[index, :covered]
        units[cell, count : count + covered] = scales[index, :covered]
        snapshot[cell, :covered] = rows[index]
    return units, snapshot


def _rows_per_page(timeline: Timeline, cells: Cells, numbers: I64) -> int:
    slot = int(cells.slot[numbers[0]]) if len(numbers) else 0
    return next((b.layout.rows for b in timeline.buffers if timeline.slot_of_buffer[b.number] == slot), 0)


def rewritten_units(
    timeline: Timeline, cells: Cells, local: LocalWrites, number: int, look: int
) -> tuple[U64, I64]:
    """As :func:`own_units` for one cell, where rows may have been written more than once before the look.

    Speculative decoding stores rows that are not accepted and writes them anew, or moves accepted ones to their place.
    A row's reference is the first ST after the last of its writes that was over when the look began, and before the
    next one. A row that a write may have hit during the look has none.
    """
    snaps = timeline.snapshots
    units, snapshot = own_units(timeline, cells, np.array([number]))
    units, snapshot = units[0], snapshot[0]
    count = len(snapshot)
    low, high = np.searchsorted(cells.own_cell, [number, number + 1])
    stored = cells.own_rows[low:high]
    stored = stored[snaps.content[stored] >= 0]
    writes: list[list[tuple[int, int, bool]]] = [[] for _ in range(count)]
    layout = timeline.buffers[int(snaps.buffer[look])].layout
    for write in local.of_page(int(snaps.buffer[look]), int(snaps.page[look])):
        if write.padding or write.moment.process != int(snaps.process[look]):
            continue
        hit = write.mask[: layout.scale_base].reshape(count, -1).any(axis=1)
        for row in np.flatnonzero(hit).tolist():
            writes[row].append((write.moment.begin_seq, write.moment.seq, write.table == "copy"))
    begin, end = int(snaps.begin_seq[look]), int(snaps.seq[look])
    for row in range(count):
        past = [write for write in writes[row] if write[1] < begin]
        if len(writes[row]) < 2 and not any(copied for *_, copied in writes[row]):
            continue
        snapshot[row] = -1
        if any(first <= end and last >= begin for first, last, _ in writes[row]) or not past:
            continue
        until = min((first for first, _, _ in writes[row] if first > past[-1][1]), default=1 << 62)
        for reference in stored[(snaps.seq[stored] > past[-1][1]) & (snaps.seq[stored] < until)].tolist():
            rows = int(snaps.rows[reference])
            if rows >= 0 and rows - int(cells.logical[number]) * count <= row:
                continue
            content = snaps.content[[reference]]
            units[row] = timeline.trace.contents.row_values(content)[0, row]
            units[count + row] = int(timeline.trace.contents.row_scales(content)[0, row])
            snapshot[row] = reference
            break
    return units, snapshot
