"""The table rung: the block table that each read used against the allocator's record.

A read that began after its request had given its pages back is an overshoot step (look-alike M11) and is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.order import Moment
from replay.timeline import Timeline

if TYPE_CHECKING:
    from replay.trace.reader import Ragged

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableCase:
    """One read whose table differs from what the allocator gave its request."""

    read: int  #: row of the read table
    process: int
    request: int
    buffer: int  #: number in Timeline.buffers
    logical: tuple[int, ...]
    seen: tuple[int, ...]
    given: tuple[int, ...]
    during: bool  #: the table was right before the kernel and wrong after it
    moment: Moment


@dataclass(frozen=True, slots=True)
class TableRung:
    """Result of the rung."""

    cases: list[TableCase]
    reads: int  #: reads judged
    overshoot: int  #: reads of requests whose pages had been freed
    unknown: int  #: reads with entries that no allocation record covers
    changed: frozenset[
        int
    ]  #: reads whose table changed while the kernel ran, or differs from the allocator's


def judge_tables(timeline: Timeline) -> TableRung:
    """Compare every table that was recorded with the allocations of its request."""
    reads = timeline.trace.table("read")
    request = timeline.request_column("read")
    buffer = timeline.buffer_column("read")
    process = reads["process"].astype(np.int64)
    late = timeline.owners.over(process, request, reads["seq"])
    rows_per_page = np.array([b.layout.rows for b in timeline.buffers] or [1], np.int64)
    per_page = rows_per_page[np.maximum(buffer, 0)]
    needed = -(-reads["rows"].astype(np.int64) // per_page)
    layers = np.array([b.layer for b in timeline.buffers] or [0], np.int64)[np.maximum(buffer, 0)]
    said = ~timeline.beside[request] & timeline.scope.layers_in(layers)
    judged = ~late & (buffer >= 0) & (request >= 0) & said

    found: dict[int, dict[int, tuple[int, int, bool]]] = {}
    unknown: set[int] = set()
    for column, during in (("table", False), ("table_after", True)):
        table = reads.ragged(column)
        owner = np.asarray(table.owner(), np.int64)
        index = np.arange(len(owner)) - np.asarray(table.offsets, np.int64)[owner]
        wanted = judged[owner] & (index < needed[owner])
        owner, index, seen = owner[wanted], index[wanted], np.asarray(table.values, np.int64)[wanted]
        right = timeline.owners.given_at(process[owner], request[owner], index, reads["seq"][owner])
        known = right >= 0
        unknown.update(owner[~known].tolist())
        for row in np.flatnonzero(known & (right != seen)).tolist():
            entry = (int(seen[row]), int(right[row]), during)
            found.setdefault(int(owner[row]), {}).setdefault(int(index[row]), entry)
    cases = []
    for read in sorted(found):
        entries = found[read]
        logical = sorted(entries)
        cases.append(
            TableCase(
                read=read,
                process=int(process[read]),
                request=int(request[read]),
                buffer=int(buffer[read]),
                logical=tuple(logical),
                seen=tuple(entries[k][0] for k in logical),
                given=tuple(entries[k][1] for k in logical),
                during=all(entries[k][2] for k in logical),
                moment=timeline.moment("read", read),
            )
        )
    changed = set(_changed(reads.ragged("table"), reads.ragged("table_after"), needed).tolist())
    return TableRung(
        cases=cases,
        reads=int(judged.sum()),
        overshoot=int((late & said).sum()),
        unknown=len(unknown),
        changed=frozenset(changed | set(found)),
    )


def _changed(before: Ragged, after: Ragged, needed: I64) -> I64:
    """Reads whose table after the kernel is not the one before it, as far as the read needs it."""
    taken = np.flatnonzero(after.lengths > 0)
    other = np.minimum(before.lengths, needed) != np.minimum(after.lengths, needed)
    alike = taken[~other[taken]]
    one, two = (side.take(alike) for side in (before, after))
    # Both have the entries that are needed; behind them they may be of different lengths.
    owner = one.owner()
    index = np.arange(len(owner)) - one.offsets[owner]
    wanted = index < needed[alike][owner]
    owner, index = owner[wanted], index[wanted]
    differs = one.values[wanted] != two.values[two.offsets[owner] + index]
    return np.concatenate([taken[other[taken]], alike[np.unique(owner[differs])]])
