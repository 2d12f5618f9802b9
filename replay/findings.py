"""From explained units to findings: rows, byte ranges, counts, and pages grouped into one finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import VOCABULARY, Explanation, halves, lower
from replay.ranges import byte_ranges, joined, ranges
from replay.timeline import Timeline
from replay.verdict import Confidence, Finding, Hazard, PageFinding, Ranges, RequestId, RunnerUp

Bool = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]

#: Most lines of evidence in one finding; pages of one finding share most of theirs.
EVIDENCE_LINES = 12


@dataclass(frozen=True, slots=True)
class PageEvidence:
    """One page of a finding before grouping."""

    code: str
    stage: str
    confidence: Confidence
    process: int
    request: int
    buffer: str
    layer: int
    page: PageFinding | None  #: None where the whole request is concerned
    evidence: tuple[str, ...]
    explanation: Explanation | None = None
    rule: str | None = None
    runner_up: RunnerUp | None = None

    @property
    def kind(self) -> str:
        """The kind as printed."""
        return kind_name(self.code)


def kind_name(code: str) -> str:
    """The kind as printed, ``unclassified`` for what has no code."""
    return VOCABULARY[code][0] if code in VOCABULARY else "unclassified"


def page_evidence(case: Case, explanation: Explanation) -> PageEvidence:
    """The page of a case with one explanation of some of its units."""
    values, scales = halves(explanation.explained)
    expected, observed = case.data(explanation.expected), case.data(explanation.observed)
    spans, count = byte_ranges(case.layout, values, scales, expected, observed)
    snaps = case.timeline.snapshots
    row = case.rows.get("SE", case.rows.get("ST", -1)) if explanation.at_source else -1
    process = int(snaps.process[row]) if row >= 0 else case.process
    physical = int(snaps.page[row]) if row >= 0 else case.page
    name, layer = case.timeline.slots[case.slot]
    return PageEvidence(
        code=explanation.code,
        stage=explanation.stage,
        confidence=explanation.confidence,
        process=process,
        request=case.request,
        buffer=name,
        layer=layer,
        page=PageFinding(
            logical=case.logical,
            physical=physical,
            value_rows=ranges(values),
            scale_rows=ranges(scales) if case.layout.scale_bytes else (),
            byte_ranges=spans,
            bytes_differing=count,
            donor=explanation.donor,
        ),
        evidence=explanation.evidence,
        explanation=explanation,
        rule=explanation.rule,
        runner_up=explanation.runner_up,
    )


def group(timeline: Timeline, pages: Iterable[PageEvidence]) -> list[Finding]:
    """One finding for each (kind, stage, request, side, buffer, layer), pages in logical order."""
    groups: dict[tuple[str, str, int, int, str, int], list[PageEvidence]] = {}
    for item in pages:
        key = (item.code, item.stage, item.request, item.process, item.buffer, item.layer)
        groups.setdefault(key, []).append(item)
    return [_finding(timeline, items) for items in groups.values()]


def _finding(timeline: Timeline, items: list[PageEvidence]) -> Finding:
    first = items[0]
    room, attempt = timeline.requests[first.request] if first.request >= 0 else (-1, 0)
    confidence = first.confidence
    for item in items:
        confidence = lower(confidence, item.confidence)
    process = timeline.trace.processes[first.process]
    explanation = first.explanation
    rules = {item.rule for item in items}
    return Finding(
        code=first.code,
        kind=first.kind,
        stage=first.stage,
        confidence=confidence,
        request=RequestId(room, attempt, explanation.aliases if explanation else ()),
        role=process.role,
        rank=process.rank,
        buffer=first.buffer,
        layer=first.layer,
        pages=_pages(items),
        rule=first.rule if len(rules) == 1 else "; ".join(sorted(r for r in rules if r)) or None,
        evidence=tuple(dict.fromkeys(line for item in items for line in item.evidence))[:EVIDENCE_LINES],
        runner_up=first.runner_up,
    )


def _pages(items: list[PageEvidence]) -> tuple[PageFinding, ...]:
    """Pages in logical order, each once: rows of the same page are joined, of several pages the first seen stays."""
    found: dict[int, PageFinding] = {}
    for page in (item.page for item in items if item.page is not None):
        first = found.setdefault(page.logical, page)
        if first is page or first.physical != page.physical:
            continue
        counts = (first.bytes_differing, page.bytes_differing)
        found[page.logical] = replace(
            first,
            value_rows=joined(first.value_rows, page.value_rows, closed=True),
            scale_rows=joined(first.scale_rows, page.scale_rows, closed=True),
            byte_ranges=joined(first.byte_ranges, page.byte_ranges, closed=False),
            bytes_differing=None
            if None in counts or _overlap(first.byte_ranges, page.byte_ranges)
            else sum(counts),  # type: ignore[arg-type]  # None was ruled out
        )
    return tuple(found[logical] for logical in sorted(found))


def _overlap(first: Ranges, second: Ranges) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)


def hazard(case: Case, explanation: Explanation) -> Hazard:
    """A cause that changed no byte which was read."""
    name, layer = case.timeline.slots[case.slot]
    return Hazard(
        what=f"{explanation.code} {kind_name(explanation.code)}, harmless this time: {explanation.evidence[0]}",
        where=f"room {case.room}, {name} layer {layer}, logical page {case.logical}",
    )
