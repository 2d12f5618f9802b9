"""F01: a buffer (one layer of one cache) is missing from the transfer.

Signature: no descriptor of the request touches any page of this buffer, while its other buffers are written; the pages
keep their old bytes.
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
    code="F01",
    shows="no descriptor of the request touches the buffer, others are written",
    certain="the sender's descriptors are all recorded, the old bytes are still there",
    best=claims(digest="certain", pages="certain"),
    rivals=(("F02", "every page of the buffer is left out, not the last ones"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the request's sends leave out the whole buffer."""
    found = look(case, evidence)
    if found is None or len(found.buffer) or len(found.leaving):
        return None
    old = still_old(case, bad)
    confidence: Confidence = "certain" if bool((old == bad).all()) else "likely"
    siblings = len(np.unique(evidence.descriptors.pieces.buffer[found.every]))
    return Explanation(
        code="F01",
        stage="descriptor",
        confidence=confidence,
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"no descriptor of the request touches {case.buffer.name} layer {case.buffer.layer}; "
            f"{siblings} other buffers are written",
            *(("the pages hold what was there before the transfer",) if confidence == "certain" else ()),
        ),
        runner_up=RunnerUp("F02", "every page of the buffer is left out, not the last ones"),
    )
