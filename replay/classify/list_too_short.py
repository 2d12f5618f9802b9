"""F02: a page list is too short: the last logical pages are not sent.

Signature: in every layer the first pages are delivered and no descriptor touches the last ones, nor carries their
source pages anywhere; they keep their old bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims
from replay.classify.undelivered import look, still_old
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F02",
    shows="the first pages are brought, none from some page on",
    certain=(
        "the sender's descriptors are all recorded, the old bytes are still there, the allocation "
        "of every page is known"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(("F01", "the first pages of the same buffer were sent"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the request's page list ends before this page."""
    found = look(case, evidence)
    if found is None or len(found.here) or len(found.leaving) or not len(found.buffer):
        return None
    pieces = evidence.descriptors.pieces
    sent = np.unique(pieces.page[found.buffer])
    given = case.timeline.given_pages(
        np.full(case.logical + 1, case.process),
        np.full(case.logical + 1, case.request),
        np.arange(case.logical + 1),
    )
    inside = np.isin(given, sent)
    # The pages that were sent are the first ones: from some page on, none is.
    first = int(np.flatnonzero(~inside)[0]) if (~inside).any() else -1
    if first < 1 or inside[first:].any() or (given < 0).any():
        return None
    old = still_old(case, bad)
    confidence: Confidence = "certain" if bool((old == bad).all()) else "likely"
    return Explanation(
        code="F02",
        stage="descriptor",
        confidence=confidence,
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"the descriptors bring the first {first} pages and none from logical page {first} on",
            *(("the pages hold what was there before the transfer",) if confidence == "certain" else ()),
        ),
        runner_up=RunnerUp("F01", "the first pages of the same buffer were sent"),
    )
