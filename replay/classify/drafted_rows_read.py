"""F29 at the table: rows between the accepted and the drafted length are inside the length read.

Signature: the query may see fewer rows than the read covers, and the rows in between are drafts that were stored
and rejected. Outside the length they are harmless: later stores overwrite them.
"""

from __future__ import annotations

from replay.classify.base import Evidence
from replay.classify.length_off_by_one import pages_of
from replay.findings import PageEvidence
from replay.lengths import LengthCase
from replay.timeline import Timeline
from replay.verdict import Confidence, RunnerUp


def explain(timeline: Timeline, evidence: Evidence, case: LengthCase) -> list[PageEvidence]:
    """The pages of drafted rows that were read, where every wrong read of ``case`` is one of drafts."""
    if not (case.told & (case.rows > case.exist) & (case.rows <= case.drafted)).all():
        return []
    off = case.rows - case.exist
    whole = bool((case.rows == case.drafted).all())
    # One row too many may be a length that is one off as well; two and more that end where the drafts end are not.
    sure = whole and bool((off >= 2).any())
    confidence: Confidence = "certain" if sure and evidence.covers(case.process, "read") else "likely"
    step = int(timeline.trace.table("read")["step"][case.reads[0]])
    lines = (
        f"{len(case.reads)} of {case.judged} reads cover drafted rows that were not accepted",
        f"step {step}: the query may see {int(case.exist[0])} rows, {int(case.rows[0])} were read, "
        f"{int(case.drafted[0])} exist with all drafts",
    )
    why = (
        "the length read ends where the drafted rows end"
        if whole
        else "the rows read too many are drafted ones"
    )
    return pages_of(
        timeline, case, "F29", confidence, lines, "rejected drafts are read", RunnerUp("F19", why)
    )
