"""F14: another request's transfer landed in a page after the page had changed hands.

Signature: the bytes equal the source page of another request whose descriptors name this very page, because
that request owned it when the transfer was set up; it gave the page back while the write was in flight.

Told apart from: old bytes that were simply never overwritten (the earlier content shows them already), a wrong
page id (the foreign request never owned the page), a local clear (the bytes are not the foreign source's).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import TORN_UNITS, Evidence, Explanation, Kind, claims, halves, span
from replay.order import Moment
from replay.units import units_of
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F14",
    shows="rows equal another request's source page whose descriptors name this page",
    certain=(
        "the page had been given back and given anew in this order, the foreign post is ordered "
        "after its own announcement, an earlier look at the page lacks these rows; the sender's posts and the "
        "receiver's allocations are all recorded"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F04", "the writer owned the page when its transfer was announced"),
        ("F15", "the bytes are those of a foreign source page"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in ``stage`` that a foreign transfer brought; None where no foreign transfer fits."""
    earlier = "RC" if stage in ("LT", "RD") and case.has("RC") else "RC-"
    fresh = fresh_units(case, bad, stage, earlier)
    best: tuple[int, Explanation] | None = None
    for piece in evidence.descriptors.touching(case.buffer.number, case.page).tolist():
        found = _donor(case, evidence, fresh, bad, stage, piece, earlier)
        if found is not None and (best is None or int(found.explained.sum()) > best[0]):
            best = (int(found.explained.sum()), found)
    return best[1] if best is not None else None


def _donor(
    case: Case, evidence: Evidence, fresh: Bool, bad: Bool, stage: str, piece: int, earlier: str
) -> Explanation | None:
    timeline, pieces = case.timeline, evidence.descriptors.pieces
    other = int(pieces.request[piece])
    send = int(pieces.send[piece])
    if other in (case.request, -1) or int(pieces.start[piece]) != int(pieces.source_start[piece]):
        return None
    source, source_page = int(pieces.source[piece]), int(pieces.source_page[piece])
    snapshot = source_look(case, evidence, send, source, source_page)
    if snapshot < 0:
        return None
    snaps = timeline.snapshots
    donor_units = units_of(timeline, snaps.content[[snapshot]])[0]
    if len(donor_units) != len(bad):
        return None
    same = case.units[stage] == donor_units
    if not halves(fresh & same)[0].any():
        return None
    # Rows that only this write can have changed prove it; what else of its source is there came with it.
    matched = bad & same
    values, _ = halves(matched)
    left = bad & ~matched
    # The edge of a write can cut a unit: neither content, but bytes of both.
    torn = left & fresh
    explained = matched | torn if int(torn.sum()) <= TORN_UNITS else matched

    owners = timeline.owners
    mine = owners.alloc_at(case.process, case.request, case.page, int(case.moment(stage).seq))
    since = int(owners.allocs.seq[mine]) if mine is not None else -1
    theirs = owners.alloc_row(case.process, other, case.page, before=since)
    if mine is None or theirs is None:
        return None  # the writer must have owned the page before: a later owner writes to its own
    freed = owners.free_row(case.process, other, case.page, since=int(owners.allocs.seq[theirs]))
    got = owners.allocs.moment_of(mine)
    done, seen = evidence.descriptors.completion(send), case.moment(stage)
    order = timeline.order
    # Over before the page changed hands, or before a look that does not show its rows: it cannot have written later.
    starts = [got, *([case.moment(earlier)] if case.has(earlier) else [])]
    if not all(evidence.descriptors.may_run(send, begin, seen) for begin in starts):
        return None
    rooms = timeline.requests
    donor_room = rooms[other][0]
    logical = int(snaps.logical[snapshot])
    layer = timeline.slots[int(snaps.slot[snapshot])][1]
    posted = timeline.moment("send", send)
    writers_known = evidence.covers(case.process, "alloc") and evidence.covers(posted.process, "send")
    changed_hands = freed is not None and order.before(owners.frees.moment_of(freed), got)
    landed_late = case.has(earlier) and order.before(case.moment(earlier), seen)
    # The edge between the processes: the transfer was posted for a page that had been announced for it.
    announced = order.before(owners.allocs.moment_of(theirs), posted)
    enough = int(halves(fresh & same)[0].sum()) >= min(4, int(halves(bad)[0].sum()))
    whole = writers_known and changed_hands and landed_late and announced and enough
    confidence: Confidence = "certain" if whole else "likely"
    lines = [
        f"{stage} of page {case.page} holds the source bytes of room {donor_room}'s logical page {logical} "
        f"({span(values)}: equal by digest)",
        f"room {donor_room}'s transfer {int(evidence.descriptors.sends['transfer'][send])} names this page: "
        "it owned it when the transfer was set up",
        _interval(case, evidence, posted, done, got, donor_room),
    ]
    if case.has(earlier) and landed_late:
        if earlier == "RC" and not (case.wire_bad & explained).any():
            what = "its own bytes were complete at reception (RC)"
        else:
            what = f"{earlier} does not hold them" if earlier == "RC" else "RC before the transfer differs"
        lines.append(f"{what}: the write landed after that")
    if changed_hands:
        lines.append(f"room {donor_room} gave the page back before room {case.room} got it")
    return Explanation(
        code="F14",
        stage="destination",
        confidence=confidence,
        explained=explained,
        expected="OWN" if appended(case, bad, stage) else "RC" if earlier == "RC" else "SE",
        observed=stage,
        evidence=tuple(lines),
        donor=Donor(donor_room, layer, logical),
        runner_up=RunnerUp(
            "F04",
            f"room {donor_room} owned page {case.page} when its transfer was announced, so the page id was right",
        ),
    )


def fresh_units(case: Case, bad: Bool, stage: str, earlier: str) -> Bool:
    """Units that prove a later writer: what looked like this in ``earlier``, before the own write, needs none.

    Rows that the reading side appended may look as they did before (empty, both times): the page's other rows tell.
    """
    if not case.has(earlier):
        return bad.copy()
    if appended(case, bad, stage):
        bad = bad | case.read_bad
    return bad & ~case.same(stage, earlier)


def appended(case: Case, bad: Bool, stage: str) -> bool:
    """Whether the units are of rows that the reading side appended: its own stores tell what they should hold."""
    return stage == "RD" and case.has("OWN") and bool((bad & case.appended_bad).any())


def source_look(case: Case, evidence: Evidence, send: int, source: int, page: int) -> int:
    """Row of the SE snapshot that shows what ``send`` read from ``page``, -1 where none was taken."""
    snaps = case.timeline.snapshots
    transfer = int(evidence.descriptors.sends["transfer"][send])
    request = int(evidence.descriptors.request[send])
    chosen = snaps.at_place("SE", source, page)
    chosen = chosen[snaps.request[chosen] == request]
    exact = chosen[snaps.transfer[chosen] == transfer]
    rows = exact if len(exact) else chosen
    return int(rows[0]) if len(rows) else -1


def _interval(
    case: Case, evidence: Evidence, posted: Moment, done: Moment | None, got: Moment, donor_room: int
) -> str:
    if done is None:
        return f"no completion of that transfer was seen before room {case.room} got the page"
    order = evidence.timeline.order
    if order.before(got, done):
        return f"it completed only after room {case.room} had got the page: the write interval overlaps the ownership"
    return f"nothing orders its completion before room {case.room} got the page"
