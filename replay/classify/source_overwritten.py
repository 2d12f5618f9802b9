"""F11: the source page was given to another request before its bytes had left.

Signature: the page's own store was right, and at the send (SE) or at completion the source holds rows that another
request stored to the same physical page; the destination received them. Told apart from F10, where the rows are older
than the page's own store.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, span
from replay.timeline import Timeline
from replay.units import units_of
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F11",
    shows=(
        "the source, or what arrived of it, equals what another request stored to the same source page later"
    ),
    certain=(
        "the page's own store and the two allocations are in this order; all stores and "
        "allocations of the sender recorded; nothing is left unexplained"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(("F10", "the rows are those of a later store, not older ones"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in ``stage`` (SE, SE+ or RC) that another request stored to the source page afterwards."""
    row = next((case.rows[name] for name in ("SE", "SE+", "ST") if name in case.rows), -1)
    if row < 0 or not case.has("ST", stage):
        return None
    timeline, snaps = case.timeline, case.timeline.snapshots
    process, buffer, page = int(snaps.process[row]), int(snaps.buffer[row]), int(snaps.page[row])
    if buffer < 0 or process == case.process:
        return None
    stored = case.moment("ST")
    mine = timeline.owners.alloc_at(process, case.request, page, int(snaps.seq[row]))
    for look in snaps.at_place("ST", buffer, page).tolist():
        other = int(snaps.request[look])
        if other in (case.request, -1) or int(snaps.content[look]) < 0:
            continue
        theirs = timeline.owners.alloc_row(process, other, page, before=int(snaps.seq[look]))
        if (
            mine is None
            or theirs is None
            or int(timeline.owners.allocs.seq[theirs]) < int(timeline.owners.allocs.seq[mine])
        ):
            continue
        order = timeline.order
        if order.before(case.moment(stage), timeline.owners.allocs.moment_of(theirs)):
            continue  # it was seen before the other had the page
        donor = units_of(timeline, snaps.content[[look]])[0]
        if len(donor) != len(bad):
            continue
        explained = bad & (case.units[stage] == donor) & _stored_by(timeline, look, case.layout.rows)
        values, _ = halves(explained)
        if not values.any():
            continue
        after = order.before(stored, snaps.moment_of(look))
        given = order.before(timeline.owners.allocs.moment_of(mine), timeline.owners.allocs.moment_of(theirs))
        sure = (
            after and given and evidence.covers(process, "store", "alloc") and bool((explained == bad).all())
        )
        confidence: Confidence = "certain" if sure else "likely"
        room, layer = timeline.requests[other][0], timeline.slots[int(snaps.slot[look])][1]
        return Explanation(
            code="F11",
            stage="source",
            confidence=confidence,
            explained=explained,
            expected="ST",
            observed=stage,
            evidence=(
                f"{span(values)} of source page {page} hold what room {room} stored there later",
                f"room {case.room}'s own store was complete before that",
                f"room {room} was given the page after room {case.room}",
            ),
            donor=Donor(room, layer, int(snaps.logical[look])),
            runner_up=RunnerUp("F10", "the rows are those of a later store, not older ones"),
            at_source=True,
        )
    return None


def _stored_by(timeline: Timeline, look: int, count: int) -> Bool:
    """Units of a look after a store, of a page of ``count`` rows, that its request has rows in.

    The others are what was there before. A look that does not tell its length counts whole.
    """
    snaps = timeline.snapshots
    rows = int(snaps.rows[look])
    own = count if rows < 0 else rows - int(snaps.logical[look]) * count
    return np.tile(np.arange(count) < own, 2)
