"""F16: a page was freed and given to another request while somebody still references it.

Signature: the allocator's record of the reader names the page for the request, and the page holds what another
request, which was given the same physical page later, stored or received there. The request got the page shared (a
prefix), and its first owner has given it back since.

Chosen over F14, where a transfer lands that was posted for an earlier owner; over F15, where the bytes are nobody's
newer content; over F18, where the table differs from the allocator's record.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, span
from replay.timeline import Timeline
from replay.units import units_of
from replay.verdict import Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F16",
    shows=(
        "a page that the request shares holds what a later owner of the same physical page brought there, after the "
        "first owner had given it back"
    ),
    certain="all allocations are recorded; what the new owner was sent was seen; nothing is left unexplained",
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F14", "the writer owned the page when it wrote"),
        ("F15", "the bytes are a later owner's, not zeros or older ones"),
        ("F18", "the table is the allocator's record"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that a later owner of the page brought."""
    timeline, snaps = case.timeline, case.timeline.snapshots
    if not halves(bad)[0].any() or case.page < 0:
        return None
    if (case.process, case.request, case.page) not in timeline.owners.shared_pages:
        return None
    allocs = timeline.owners.allocs
    rows = timeline.owners.allocs_of_page(case.process, case.page)
    owners = [row for row in rows if not timeline.owners.shared_alloc[row]]
    # Whoever was given the page after this look, or after the request let go of it, is not seen in the look.
    until = int(snaps.seq[case.rows[stage]])
    mine = timeline.owners.alloc_at(case.process, case.request, case.page, until)
    shared_at = int(allocs.seq[mine]) if mine is not None else 0
    since = max((int(allocs.seq[row]) for row in owners if int(allocs.seq[row]) < shared_at), default=0)
    gone = timeline.owners.free_row(case.process, case.request, case.page, since=shared_at)
    if gone is not None:
        until = min(until, int(timeline.owners.frees.seq[gone]))
    best: tuple[int, Bool, int, int, int] | None = None
    for first, then in pairwise(owners):
        old, new = int(allocs.request[first]), int(allocs.request[then])
        freed = timeline.owners.free_row(case.process, old, case.page)
        if freed is None or new in (case.request, old):
            continue
        given = int(allocs.seq[then])
        if not since <= given <= until:
            continue  # one older than the owner of whose page this is a share: what is left of it is no news
        for name in ("RC", "ST", "LT", "RD"):
            looks = snaps.at_place(name, case.buffer.number, case.page)
            looks = looks[
                (snaps.request[looks] == new) & (snaps.content[looks] >= 0) & (snaps.seq[looks] > given)
            ]
            for look in looks[:4].tolist():
                units = units_of(timeline, snaps.content[[look]])[0]
                if len(units) != len(bad):
                    continue
                explained = bad & (case.units[stage] == units) & _meant(timeline, look, units)
                count = int(halves(explained)[0].sum())
                if count and (best is None or count > best[0]):
                    best = (count, explained, look, old, new)
    if best is None:
        return None
    _, explained, look, old, new = best
    values, _ = halves(explained)
    rooms = timeline.requests
    # Without a look at its source, what the new owner has in the page may be what nobody ever brought there.
    brought = len(_sources(timeline, look)) > 0
    sure = brought and evidence.covers(case.process, "alloc") and bool((explained == bad).all())
    layer = timeline.slots[int(snaps.slot[look])][1]
    return Explanation(
        code="F16",
        stage="destination",
        confidence="certain" if sure else "likely",
        explained=explained,
        expected=next((name for name in ("SE", "SE+", "ST", "RC") if case.has(name) and name != stage), "RC"),
        observed=stage,
        evidence=(
            f"{span(values)} of page {case.page} hold what room {rooms[new][0]} brought to the same page",
            f"room {rooms[old][0]} gave the page back and room {rooms[new][0]} was given it, while room {case.room} "
            "shares it",
            f"the allocator's record gives the page to room {case.room}: a table that names it is right",
        ),
        donor=Donor(rooms[new][0], layer, int(snaps.logical[look])),
        rule="the page was given to another request while it was shared",
        aliases=(rooms[new][0],),
        runner_up=RunnerUp("F14", "the writer owned the page when it wrote"),
    )


def _meant(timeline: Timeline, look: int, units: npt.NDArray[np.uint64]) -> Bool:
    """Units of a look that are what its request was sent, all where no source of it was seen.

    What is not was wrong for that request already: whoever shares its page rightly sees the same.
    """
    source = _sources(timeline, look)
    if not len(source):
        return np.ones(len(units), bool)
    sent = units_of(timeline, timeline.snapshots.content[source])
    return (
        np.asarray((sent == units).any(axis=0)) if sent.shape[1] == len(units) else np.zeros(len(units), bool)
    )


def _sources(timeline: Timeline, look: int) -> npt.NDArray[np.int64]:
    """Looks at what the request of ``look`` was sent for its page."""
    snaps = timeline.snapshots
    source = snaps.where("SE")
    same = (snaps.request[source] == snaps.request[look]) & (snaps.slot[source] == snaps.slot[look])
    found: npt.NDArray[np.int64] = source[
        same & (snaps.logical[source] == snaps.logical[look]) & (snaps.content[source] >= 0)
    ]
    return found
