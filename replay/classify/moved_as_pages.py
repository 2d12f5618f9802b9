"""F22 at the store: a move of rows took the rows' slots for page ids, and moved whole pages.

Signature: a page changed as a whole into another page of the same buffer, and a move that counts rows was given a
length and a stride of pages: entry i carried page ``source_ids[i]`` to page ``ids[i]``, slots both.

Chosen over F14 and F16, since the writer is a move within the process; over F20, where the unit is right and the
stride is not; over F15, since the bytes are another page's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, halves, unit_mask
from replay.classify.wrote_here import Place, place_of, writes
from replay.local_writes import LocalWrite
from replay.units import units_of
from replay.verdict import Donor, RunnerUp

Bool = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that a move of rows brought with whole pages."""
    place = place_of(case, stage)
    if place is None or not halves(bad)[0].any():
        return None
    table, layout = case.timeline.trace.table("copy"), case.layout
    for write, proven in writes(evidence, place):
        if write.table != "copy" or str(table["unit"][write.row]) != "row":
            continue
        length, stride = int(table["length"][write.row]), int(table["stride"][write.row])
        if str(table["operation"][write.row]) != "move" or length <= layout.value_bytes + layout.scale_bytes:
            continue
        explained = bad & unit_mask(layout, write.mask, some=True)
        if not halves(explained)[0].any():
            continue
        source = _source(case, evidence, write, place)
        same = source is not None and bool((case.units[stage] == source[0])[explained].all())
        if source is not None and not same and length == layout.page_bytes:
            continue  # the page holds something else: this move did not make it
        sure = proven and same and bool((explained == bad).all())
        return Explanation(
            code="F22",
            stage="store",
            confidence="certain" if sure else "likely",
            explained=explained,
            expected=place.expected,
            observed=stage,
            evidence=(
                f"a move of {len(table.ragged('ids')[write.row])} rows was given {length} bytes each, {stride} bytes "
                f"apart; a row here has {layout.value_bytes + layout.scale_bytes}, a page {layout.page_bytes}",
                f"it wrote to page {place.page} as a whole, whose number is a slot of the move",
                *(("the page holds the bytes of the page that the move took",) if same else ()),
            ),
            donor=source[1] if source is not None and same else None,
            rule="slots were used as page ids",
            runner_up=RunnerUp("F20", "the stride is that of pages, and the ids are slots"),
            at_source=place.at_source,
        )
    return None


def _source(
    case: Case, evidence: Evidence, write: LocalWrite, place: Place
) -> tuple[U64, Donor | None] | None:
    """Units of the page that the move took for this page, as last seen before it."""
    table, timeline, snaps = case.timeline.trace.table("copy"), case.timeline, case.timeline.snapshots
    sources = np.asarray(table.ragged("source_ids")[write.row], np.int64)
    number = timeline.buffer_number(write.moment.process, int(table["source_buffer"][write.row]))
    if number < 0 or not len(write.entries) or int(write.entries[-1]) >= len(sources):
        return None
    page = int(sources[int(write.entries[-1])])
    looks = np.concatenate([snaps.at_place(name, number, page) for name in ("ST", "RC", "LT", "SE", "RD")])
    looks = looks[(snaps.content[looks] >= 0) & (snaps.seq[looks] < write.moment.begin_seq)]
    if not len(looks):
        return None
    last = int(looks[int(np.argmax(snaps.seq[looks]))])
    units = units_of(timeline, snaps.content[[last]])[0]
    if len(units) != 2 * case.layout.rows:
        return None
    request, slot = int(snaps.request[last]), int(snaps.slot[last])
    donor = None
    if request >= 0 and slot >= 0:
        donor = Donor(timeline.requests[request][0], timeline.slots[slot][1], int(snaps.logical[last]))
    return units, donor
