"""F10: a transfer was posted before the store had written its source pages.

Signature: at the post the source lacks rows which the store writes later; values and scales of the same rows are
missing (a row-aligned double tear; scales alone where the store was in the middle of its rows), the destination has
the same old rows, and the source is complete afterwards.

Told apart from F11 (source overwritten before the send): there the right bytes were in the source before, and
another request's store came between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import TORN_UNITS, Evidence, Explanation, Kind, claims, halves, in_words
from replay.units import units_of
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F10",
    shows=("SE lacks rows in values and scales alike, ST has them later, the destination got the old rows"),
    certain=(
        'the store is ordered after SE, or the question at the post answered "not finished"; all '
        "stores and allocations of the sender recorded (a row that was half written needs the answer itself)"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F11", "no other request stored to the page between its store and the post"),
        ("F31", "no byte is foreign to both states of the source"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (source and its finished store differ, and the wrong bytes arrived) sent too early."""
    if not case.has("SE", "ST"):
        return None
    early = bad & ~case.same("SE", "ST")
    values, scales = halves(early)
    order = case.timeline.order
    sent, stored = case.moment("SE"), case.moment("ST")
    send = send_of(case, evidence)
    asked = int(evidence.descriptors.sends["written"][send]) if send >= 0 else -1
    # A store that is looked at in its middle may have written the values of a row and not yet its scale: that no
    # store was finished has to be told.
    half = bool((scales & ~values).any())
    if not early.any() or (half and asked != 0):
        return None
    awaited = int(evidence.descriptors.sends["awaited"][send]) if send >= 0 else -1
    if order.before(stored, sent) and asked != 0:
        return None  # the store was finished before the send: the bytes went wrong in between
    if _other_store(case, sent.process):
        return None
    store_last = order.before(sent, stored) or (asked == 0 and sent.seq < stored.seq)
    direct = asked == 0 or order.before(sent, stored)
    sure = direct and store_last and evidence.covers(sent.process, "store", "alloc")
    confidence: Confidence = "certain" if sure else "likely"
    first = int(np.flatnonzero(values | scales)[0])
    lines = [
        f"before the post (SE) {in_words(values, scales)} were not yet written; after the store (ST) they are",
        "the destination received the source's old bytes" if case.has("RC") else "no RC snapshot was taken",
    ]
    if asked == 0:
        lines.append("asked at the post, the page's last store had not finished")
    if awaited == 0:
        lines.append("nobody waited for the store before the post")
    if order.before(sent, stored):
        lines.append("the source was looked at before the store's end, in the order of the protocol")
    return Explanation(
        code="F10",
        stage="source",
        confidence=confidence,
        explained=early,
        expected="ST",
        observed="SE",
        evidence=tuple(lines),
        rule=(
            f"from row {first} on, scales are missing whose values were written"
            if half
            else f"rows from {first} on are missing in values and scales alike"
        ),
        runner_up=RunnerUp("F11", "no other request stored to the page between its store and the post"),
        at_source=True,
    )


