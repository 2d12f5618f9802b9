"""F26 and F27: a top-k that its own logits do not give.

Signature of F26: slots among the first min(length, k) that name no row of the request. Of F27: all slots name rows,
and some of these have a score below the k-th. Any choice among equal scores is right, and so is any order.
"""

from __future__ import annotations

import numpy as np

from replay.classify.base import VOCABULARY, Kind, claims
from replay.findings import PageEvidence
from replay.kernels.reference import TopKViolations
from replay.recorded import ReadCase
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding, RunnerUp

INVALID = Kind(
    code="F26",
    shows="slots among the first min(length, k) that name no row",
    certain="the logits are those recorded with it, and hold no NaN",
    best=claims(digest=None, pages="certain"),
    rivals=(("F27", "the slots name no row"),),
)

WRONG = Kind(
    code="F27",
    shows="valid rows below the k-th score",
    certain="the logits are those recorded with it, and hold no NaN",
    best=claims(digest=None, pages="certain"),
    rivals=(("F26", "every slot names a row, once"),),
)


def explain(timeline: Timeline, case: ReadCase, broken: TopKViolations) -> PageEvidence:
    """The finding for a top-k that its own logits do not give."""
    info = timeline.buffers[case.buffer]
    parts = {
        "that name no row": broken.invalid,
        "that name a row again": broken.repeated,
        "below the k-th score": broken.low,
        "past the end": broken.surplus,
    }
    code, runner_up = "unclassified", None
    if len(broken.invalid) and not len(broken.repeated):
        code = "F26"
        runner_up = RunnerUp("F27", f"{len(broken.invalid)} slots name no row at all")
    elif len(broken.low) and not len(broken.invalid):
        # A row named twice leaves out another one: told, but the scores are what decides.
        code = "F27"
        runner_up = RunnerUp("F26", "every slot among the first min(length, k) names a row")
    words = ", ".join(f"{len(slots)} slots {name}" for name, slots in parts.items() if len(slots))
    confidence: Confidence = "certain" if code in VOCABULARY and broken.judged else "likely"
    return PageEvidence(
        code=code,
        stage="top-k",
        confidence=confidence,
        process=case.process,
        request=case.request,
        buffer=info.name,
        layer=info.layer,
        page=PageFinding(logical=0, physical=int(case.physical[0]) if len(case.physical) else -1),
        evidence=(
            f"top-{case.k} of {case.rows} logits: {words}",
            *(_first(case, broken) if code == "F27" else ()),
            "the logits themselves are right",
        ),
        runner_up=runner_up,
    )


def _first(case: ReadCase, broken: TopKViolations) -> tuple[str, ...]:
    """The first slot below the threshold, in words."""
    slot = int(broken.low[0])
    row = int(case.top_k[slot])
    scores = case.logits[: case.rows]
    least = float(
        np.partition(scores, case.rows - min(case.rows, case.k))[case.rows - min(case.rows, case.k)]
    )
    return (
        f"slot {slot} names row {row} with {float(scores[row]):.6g}; the {case.k}-th score is {least:.6g}",
    )
