"""F09: reception was reported complete while the bytes were still arriving.

Signature: at completion part of the page still holds the old bytes, and a later look shows the source's bytes in
exactly these places. Told apart from a loss on the wire (F31), where the later look still shows the old bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import TORN_UNITS, Evidence, Explanation, Kind, claims, halves, in_words, span
from replay.units import units_of
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]

KIND = Kind(
    code="F09",
    shows=(
        "RC differs from the source, a later look (LT or a read) has the source's bytes in the "
        "same rows; or the old bytes stay and success was told before the transfer's end"
    ),
    certain=(
        "the old bytes were seen before (RC before); the post is ordered before RC, or success was told with no order "
        "that puts the transfer's end before it; no other transfer in flight names the page; a read saw it torn; "
        "nothing is left unexplained"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F31", "a later look is complete: nothing was lost"),
        ("F12", "part of the page had arrived"),
    ),
)

#: Of bytes that came between the looks before and after a read.
MEANWHILE = "they came while a read (RD) ran: what it got is not known"

_WORDS = {
    "proven": "success was told before the transfer was done, by proven order",
    "open": "nothing orders the end of the transfer before success was told, as waiting for it would",
}


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (RC differs from the source) that arrived later."""
    source = next((stage for stage in ("SE+", "SE", "ST") if case.has(stage)), "")
    if source == "":
        return None
    later, healed = arrived_later(case, source, bad)
    early = told_early(case, evidence)
    if early == "proven" and case.has("RC-"):
        # Still old at every later look, and the transfer was not over when success was told.
        healed = healed | (bad & case.same("RC", "RC-"))
    if not healed.any():
        return None
    if not halves(healed)[0].any() and int(healed.sum()) <= TORN_UNITS and bool((healed != bad).any()):
        return None  # scales repeat: a few of them alone, among rows that never came, are right by chance
    old = case.same("RC", "RC-") if case.has("RC-") else np.zeros(len(bad), bool)
    torn = healed & ~old
    old_known = case.has("RC-") and int(torn.sum()) <= TORN_UNITS
    order = case.timeline.order
    ordered = early == "proven" or later == "RD" or order.before(case.moment("RC"), case.moment(later))
    reads = reads_of(case, source, healed)
    others_quiet = _no_other_writer(case, evidence)
    told = early != "" or _told(case, evidence)
    sure = old_known and ordered and told and others_quiet and reads.torn and bool((healed == bad).all())
    confidence: Confidence = "certain" if sure else "likely"
    values, scales = halves(healed)
    lines = [
        f"at completion (RC) {in_words(values, scales)} still held the page's old bytes"
        if old_known
        else f"at completion (RC) {in_words(values, scales)} differ from the source",
    ]
    if later:
        lines.append(
            f"{later} shows the source's bytes there: they arrived later, after completion was reported"
        )
    if early:
        lines.append(_WORDS[early])
    if reads.torn:
        lines.append("a read (RD) saw the page before they had arrived")
    elif reads.open:
        lines.append(MEANWHILE)
    return Explanation(
        code="F09",
        stage="completion",
        confidence=confidence,
        explained=healed,
        expected=source,
        observed="RC",
        evidence=tuple(lines),
        runner_up=RunnerUp(
            "F31",
            f"{later} is complete: no bytes were lost"
            if later
            else "the transfer was not over at completion",
        ),
        harmless=reads.harmless,
    )


