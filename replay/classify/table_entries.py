"""Wrong entries of one read's block table as pages of a finding: shared by F17, F18 and F20."""

from __future__ import annotations

from collections.abc import Sequence

from replay.classify.base import Evidence
from replay.findings import PageEvidence
from replay.tables import TableCase
from replay.timeline import Timeline
from replay.verdict import Donor, PageFinding, RunnerUp


def recorded(timeline: Timeline, evidence: Evidence, case: TableCase) -> bool:
    """Whether the allocation is ordered before the read, and the kernel was seen to be given the table.

    A table that was right before the kernel and wrong after it does not say what the kernel itself saw.
    """
    ordered = timeline.given_before(case.process, case.request, case.given, case.moment)
    return ordered and not case.during and evidence.covers(case.process, "alloc", "read")


def wrong_entries(
    timeline: Timeline,
    case: TableCase,
    code: str,
    *,
    sure: bool,
    evidence: tuple[str, ...],
    rule: str | None,
    runner_up: RunnerUp,
    donors: Sequence[Donor | None] = (),
) -> list[PageEvidence]:
    """One page for each wrong entry; ``donors`` say whose page each entry names, where that is told."""
    info = timeline.buffers[case.buffer]
    return [
        PageEvidence(
            code=code,
            stage="table",
            confidence="certain" if sure else "likely",
            process=case.process,
            request=case.request,
            buffer=info.name,
            layer=info.layer,
            page=PageFinding(logical=logical, physical=seen, donor=donor),
            evidence=evidence,
            rule=rule,
            runner_up=runner_up,
        )
        for logical, seen, donor in zip(
            case.logical, case.seen, donors or [None] * len(case.seen), strict=True
        )
    ]


def listed(numbers: Sequence[int]) -> str:
    """Some of these numbers, in words."""
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
