"""F29 at the destination: speculative decoding wrote a draft row where a row of the prompt stands.

Signature: rows below the prompt's length change after arrival, and the request's own store on the reading side, with
speculative rows, names their slots. Rows past the accepted ones that are overwritten later are right. (At the table,
where rejected drafts are read: ``drafted_rows_read.py``.)

Chosen over F14, since the writer is the request itself; over F23, where the row is a padding row; over F17, where an
ordinary store took its slots from an older translation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, span
from replay.classify.wrote_here import place_of, rows_mask, writes
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F29",
    shows=(
        "rows of the prompt changed after arrival, and the request's own speculative store names their slots; at the "
        "table: a read covers drafted rows that its query may not see"
    ),
    certain=(
        "the store is ordered between the two looks, nothing is left unexplained; at the table: two rows or more, and "
        "the length read ends where the drafts end"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F14", "the request itself wrote the rows"),
        ("F23", "the rows stored are the request's own"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in rows of the prompt that the request's own draft rows were stored to."""
    place = place_of(case, stage)
    if place is None or place.at_source or not halves(bad)[0].any():
        return None
    table, layout = case.timeline.trace.table("store"), case.layout
    for write, proven in writes(evidence, place):
        if write.table != "store" or write.request != case.request or not bool(table["draft"][write.row]):
            continue
        slots = np.asarray(table.array("slots", write.row), np.int64)[write.entries]
        explained = bad & case.valid & rows_mask(layout, np.unique(slots % layout.rows))
        values, scales = halves(explained)
        if not values.any() or (scales & ~values).any():
            continue
        logical = np.asarray(table.array("logical_rows", write.row), np.int64)
        meant = f"{int(logical.min())}..{int(logical.max())}" if len(logical) else "unknown"
        told = int(case.timeline.request_rows[case.request])
        return Explanation(
            code="F29",
            stage="destination",
            confidence="certain" if proven and bool((explained == bad).all()) else "likely",
            explained=explained,
            expected=place.expected,
            observed=stage,
            evidence=(
                f"{span(values)} of page {place.page} changed after {place.earlier}; the prompt has {told} rows",
                f"the request's own store of draft rows (rows {meant} of the request, step "
                f"{int(table['step'][write.row])}) names their slots",
            ),
            rule="draft rows were written over rows of the prompt",
            runner_up=RunnerUp("F14", "the request itself wrote the rows"),
        )
    return None