def torn(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (RC is neither the source before nor the finished store) that were read while being written.

    The wire read a row in the middle of its store: some of its bytes are old, the others new.
    """
    if not case.has("SE", "ST", "RC"):
        return None
    writing = bad & ~case.same("SE", "ST")
    before, after, seen = case.data("SE"), case.data("ST"), case.data("RC")
    send = send_of(case, evidence)
    asked = int(evidence.descriptors.sends["written"][send]) if send >= 0 else -1
    if before is not None and after is not None and seen is not None:
        if not len(before) == len(after) == len(seen):
            return None  # the sides hold different formats
        mixed = (seen == before) | (seen == after)
        layout = case.layout
        values = mixed[: layout.scale_base].reshape(layout.rows, -1).all(axis=1)
        scales = np.ones(layout.rows, bool)
        if layout.scale_bytes:
            scales = mixed[layout.scale_base :].reshape(layout.rows, -1).all(axis=1)
        writing &= np.concatenate([values, scales])
    elif asked != 0 or int(writing.sum()) > TORN_UNITS:
        return None
    if not writing.any():
        return None
    rows = halves(writing)
    return Explanation(
        code="F10",
        stage="source",
        confidence="certain" if asked == 0 and bool((writing == bad).all()) else "likely",
        explained=writing,
        expected="ST",
        observed="RC",
        evidence=(
            f"{in_words(rows[0], rows[1])} arrived half written: each byte is that of the "
            "source before the post or of the finished store",
        ),
        runner_up=RunnerUp("F31", "no byte is foreign to both states of the source"),
        at_source=True,
    )


def late_look(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (RC differs from a source that looks finished) that the wire took before the store wrote them.

    The look at the source was asked for before the post and taken after the store had ended: it shows the finished
    rows. What arrived are the rows that stood in the source page before, in values and scales alike.
    """
    if not case.has("SE", "ST", "RC"):
        return None
    finished = bad & case.same("SE", "ST")
    values, scales = halves(finished)
    send = send_of(case, evidence)
    if not values.any() or (scales & ~values).any() or send < 0 or store_was_over(case, evidence):
        return None
    asked = int(evidence.descriptors.sends["written"][send])
    before = finished & _stood_before(case)
    if not halves(before)[0].any() or (
        asked != 0 and case.has("RC-") and case.same("RC", "RC-")[before].all()
    ):
        return None
    foreign = case.has("RC-") and not bool(case.same("RC", "RC-")[before].all())
    sender = int(case.timeline.snapshots.process[case.rows["SE"]])
    sure = (
        asked == 0 and foreign and bool((before == bad).all()) and evidence.covers(sender, "store", "alloc")
    )
    values, scales = halves(before)
    return Explanation(
        code="F10",
        stage="source",
        confidence="certain" if sure else "likely",
        explained=before,
        expected="ST",
        observed="RC",
        evidence=(
            f"{in_words(values, scales)} arrived as the source page held them before it",
            "the look at the source (SE) shows them finished: it was taken after the wire had read them",
            "asked at the post, the page's last store had not finished"
            if asked == 0
            else "nothing orders the store's end before the post",
        ),
        runner_up=RunnerUp("F31", "the bytes that arrived are the source's own, from before the store"),
        at_source=True,
    )


def store_was_over(case: Case, evidence: Evidence) -> bool:
    """Whether the store of the source page had provably ended before the transfer was posted."""
    send = send_of(case, evidence)
    if send < 0 or not case.has("ST"):
        return False
    asked = int(evidence.descriptors.sends["written"][send])
    if asked >= 0:
        return asked == 1
    order, posted = case.timeline.order, case.timeline.moment("send", send)
    return order.before(case.moment("ST"), posted) or order.before(case.moment("ST"), case.moment("SE"))


def _stood_before(case: Case) -> Bool:
    """Units of RC that an earlier look at the source page shows."""
    snaps, row = case.timeline.snapshots, case.rows["SE"]
    found = np.zeros(len(case.valid), bool)
    own = int(snaps.seq[case.rows["ST"]])
    for name in ("ST", "SE"):
        looks = snaps.at_place(name, int(snaps.buffer[row]), int(snaps.page[row]))
        looks = looks[(snaps.seq[looks] < min(own, int(snaps.seq[row]))) & (snaps.content[looks] >= 0)]
        for look in looks[-2:].tolist():
            units = units_of(case.timeline, snaps.content[[look]])[0]
            if len(units) == len(found):
                found |= case.units["RC"] == units
    return found


def send_of(case: Case, evidence: Evidence) -> int:
    """Row of the send that this case's SE snapshot belongs to, -1 where it cannot be told."""
    transfer = int(case.timeline.snapshots.transfer[case.rows["SE"]])
    process = int(case.timeline.snapshots.process[case.rows["SE"]])
    sends = evidence.descriptors.sends
    rows = evidence.descriptors.sends_of(case.request)
    rows = rows[sends["process"][rows] == process]
    if transfer >= 0:
        rows = rows[sends["transfer"][rows] == transfer]
    return int(rows[0]) if len(rows) else -1


def _other_store(case: Case, process: int) -> bool:
    """Whether another request's ST of this source page was taken between the page's allocation and the end of
    the send: then an overwritten source is possible.
    """
    snaps = case.timeline.snapshots
    row = case.rows["SE"]
    end = int(snaps.seq[case.rows.get("SE+", row)])
    mine = case.timeline.owners.alloc_row(process, case.request, int(snaps.page[row]), before=end)
    begin = int(case.timeline.owners.allocs.seq[mine]) if mine is not None else -1
    stored = snaps.at_place("ST", int(snaps.buffer[row]), int(snaps.page[row]))
    between = (snaps.seq[stored] > begin) & (snaps.seq[stored] <= end)
    return bool((between & (snaps.request[stored] != case.request)).any())
