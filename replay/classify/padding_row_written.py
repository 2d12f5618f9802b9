"""F23: a padding row of a batch was written into a slot that belongs to somebody, or dirtied the reserved one.

Signature: exactly one row (value and scale) of a page changed after its own store or arrival, and a store record
between the two looks has a padding entry (no row of any request) that names this slot: outright, or as slot -1, which
a kernel that does not skip it takes for the last row of the last page.

Chosen over F11, where the other store's rows are rows of a request that was given the page; over F15, where no store
names the slot; over F29, where the store's row is one of the request itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, span, unit_mask
from replay.classify.wrote_here import place_of, quiet, rows_mask, writes
from replay.local_writes import LocalWrite
from replay.timeline import Timeline
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F23",
    shows=(
        "one row of the page changed, and a store between the looks has a padding row that names its slot; in the "
        "reserved page: logits are no numbers to the end of a read of numbers, and slot 0 holds NaN since a padding "
        "row was stored there"
    ),
    certain=(
        "the store is ordered between the two looks, or all records of sends, allocations, stores and copies are there "
        "and name nothing else that can have written these rows; nothing is left unexplained; in the reserved page: "
        "never"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F11", "the row that was stored is a padding row, of no request"),
        ("F15", "a store names the slot"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in rows that a padding row was stored to."""
    place = place_of(case, stage)
    if place is None or not halves(bad)[0].any():
        return None
    found = list(writes(evidence, place))
    unseen = quiet(evidence, place) and evidence.covers(place.process, "store", "copy")
    for write, proven in found:
        rows = padding_rows(case.timeline, write, place.page)
        explained = bad & rows_mask(case.layout, rows)
        values, scales = halves(explained)
        if not values.any() or (scales & ~values).any():
            continue
        alone = unseen and all(_pads(case, other, place.page, explained) for other, _ in found)
        sure = (proven or alone) and bool((explained == bad).all())
        slot = "slot -1, the last row of the last page" if write.padding else f"a slot of page {place.page}"
        step = int(case.timeline.trace.table("store")["step"][write.row])
        return Explanation(
            code="F23",
            stage="store",
            confidence="certain" if sure else "likely",
            explained=explained,
            expected=place.expected,
            observed=stage,
            evidence=(
                f"{span(values)} of page {place.page} changed after {place.earlier}; the other rows did not",
                f"a store (step {step}) has padding rows, which are rows of no request, that name {slot}",
                *(("it lies between the two looks, in the order of its process",) if proven else ()),
                *(
                    ("nothing else that was recorded can have written it then",)
                    if alone and not proven
                    else ()
                ),
            ),
            rule="a padding row was written",
            runner_up=RunnerUp("F11", "the row that was stored is a padding row, of no request"),
            at_source=place.at_source,
        )
    return None


def _pads(case: Case, write: LocalWrite, page: int, units: Bool) -> bool:
    """Whether a write reaches ``units`` of the page by its padding alone, or not at all."""
    hit = unit_mask(case.layout, write.mask, some=True) & units
    return not (hit & ~rows_mask(case.layout, padding_rows(case.timeline, write, page))).any()


def padding_rows(timeline: Timeline, write: LocalWrite, page: int) -> I64:
    """Rows of ``page`` that a store record names with padding entries."""
    if write.table != "store" or not len(write.entries):
        return np.zeros(0, np.int64)
    table = timeline.trace.table("store")
    slots = np.asarray(table.array("slots", write.row), np.int64)
    logical = np.asarray(table.array("logical_rows", write.row), np.int64)
    if len(logical) != len(slots):
        return np.zeros(0, np.int64)
    number = timeline.buffer_number(write.moment.process, int(table["buffer"][write.row]))
    info = timeline.buffers[number]
    chosen = write.entries[logical[write.entries] < 0]
    wrapped = np.where(slots[chosen] >= 0, slots[chosen], info.pages * info.layout.rows - 1)
    return np.unique(wrapped[wrapped // info.layout.rows == page] % info.layout.rows)
