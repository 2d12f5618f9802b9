"""F13: a transfer failed and its pages are read all the same.

Signature: the sender learned of an error, the receiver was told that the request is complete, and the destination
keeps its old bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F13",
    shows=(
        "the sender learned of an error, and what the transfer should have brought is not there, "
        "then or later"
    ),
    certain="the error is ordered before RC, the old bytes were seen before",
    best=claims(digest="certain", pages="certain"),
    rivals=(("F31", "the transfer did not report success"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that a failed transfer of the request should have brought and that are still old later."""
    if not case.has("RC"):
        return None
    descriptors, pieces = evidence.descriptors, evidence.descriptors.pieces
    here = descriptors.touching(case.buffer.number, case.page)
    sends = np.unique(pieces.send[here[pieces.request[here] == case.request]])
    failed = [send for send in sends.tolist() if descriptors.failed(send)]
    if not failed or len(failed) != len(sends):
        return None
    lasting = bad & case.same("RC", "LT") if case.has("LT") else bad.copy()
    if not lasting.any():
        return None
    old = lasting & case.same("RC", "RC-") if case.has("RC-") else lasting
    order, timeline = case.timeline.order, case.timeline
    before = all(
        (over := descriptors.completion(send)) is not None and order.before(over, case.moment("RC"))
        for send in failed
    )
    sure = before and case.has("RC-", "LT") and bool((old == bad).all())
    confidence: Confidence = "certain" if sure else "likely"
    numbers = ", ".join(str(int(descriptors.sends["transfer"][send])) for send in failed)
    values, scales = halves(lasting)
    state = (
        "the error was known before reception was told complete"
        if before
        else "the sender learned of an error"
    )
    room = timeline.requests[case.request][0]
    return Explanation(
        code="F13",
        stage="wire",
        confidence=confidence,
        explained=lasting,
        expected=next((stage for stage in ("SE+", "SE", "ST") if case.has(stage)), "ST"),
        observed="RC",
        evidence=(
            f"transfer {numbers} of room {room} ended with an error: {state}",
            f"{in_words(values, scales)} were not brought by it",
        ),
        runner_up=RunnerUp("F31", "the transfer did not report success"),
    )
