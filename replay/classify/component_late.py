"""F12: one component (a whole buffer) arrived later than the others whose completion was taken for all.

Signature: at completion every page of one buffer still holds its old bytes while the request's other buffers are whole;
the buffer has a transfer of its own, and a later look shows its bytes complete.

Chosen over F09, where pages are torn or the late bytes belong to the transfer that brought the others as well; over
F01, where no descriptor names the buffer and nothing ever arrives; over F13, where the transfer failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims
from replay.classify.completion_early import MEANWHILE, arrived_later, reads_of, told_early
from replay.classify.completion_early import overwrote as overwrote_by_its_own
from replay.classify.undelivered import still_old
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F12",
    shows=(
        "at completion all pages of a buffer hold their old bytes, other buffers of the request are whole, and a later "
        "look shows the buffer complete, or completion was told before its transfer was over"
    ),
    certain=(
        "the buffer's transfers are not those of the whole buffers; theirs were over before completion was told, its "
        "own was not; a read saw the old bytes"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F09", "whole buffers are late, by a transfer of their own; no page is torn"),
        ("F01", "a transfer names the buffer, and its bytes arrived in the end"),
        ("F13", "the transfer did not fail"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the whole buffer was late and others of the request were not."""
    source = next((name for name in ("SE+", "SE", "ST") if case.has(name)), "")
    if source == "" or not case.has("RC", "RC-"):
        return None
    found = _component(case, evidence)
    if found is None:
        return None
    later, healed = arrived_later(case, source, bad)
    if not later and told_early(case, evidence) == "proven":
        healed = bad & still_old(case, bad)  # nobody looked once it was there
    if not healed.any():
        return None
    reads = reads_of(case, source, healed)
    over = _over(case, evidence, found.theirs)
    sure = over and not _over(case, evidence, found.mine) and reads.torn and bool((healed == bad).all())
    lines = [
        f"at completion (RC) every page of {found.names} held its old bytes; {found.whole} other "
        f"buffer{'s' if found.whole > 1 else ''} of the request were whole",
        f"{later} shows the source's bytes: the buffer arrived later"
        if later
        else "completion was told before its transfer was over, and no later look shows it there",
        f"its transfer ({_numbers(evidence, found.mine)}) is not theirs ({_numbers(evidence, found.theirs)})"
        + (", which was over before completion was told" if over else ""),
    ]
    if reads.torn:
        lines.append("a read (RD) saw the old bytes")
    elif reads.open:
        lines.append(MEANWHILE)
    return Explanation(
        code="F12",
        stage="completion",
        confidence="certain" if sure else "likely",
        explained=healed,
        expected=source,
        observed="RC",
        evidence=tuple(lines),
        rule=found.rule,
        runner_up=RunnerUp("F09", "whole buffers are late, by a transfer of their own; no page is torn"),
        harmless=reads.harmless,
    )


def overwrote(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (rows that the reading side appended) that the late buffer brought the source's bytes over.

    Pages travel whole: what arrives after reading has begun reaches past the prompt.
    """
    found = _component(case, evidence)
    if found is None:
        return None
    late = overwrote_by_its_own(case, evidence, bad, stage)
    if late is None:
        return None
    return replace(
        late,
        code="F12",
        evidence=(*late.evidence, f"every page of {found.names} held its old bytes at completion (RC)"),
        rule=found.rule,
        runner_up=RunnerUp("F09", "whole buffers are late, by a transfer of their own; no page is torn"),
    )


@dataclass(frozen=True, slots=True)
class _Component:
    """Buffers of a request that were late as a whole, with ``mine``, the sends that bring the case's own, and
    ``theirs``, those of the ``whole`` other buffers.
    """

    names: str
    whole: int
    mine: set[int]
    theirs: set[int]

    @property
    def rule(self) -> str:
        """What came late and what did not."""
        return f"{self.names} came late, {self.whole} other buffers did not"


def _component(case: Case, evidence: Evidence) -> _Component | None:
    """The late component that the case's buffer belongs to; None where it is none, or came with the others."""
    late, whole = _late_and_whole(case, evidence)
    mine, theirs = _sends(case, evidence, {case.slot}), _sends(case, evidence, set(whole))
    if case.slot not in late or not mine or not theirs or mine & theirs:
        return None
    return _Component(_listed({case.timeline.slots[slot] for slot in late}), len(whole), mine, theirs)


def _late_and_whole(case: Case, evidence: Evidence) -> tuple[list[int], list[int]]:
    """Buffers (slots) of the request that were wholly old at completion, and those that were right; none of either
    where a page was torn, for then the transfer itself was under way.
    """
    late: list[int] = []
    whole: list[int] = []
    for slot, (pages, cases) in evidence.siblings.buffers(case).items() if evidence.siblings else ():
        wrong = [other for other in cases if other.wire_bad.any()]
        if not wrong:
            whole.append(slot)
        elif len(wrong) == pages and all(_wholly_old(other) for other in wrong):
            late.append(slot)
        else:
            return [], []
    return late, whole


def _wholly_old(case: Case) -> bool:
    """Whether no unit of the page that differs from its old content had arrived."""
    if not case.has("RC", "RC-"):
        return False
    return bool((still_old(case, case.valid) == case.valid).all())


def _sends(case: Case, evidence: Evidence, slots: set[int]) -> set[int]:
    """Sends of the request to this receiver that write to buffers of ``slots``."""
    pieces, timeline = evidence.descriptors.pieces, case.timeline
    found = set()
    for row in evidence.descriptors.pieces_of(case.request, case.process).tolist():
        buffer = int(pieces.buffer[row])
        if buffer >= 0 and int(timeline.slot_of_buffer[buffer]) in slots:
            found.add(int(pieces.send[row]))
    return found


def _over(case: Case, evidence: Evidence, sends: set[int]) -> bool:
    """Whether each of ``sends`` was over, in proven order, before some rank told completion (or before RC)."""
    timeline = case.timeline
    told = timeline.tellings.told(*timeline.requests[case.request], case.process) or (case.moment("RC"),)
    ends = [evidence.descriptors.completion(send) for send in sends]
    return all(end is not None and any(timeline.order.before(end, moment) for moment in told) for end in ends)


def _numbers(evidence: Evidence, sends: set[int]) -> str:
    numbers = sorted({int(evidence.descriptors.sends["transfer"][send]) for send in sends})
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _listed(names: set[tuple[str, int]]) -> str:
    shown = [f"{name} layer {layer}" for name, layer in sorted(names)]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
