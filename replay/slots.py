"""The slots that stores wrote to against the allocator's record: row r of a request belongs into its page r // rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]

#: Stores that are judged at once: 256 of 4,096 rows are some 100 MB.
_STORES = 256


@dataclass(frozen=True, slots=True)
class SlotCase:
    """One store of which some rows went to other slots than their own. Columns, one row a misplaced row."""

    store: int  #: row of the store table
    process: int
    request: int
    buffer: int
    logical: I64  #: rows within the request
    slots: I64  #: where they were written
    right: I64  #: where they belong


def judge_slots(timeline: Timeline) -> list[SlotCase]:
    """Compare the slots of every store that tells its rows with the allocations of its request.

    Padding rows (no row of the request), drafts and rows of pages without an allocation record are left out.
    """
    stores = len(timeline.trace.table("store"))
    blocks = (_judge(timeline, low, min(low + _STORES, stores)) for low in range(0, stores, _STORES))
    return [case for cases in blocks for case in cases]


def _judge(timeline: Timeline, low: int, high: int) -> list[SlotCase]:
    """Stores ``low..high``: the slots of all stores of a trace may be more than fits into memory."""
    table = timeline.trace.table("store")
    slots, rows = table.arrays("slots", low, high), table.arrays("logical_rows", low, high)
    whole = slots.lengths == rows.lengths
    block = slice(low, high)
    request, buffer = timeline.request_column("store")[block], timeline.buffer_column("store")[block]
    fit = whole & (request >= 0) & (buffer >= 0) & ~table["draft"][block].astype(bool)
    owner = np.asarray(slots.owner(), np.int64)
    owner, slot = owner[fit[owner]], np.asarray(slots.values, np.int64)[fit[owner]]
    row_owner = np.asarray(rows.owner(), np.int64)
    logical = np.asarray(rows.values, np.int64)[fit[row_owner]]
    kept = (logical >= 0) & (slot >= 0)
    owner, slot, logical = owner[kept], slot[kept], logical[kept]
    per_page = np.array([b.layout.rows for b in timeline.buffers] or [1], np.int64)[buffer[owner]]
    page, inside = np.divmod(logical, per_page)
    process, seq = table["process"][block].astype(np.int64), table["seq"][block].astype(np.int64)
    given = timeline.owners.given_at(process[owner], request[owner], page, seq[owner])
    right = given * per_page + inside
    wrong = np.flatnonzero((given >= 0) & (right != slot))
    cases = []
    for store in np.unique(owner[wrong]).tolist():
        mine = wrong[owner[wrong] == store]
        cases.append(
            SlotCase(
                store=low + store,
                process=int(process[store]),
                request=int(request[store]),
                buffer=int(buffer[store]),
                logical=logical[mine],
                slots=slot[mine],
                right=right[mine],
            )
        )
    return cases
