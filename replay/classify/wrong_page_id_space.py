"""F04: the sender uses page ids of another space, such as its own.

Signature: the source page is carried whole, to a page that the request does not own at the receiver; its own page keeps
the old bytes, or gets another page of the request where some of the sender's ids are the receiver's too. The page that
was hit holds what came.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, span
from replay.classify.late_foreign_write import appended, fresh_units, source_look
from replay.classify.undelivered import look, still_old
from replay.units import units_of
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F04",
    shows=(
        "the source page was carried whole to a page that the request was never given, or all its pages to the ids "
        "that they have at the sender, which are not all its own; or the page holds the source page of a request that "
        "was never given it and whose transfer names it"
    ),
    certain=(
        "the sender's descriptors and the receiver's allocations are all recorded; the page holds its old bytes, or "
        "those of the request's page that was brought there; of a page that was hit: an earlier look at it is ordered "
        "before; nothing is left unexplained"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F02", "the source page was sent, to another page"),
        ("F14", "the writer never owned the page"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the page's own bytes went to a page that is not the request's."""
    found = look(case, evidence)
    if found is None or not len(found.leaving):
        return None
    own_ids = _ids_of_the_sender(case, evidence, found.every)
    if len(found.here) and not own_ids:
        return None
    pieces = evidence.descriptors.pieces
    whole = (
        (pieces.start[found.leaving] == 0)
        & (pieces.stop[found.leaving] == case.layout.page_bytes)
        & (pieces.source_start[found.leaving] == 0)
        & (pieces.buffer[found.leaving] == case.buffer.number)
    )
    if not whole.all():
        return None
    landed = int(pieces.page[found.leaving[0]])
    given = case.timeline.owners.alloc_row(case.process, case.request, landed) is not None
    if given and not own_ids:
        return None  # one of its own pages: the pages are permuted, not foreign
    old = still_old(case, bad)
    others = _brought(case, evidence, found.here, bad)
    sure = bool(((old | others) == bad).all()) and evidence.covers(case.process, "alloc")
    holds = "another page of the request" if others.any() else "what was there before the transfer"
    confidence: Confidence = "certain" if sure else "likely"
    same = " (its own id of it)" if landed == found.source_page else ""
    whose = "which is another of the request's" if given else "which the request was never given"
    return Explanation(
        code="F04",
        stage="descriptor",
        confidence=confidence,
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"the sender's page {found.source_page} was written to page {landed}{same}, {whose}; its page is "
            f"{case.page}",
            *((f"that page holds {holds}",) if confidence == "certain" else ()),
        ),
        rule="destination ids are the sender's own" if same else None,
        runner_up=RunnerUp("F02", "the source page was sent, to another page"),
    )


def _brought(case: Case, evidence: Evidence, here: I64, bad: Bool) -> Bool:
    """Units of ``bad`` that hold the source page of one of the pieces ``here``, the request's own to this page."""
    pieces, found = evidence.descriptors.pieces, np.zeros(len(bad), bool)
    for piece in here.tolist():
        place = int(pieces.source[piece]), int(pieces.source_page[piece])
        row = source_look(case, evidence, int(pieces.send[piece]), *place)
        if row >= 0 and case.has("RC"):
            units = units_of(case.timeline, case.timeline.snapshots.content[[row]])[0]
            found |= bad & (units == case.units["RC"]) if len(units) == len(bad) else False
    return found


def _ids_of_the_sender(case: Case, evidence: Evidence, every: I64) -> bool:
    """Whether all transfers of the request go to the ids of their source pages, and some to a page not its own."""
    pieces = evidence.descriptors.pieces
    pages = pieces.page[every]
    mine = [
        case.timeline.owners.alloc_row(case.process, case.request, page) is not None
        for page in set(pages.tolist())
    ]
    return bool((pages == pieces.source_page[every]).all()) and not all(mine)


def landed(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in a page to which another request's transfer went that was never given it.

    Of several such transfers the one that explains most: a page travels whole, with what it held before.
    """
    if not evidence.covers(case.process, "alloc"):
        return None
    earlier = "RC" if stage in ("LT", "RD") and case.has("RC") else "RC-"
    fresh = fresh_units(case, bad, stage, earlier)
    best: Explanation | None = None
    for piece in evidence.descriptors.touching(case.buffer.number, case.page).tolist():
        found = _hit_by(case, evidence, fresh, bad, stage, piece, earlier)
        if found is not None and (best is None or found.explained.sum() > best.explained.sum()):
            best = found
    return best


def _hit_by(
    case: Case, evidence: Evidence, fresh: Bool, bad: Bool, stage: str, piece: int, earlier: str
) -> Explanation | None:
    timeline, pieces = case.timeline, evidence.descriptors.pieces
    other, send = int(pieces.request[piece]), int(pieces.send[piece])
    source, source_page = int(pieces.source[piece]), int(pieces.source_page[piece])
    whole = int(pieces.start[piece]) == int(pieces.source_start[piece]) == 0
    if other in (case.request, -1) or not whole or int(pieces.stop[piece]) != case.layout.page_bytes:
        return None
    if timeline.owners.alloc_row(case.process, other, case.page) is not None:
        return None
    look_at = source_look(case, evidence, send, source, source_page)
    begin = case.moment(earlier) if case.has(earlier) else None
    if look_at < 0 or not evidence.descriptors.may_run(send, begin, case.moment(stage)):
        return None
    snaps = timeline.snapshots
    units = units_of(timeline, snaps.content[[look_at]])[0]
    if len(units) != len(bad):
        return None
    same = case.units[stage] == units
    if not halves(fresh & same)[0].any():
        return None
    explained = bad & same
    room, posted = timeline.requests[other][0], timeline.moment("send", send)
    order = timeline.order
    after = case.has(earlier) and order.before(case.moment(earlier), case.moment(stage))
    sure = after and evidence.covers(posted.process, "send") and bool((explained == bad).all())
    layer = timeline.slots[int(snaps.slot[look_at])][1]
    logical = int(snaps.logical[look_at])
    values, _ = halves(explained)
    return Explanation(
        code="F04",
        stage="descriptor",
        confidence="certain" if sure else "likely",
        explained=explained,
        expected=_expected(case, bad, stage, earlier),
        observed=stage,
        evidence=(
            f"{stage} of page {case.page} holds the source bytes of room {room}'s logical page {logical} "
            f"({span(values)}: equal by digest)",
            f"room {room}'s transfer {int(evidence.descriptors.sends['transfer'][send])} names this page, which "
            f"room {room} was never given",
        ),
        donor=Donor(room, layer, logical),
        rule="destination ids are the sender's own" if source_page == case.page else None,
        runner_up=RunnerUp("F14", "the writer never owned the page"),
    )


def _expected(case: Case, bad: Bool, stage: str, earlier: str) -> str:
    """The look that shows what a page which was hit should hold."""
    if appended(case, bad, stage):
        return "OWN"
    return earlier if earlier == "RC" else next((n for n in ("SE", "SE+", "ST") if case.has(n)), stage)
