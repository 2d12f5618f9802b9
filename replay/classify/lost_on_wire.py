"""F31: bytes were lost or altered on the wire.

Signature: the source is stable, the descriptors cover the page rightly, completion was reported, and the destination
differs and stays so. The kind of last resort for the wire: every other writer must be ruled out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify import sent_before_written
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, unit_mask
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F31",
    shows="a stable source, right descriptors, RC and LT alike wrong",
    certain=(
        "no other transfer can have written the page since it was seen before the transfer; the store had ended before "
        "the post; sends, stores and announcements all recorded; every row is old, the source's, or (by its bytes) a "
        "cut one"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F09", "the later look shows the same wrong bytes: nothing arrived late"),
        ("F10", "the source was the same before the post and after completion"),
    ),
)

#: Most bytes of a page that are neither old nor the source's and may be an accident of the wire.
EDGE_BYTES = 16
#: Units that the end of a write may cut, so that they are neither old nor the source's as a whole.
EDGE_UNITS = 2


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (RC differs from a stable source) that never came."""
    if case.delivery != "right" or not case.has("SE", "SE+", "RC", "LT"):
        return None
    stable = bad & case.same("SE", "SE+") & case.same("RC", "LT")
    if not stable.any() or not bool((stable == bad).all()):
        return None
    pieces = evidence.descriptors.pieces
    touching = evidence.descriptors.touching(case.buffer.number, case.page)
    snaps, sent = case.timeline.snapshots, case.rows["SE"]
    mine = touching[pieces.request[touching] == case.request]
    own = evidence.descriptors.from_own_page(
        mine, int(snaps.buffer[sent]), int(snaps.page[sent]), case.logical
    )
    if not own.all():
        return None  # something else of the request is brought to the page as well
    if (pieces.request[touching] != case.request).any() and _others_may_write(case, evidence):
        return None  # another request's transfer names the page: it may have written it
    neither = _neither(case, stable)
    altered = neither > EDGE_UNITS
    if altered and not _of_nobody(case, evidence, stable):
        return None  # bytes that are neither old nor the source's were not lost: they may be permuted
    if not _over_before(case, evidence):
        return None  # the transfer may still have been on its way
    # Without the bytes a row that is neither old nor the source's may be a cut one, or one of another place; where
    # nobody looked before the transfer, what is old is not known.
    told = case.has("RC-") and not altered and (neither == 0 or case.data("RC") is not None)
    writers = told and evidence.covers(case.process, "store", "receive")
    writers = writers and evidence.covers_sends(int(snaps.process[sent]))
    values, scales = halves(stable)
    if not sent_before_written.store_was_over(case, evidence) and bool((values | ~scales).all()):
        # Whole rows, and nothing says that they were written at the post: the looks at the source may have come late.
        send = sent_before_written.send_of(case, evidence)
        if send >= 0 and int(evidence.descriptors.sends["written"][send]) == 0:
            return None
        writers = False
    confidence: Confidence = "certain" if writers else "likely"
    old = " (the page's old bytes)" if case.has("RC-") and case.same("RC", "RC-")[stable].all() else ""
    return Explanation(
        code="F31",
        stage="wire",
        confidence=confidence,
        explained=stable,
        expected="SE+",
        observed="RC",
        evidence=(
            f"{in_words(values, scales)} differ from the source at completion{old} and still later (LT)",
            "the source was the same before the post and after completion",
            "the descriptors cover the whole page from the right source page",
            *(
                (
                    "they are no bytes of the source in another order, and no other page of the trace has these rows",
                )
                if altered
                else ()
            ),
        ),
        runner_up=RunnerUp("F09", "the later look shows the same wrong bytes: nothing arrived late"),
    )


def _others_may_write(case: Case, evidence: Evidence) -> bool:
    """Whether a transfer of another request may have written the page after it was last seen old."""
    if not case.has("RC-"):
        return True
    begin, end = case.moment("RC-"), case.moment("LT")
    return evidence.descriptors.may_write(case.buffer.number, case.page, begin, end, besides=case.request)


def _neither(case: Case, stable: Bool) -> int:
    """How many units hold neither what was there before nor, byte by byte, a part of the source's.

    All of the page where more than a few bytes are foreign to both; none where nobody looked before the transfer.
    """
    if not case.has("RC-"):
        return 0
    other = stable & ~case.same("RC", "RC-")
    before, source, seen = case.data("RC-"), case.data("SE+"), case.data("RC")
    if before is None or source is None or seen is None or not len(before) == len(source) == len(seen):
        return int(other.sum())
    mixed = (seen == before) | (seen == source)
    # A few altered bytes are an accident of the wire; a whole row of them is not what a loss leaves.
    if int((~mixed).sum()) > EDGE_BYTES:
        return len(stable)
    return int((other & ~unit_mask(case.layout, mixed)).sum())


def _of_nobody(case: Case, evidence: Evidence, stable: Bool) -> bool:
    """Whether the bytes of the page are no other order of its source's, and its rows nobody else's."""
    source, seen = case.data("SE+"), case.data("RC")
    if source is None or seen is None or len(source) != len(seen) or evidence.donors is None:
        return False
    if np.array_equal(np.bincount(source, minlength=256), np.bincount(seen, minlength=256)):
        return False
    return evidence.donors.best(case, "RC", stable) is None


def _over_before(case: Case, evidence: Evidence) -> bool:
    """Whether every transfer of the request to this process was over, by proven order, when it was looked at."""
    seen, descriptors = case.moment("RC"), evidence.descriptors
    moments = [descriptors.completion(send) for send in descriptors.sends_to(case.request, case.process)]
    return bool(moments) and all(m is not None and case.timeline.order.before(m, seen) for m in moments)