def overwrote(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (rows that the reading side appended) that the request's own late transfer wrote over.

    Pages travel whole. What arrives after reading has begun brings the source's bytes past the prompt as well.
    """
    source = next((stage for stage in ("SE+", "SE") if case.has(stage)), "")
    if source == "" or not case.has("RD") or not told_early(case, evidence):
        return None
    over = bad & case.same("RD", source)
    if not halves(over)[0].any():
        return None
    values, _ = halves(over)
    return Explanation(
        code="F09",
        stage="completion",
        confidence="certain" if bool((over == bad).all()) else "likely",
        explained=over,
        expected="OWN",
        observed="RD",
        evidence=(
            f"{span(values)}: appended by the reading side, then overwritten by the source's bytes",
            _WORDS[told_early(case, evidence)],
        ),
        runner_up=RunnerUp("F14", "the bytes are those of the request's own source page"),
    )


def arrived_later(case: Case, source: str, bad: Bool) -> tuple[str, Bool]:
    """The first later look that shows the source's bytes, and the units it heals."""
    if case.has("LT"):
        healed = bad & case.same("LT", source)
        for units in _earlier_looks(case):
            healed |= bad & (units == case.units[source])
        if healed.any():
            return "LT", healed
    for row in case.reads.tolist():
        content = case.timeline.snapshots.content[[row]]
        if int(content[0]) < 0:
            continue
        healed = bad & (units_of(case.timeline, content)[0] == case.units[source])
        if healed.any():
            case.rows.setdefault("RD", row)
            return "RD", healed
    return "", np.zeros(len(bad), bool)


def _earlier_looks(case: Case) -> Iterator[U64]:
    """Units of the page at the LTs between RC and the last one: by that one others may have written over it."""
    snaps, order = case.timeline.snapshots, case.timeline.order
    last = case.rows["LT"]
    rows = snaps.at_place("LT", int(snaps.buffer[last]), int(snaps.page[last]))
    mine = (snaps.request[rows] == case.request) & (snaps.logical[rows] == case.logical)
    mine &= (snaps.seq[rows] < snaps.seq[last]) & (snaps.content[rows] >= 0)
    for row in rows[mine].tolist():
        units = units_of(case.timeline, snaps.content[[row]])[0]
        if len(units) == len(case.valid) and order.before(case.moment("RC"), snaps.moment_of(row)):
            yield units


@dataclass(frozen=True, slots=True)
class Reads:
    """What the reads of a page that was late saw of it.

    ``torn``: one saw what was there at completion. ``open``: the rest came while one ran, so that nobody knows.
    ``clean``: one saw all that came later.
    """

    torn: bool
    open: bool
    clean: bool

    @property
    def harmless(self) -> bool:
        """Whether it was read, and never before the rest had come."""
        return self.clean and not self.torn and not self.open


def reads_of(case: Case, source: str, healed: Bool) -> Reads:
    """How the reads of the page lie to the arrival of ``healed``."""
    snaps = case.timeline.snapshots
    old: dict[int, list[Bool]] = {}  #: step -> of each look, the units that are as they were at completion
    clean = False
    for row in case.reads.tolist():
        content = snaps.content[[row]]
        if int(content[0]) < 0:
            continue
        units = units_of(case.timeline, content)[0]
        clean |= bool((units == case.units[source])[healed].all())
        # What is neither was written by another, and proves nothing about when these bytes came.
        old.setdefault(int(snaps.step[row]), []).append((units == case.units["RC"]) & healed)
    torn = any(bool(np.logical_and.reduce(looks).any()) for looks in old.values())
    some = any(bool(np.logical_or.reduce(looks).any()) for looks in old.values())
    return Reads(torn, some and not torn, clean)


def told_early(case: Case, evidence: Evidence) -> str:
    """How the senders' words of success lie to the end of their transfers, in the order of the protocol.

    "proven": a transfer that brings the page was over after all of them had told. "open": they told, and no order puts
    the end of every transfer before some telling, as waiting for them would. "": they were over before, or not every
    telling was seen.
    """
    timeline, order, descriptors = case.timeline, case.timeline.order, evidence.descriptors
    tellings = timeline.tellings.told(*timeline.requests[case.request], case.process)
    sends = descriptors.sends_to(case.request, case.process)
    if not tellings or not sends:
        return ""
    ends = {send: descriptors.completion(send) for send in sends}
    pieces = descriptors.pieces
    for send in set(pieces.send[descriptors.touching(case.buffer.number, case.page)].tolist()):
        end = ends.get(send)
        if end is not None and all(order.before(told, end) for told in tellings):
            return "proven"
    waited = all(
        end is not None and any(order.before(end, told) for told in tellings) for end in ends.values()
    )
    return "" if waited else "open"


def _told(case: Case, evidence: Evidence) -> bool:
    """Whether the protocol's edges show that the page was looked at after its transfer had been posted."""
    order, completed = case.timeline.order, case.moment("RC")
    sends = evidence.descriptors.sends_to(case.request, case.process)
    return any(order.before(case.timeline.moment("send", send), completed) for send in sends)


def _no_other_writer(case: Case, evidence: Evidence) -> bool:
    """No other request's transfer names this page, as far as complete hooks can tell."""
    pieces, owners, order = evidence.descriptors.pieces, case.timeline.owners, case.timeline.order
    mine = owners.alloc_at(case.process, case.request, case.page, int(case.moment("RC").seq))
    since = int(owners.allocs.seq[mine]) if mine is not None else -1
    for row in evidence.descriptors.touching(case.buffer.number, case.page).tolist():
        other = int(pieces.request[row])
        if other == case.request:
            continue
        theirs = owners.alloc_row(case.process, other, case.page)
        never_before = owners.alloc_row(case.process, other, case.page, before=since) is None
        if (
            mine is not None
            and theirs is not None
            and never_before
            and order.before(owners.allocs.moment_of(mine), owners.allocs.moment_of(theirs))
        ):
            continue  # it got the page later: it cannot have written before
        over = evidence.descriptors.completion(int(pieces.send[row]))
        if mine is None or over is None:
            return False
        if not order.before(over, owners.allocs.moment_of(mine)):
            return False
    return True
