"""F04: the sender uses page ids of another space, such as its own.

Signature: the source page is carried whole, to a page that the request does not own at the receiver; its own page keeps
the old bytes.
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
    code="F04",
    shows="the source page was carried whole to a page that the request was never given",
    certain=(
        "the sender's descriptors and the receiver's allocations are all recorded, the old bytes "
        "are still there"
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
    if found is None or len(found.here) or not len(found.leaving):
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
    if case.timeline.alloc_row(case.process, case.request, landed) is not None:
        return None  # one of its own pages: the pages are permuted, not foreign
    old = still_old(case, bad)
    sure = bool((old == bad).all()) and evidence.covers(case.process, "alloc")
    confidence: Confidence = "certain" if sure else "likely"
    same = " (its own id of it)" if landed == found.source_page else ""
    return Explanation(
        code="F04",
        stage="descriptor",
        confidence=confidence,
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"the sender's page {found.source_page} was written to page {landed}{same}, which the request was never "
            f"given; its page is {case.page}",
            *(("that page holds what was there before the transfer",) if confidence == "certain" else ()),
        ),
        rule="destination ids are the sender's own" if same else None,
        runner_up=RunnerUp("F02", "the source page was sent, to another page"),
    )
