"""The slots that stores wrote to against the allocator's record: row r of a request belongs into its page r // rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]


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
    table = timeline.trace.table("store")
    if not len(table):
        return []
    slots, rows = table.ragged("slots"), table.ragged("logical_rows")
    if not np.array_equal(slots.offsets, rows.offsets):
        whole = np.diff(slots.offsets) == np.diff(rows.offsets)
    else:
        whole = np.ones(len(table), bool)
    request, buffer = timeline.request_column("store"), timeline.buffer_column("store")
    fit = whole & (request >= 0) & (buffer >= 0) & ~table["draft"].astype(bool)
    owner = np.asarray(slots.owner(), np.int64)
    owner, slot = owner[fit[owner]], np.asarray(slots.values, np.int64)[fit[owner]]
    row_owner = np.asarray(rows.owner(), np.int64)
    logical = np.asarray(rows.values, np.int64)[fit[row_owner]]
    kept = (logical >= 0) & (slot >= 0)
    owner, slot, logical = owner[kept], slot[kept], logical[kept]
    per_page = np.array([b.layout.rows for b in timeline.buffers] or [1], np.int64)[buffer[owner]]
    page, inside = np.divmod(logical, per_page)
    process = table["process"].astype(np.int64)
    given = timeline.given_at(process[owner], request[owner], page, table["seq"][owner].astype(np.int64))
    right = given * per_page + inside
    wrong = np.flatnonzero((given >= 0) & (right != slot))
    cases = []
    for store in np.unique(owner[wrong]).tolist():
        mine = wrong[owner[wrong] == store]
        cases.append(
            SlotCase(
                store=store,
                process=int(process[store]),
                request=int(request[store]),
                buffer=int(buffer[store]),
                logical=logical[mine],
                slots=slot[mine],
                right=right[mine],
            )
        )
    return cases
