"""F19: the length at the read is one row or one page off.

Signature: the read covers a row or a page more than exists (nobody ever wrote it for this request), or fewer than were
stored, by the same amount in every read of the request. Told apart from speculative rows, which were stored as drafts
and lie between the accepted and the drafted length.
"""

from __future__ import annotations

import numpy as np

from replay.classify.base import Evidence, Kind, claims
from replay.findings import PageEvidence
from replay.lengths import LengthCase
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding, RunnerUp

KIND = Kind(
    code="F19",
    shows="a read is longer than the rows that exist, or shorter than those that arrived or were stored",
    certain=(
        "every wrong read of the request is off by the same one row or one page; all stores, reads and "
        "allocations of the reader are recorded"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F29", "the rows read too many were never stored, not even as drafts"),
        ("F18", "the table names the request's own pages"),
    ),
)


def explain(timeline: Timeline, evidence: Evidence, case: LengthCase) -> list[PageEvidence]:
    """One entry for each page that holds rows which are read too many or left out."""
    if not evidence.covers(case.process, "store", "read"):
        return []  # rows that nobody was seen to store may have been stored all the same
    per_page = timeline.buffers[case.buffer].layout.rows
    off = case.rows - case.exist
    amounts = np.unique(off).tolist()
    one = len(amounts) == 1
    by = int(amounts[0])
    code = "F19" if all(abs(amount) <= per_page for amount in amounts) else "unclassified"
    sure = one and abs(by) in (1, per_page) and evidence.covers(case.process, "alloc")
    confidence: Confidence = "certain" if sure and code == "F19" else "likely"
    what = _amount(by, per_page) if one else "not always by the same amount"
    table = timeline.trace.table("read")
    first = int(case.reads[0])
    lines = (
        f"{len(case.reads)} of {case.judged} reads are off: {what}",
        f"step {int(table['step'][first])}: {int(case.rows[0])} rows were read, "
        + (f"the query may see {int(case.exist[0])}" if case.told[0] else f"{int(case.exist[0])} exist"),
        f"the prompt has {int(timeline.request_rows[case.request])} rows, and this side stored up to row "
        f"{int(case.exist.max()) - 1} itself or received it",
    )
    runner_up = RunnerUp(
        "F29",
        "none of the rows read too many was drafted" if by > 0 else "rows that exist are left out",
    )
    return pages_of(timeline, case, code, confidence, lines, what if one else None, runner_up)


def _amount(by: int, per_page: int) -> str:
    unit = "row" if abs(by) == 1 else "page" if abs(by) == per_page else f"{abs(by)} rows"
    number = "one " if unit in ("row", "page") else ""
    return f"{number}{unit} {'more than exists' if by > 0 else 'fewer than exist'}"


def pages_of(
    timeline: Timeline,
    case: LengthCase,
    code: str,
    confidence: Confidence,
    lines: tuple[str, ...],
    rule: str | None,
    runner_up: RunnerUp | None,
) -> list[PageEvidence]:
    """The pages of the rows between the length read and the length that is right."""
    info = timeline.buffers[case.buffer]
    per_page = info.layout.rows
    tables = timeline.trace.table("read").ragged("table")
    spans: dict[int, tuple[int, int, int]] = {}
    for read, rows, exist in zip(case.reads.tolist(), case.rows.tolist(), case.exist.tolist(), strict=True):
        low, high = min(rows, exist), max(rows, exist)
        # Beyond a page or two, only where it begins is told.
        for logical in range(low // per_page, min((high - 1) // per_page, low // per_page + 1) + 1):
            start = max(low - logical * per_page, 0)
            stop = min(high - logical * per_page, per_page) - 1
            entries = tables[read]
            physical = int(entries[logical]) if logical < len(entries) else -1
            seen = spans.get(logical)
            if seen is not None:
                start, stop = min(start, seen[0]), max(stop, seen[1])
            spans[logical] = (start, stop, physical)
    return [
        PageEvidence(
            code=code,
            stage="table",
            confidence=confidence,
            process=case.process,
            request=case.request,
            buffer=info.name,
            layer=info.layer,
            page=PageFinding(
                logical=logical,
                physical=physical,
                value_rows=((start, stop),),
                scale_rows=((start, stop),) if info.layout.scale_bytes else (),
            ),
            evidence=lines,
            rule=rule,
            runner_up=runner_up,
        )
        for logical, (start, stop, physical) in sorted(spans.items())
    ]
