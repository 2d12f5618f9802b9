"""Which kind of fault explains wrong logits on known bytes: every hypothesis is tried, and all must agree.

One kind that gives all wrong logits of the read is named. Two kinds that both give them leave it unclassified, with
both named; a kind that tells only some of them stands back as the runner-up. Where none gives them it is the
kernel's arithmetic (F25), if what it computed still follows the right logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.classify import (
    elsewhere,
    integer_wrap,
    kernel_numerics,
    layout_permuted,
    number_format,
    reserved_slot,
    token_index_as_page_index,
    wrong_stride,
)
from replay.classify.base import Evidence, span
from replay.classify.hypotheses import Buffer, Fit, Hypothesis, Question, fits
from replay.findings import PageEvidence, kind_name
from replay.memory import Memory
from replay.page_columns import BufferInfo
from replay.ranges import byte_ranges, ranges
from replay.recorded import ReadCase
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding, RunnerUp
from replay.words import counted

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]

#: Every module that knows ways to misread, in the order in which they are tried.
MISREADINGS: tuple[Callable[[Question], Iterator[Hypothesis]], ...] = (
    layout_permuted.misreadings,
    number_format.misreadings,
    wrong_stride.misreadings,
    integer_wrap.misreadings,
    token_index_as_page_index.misreadings,
    elsewhere.misreadings,
)

#: Wrong logits that must follow from one hypothesis before the kind is certain.
SURE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """The kind of one read's wrong logits."""

    code: str
    rule: str | None
    sure: bool
    evidence: tuple[str, ...]
    runner_up: RunnerUp | None = None
    stage: str = "read-kernel"


def question(
    timeline: Timeline, memory: Memory, case: ReadCase, right: F64, bound: F64, wrong: Bool
) -> Question:
    """What is asked about a recorded read: with the memory of its process, as far as looks show it."""
    mine = timeline.buffers[case.buffer]
    others = (b for b in timeline.buffers if b.process == mine.process and b.number != mine.number)
    return Question(
        case=case,
        right=right,
        bound=bound,
        wrong=wrong,
        memory=memory.at(timeline.moment("read", case.read)),
        buffer=_buffer(mine),
        others=tuple(_buffer(b) for b in others if b.layout.name == mine.layout.name),
    )


def _buffer(info: BufferInfo) -> Buffer:
    return Buffer(info.address, info.pitch, info.layer, info.item_length)


def answer(question: Question, dirty: tuple[str, ...] = ()) -> Answer:
    """The kind that explains the wrong logits of a read; ``dirty``: what points to a NaN in slot 0."""
    tried: Counter[str] = Counter()
    found: list[Fit] = []
    for misreadings in MISREADINGS:
        listed = list(misreadings(question))
        tried.update(hypothesis.code for hypothesis in listed)
        found += fits(question, listed)
    counts = ", ".join(f"{number} of {_called(code)}" for code, number in sorted(tried.items()))
    lines = (f"tried on the same bytes: {counts}",)
    named = [fit for fit in found if fit.hypothesis.code]
    whole = [fit for fit in named if fit.whole and not fit.hypothesis.open]
    # A kind that tells every logit stands before those that leave some open.
    standing = whole or [fit for fit in named if not fit.hypothesis.open] or named or found
    codes = list(dict.fromkeys(fit.hypothesis.code for fit in standing))
    if not standing:
        return _nothing_fits(question, lines, dirty)
    best = max(standing, key=lambda fit: (fit.matched, -fit.unknown))
    what = best.hypothesis.what
    if len(codes) > 1:
        both = {fit.hypothesis.code: fit.hypothesis.what for fit in reversed(standing)}
        words = "; ".join(f"{code} {kind_name(code)}: {text}" for code, text in sorted(both.items()))
        return Answer("unclassified", f"several kinds give these logits: {words}", False, lines)
    if not codes[0]:
        return Answer("unclassified", what, False, lines)
    gives = f"{what}: this gives {best.matched} of the wrong logits"
    gives += f"; of {best.unknown} it tells nothing" if best.unknown else ""
    other = next((fit for fit in named if fit.hypothesis.code != codes[0]), None)
    enough = best.matched >= max(SURE_ROWS, best.unknown) and not (
        best.hypothesis.open or best.hypothesis.bare
    )
    sure = other is None and (enough or best.hypothesis.told)
    return Answer(codes[0], what, sure, (gives, *lines), _runner_up(codes[0], other, tried))


def _called(code: str) -> str:
    return f"{code} {kind_name(code)}" if code else "no kind"


def _runner_up(code: str, other: Fit | None, tried: Counter[str]) -> RunnerUp:
    if other is not None:
        return RunnerUp(
            other.hypothesis.code, f"it leaves {other.unknown} wrong logits open ({other.hypothesis.what})"
        )
    rival = next((rival for rival in RIVALS[code] if tried[rival]), "F25")
    if rival == "F25":
        return RunnerUp("F25", "one misreading of the right bytes gives every wrong logit")
    return RunnerUp(rival, f"none of the {tried[rival]} cases of it that were tried gives these logits")


#: Kind -> the kinds that it is most easily taken for at the read.
RIVALS = {
    "F07": ("F20", "F24"),
    "F20": ("F07", "F22"),
    "F21": ("F20", "F07"),
    "F22": ("F20", "F07"),
    "F24": ("F07", "F20"),
}


def _nothing_fits(question: Question, lines: tuple[str, ...], dirty: tuple[str, ...]) -> Answer:
    """What is left where no misreading fits: F23 in the reserved page, F25, or what speaks against it."""
    if dirty:
        rule = "a padding row left NaN in slot 0"
        other = RunnerUp("F25", "the logits are no numbers, and slot 0 is none")
        return Answer("F23", rule, False, (*dirty, *lines), other, "store")
    why = kernel_numerics.doubt(question)
    if why is not None:
        return Answer("unclassified", why, False, lines)
    wrong = int(question.wrong.sum())
    first = int(np.flatnonzero(question.wrong)[0])
    ruled_out = "no other layout, number format, stride, wrapped offset or row gives these logits"
    return Answer(
        "F25",
        f"from row {first} on" if wrong > 1 and question.wrong[first:].all() and first else None,
        kernel_numerics.sure(question),
        lines,
        RunnerUp("F07", ruled_out),
    )


def explain(timeline: Timeline, evidence: Evidence, question: Question) -> list[PageEvidence]:
    """One entry for each page with wrong logits."""
    case, wrong = question.case, question.wrong
    found = answer(question, reserved_slot.dirty(timeline, evidence, question))
    seen = bool(case.kernel) or (case.bracketed and evidence.covers(case.process, "read"))
    sure = found.sure and seen
    confidence: Confidence = "certain" if sure else "likely"
    rows = case.layout.rows
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(question.bound) & (question.bound > 0), question.bound, np.inf)
        excess = np.abs(case.logits - question.right) / size
    worst = int(np.argmax(np.where(wrong, np.nan_to_num(excess, nan=np.inf), -1.0)))
    step = int(timeline.trace.table("read")["step"][case.read])
    whose = f"your kernel {case.kernel}" if case.kernel else "recorded"
    lines = (
        f"step {step}: {counted(int(wrong.sum()), 'logit')} of {case.rows} outside the bound; row {worst}: {whose} "
        f"{float(case.logits[worst]):.6g}, reference {float(question.right[worst]):.6g}, "
        f"bound {float(question.bound[worst]):.2g}",
        *found.evidence,
        *_told(question),
        *_circumstances(case),
    )
    info = timeline.buffers[case.buffer]
    pages = []
    for logical in np.unique(np.flatnonzero(wrong) // rows).tolist():
        inside = np.zeros(rows, bool)
        part = wrong[logical * rows : (logical + 1) * rows]
        inside[: len(part)] = part
        spans, _ = byte_ranges(case.layout, inside, inside)
        pages.append(
            PageEvidence(
                code=found.code,
                stage=found.stage,
                confidence=confidence,
                process=case.process,
                request=case.request,
                buffer=info.name,
                layer=info.layer,
                page=PageFinding(
                    logical=int(logical),
                    physical=int(case.physical[logical]),
                    value_rows=ranges(inside),
                    scale_rows=ranges(inside) if case.layout.scale_bytes else (),
                    byte_ranges=spans,
                ),
                evidence=(*lines, f"wrong in this page: {span(inside)}"),
                rule=found.rule,
                runner_up=found.runner_up,
            )
        )
    return pages


def _circumstances(case: ReadCase) -> tuple[str, ...]:
    if case.kernel:
        return ("it was run on a copy of the pages that the read saw, with the recorded query and weights",)
    same = (
        "the pages and the table were the same before and after the kernel"
        if case.bracketed
        else "whether the pages stayed the same while the kernel ran is not known"
    )
    return "the page bytes are those that arrived, and table and length are right", same


def _told(question: Question) -> list[str]:
    """What the kernel was told differently from what the buffer is."""
    case, lines = question.case, []
    if case.stride not in (-1, question.buffer.pitch):
        lines.append(
            f"the kernel was given a stride of {case.stride:,}, the buffer's is {question.buffer.pitch:,}"
        )
    right = number_format.TAGS.get(case.layout.name, "")
    if case.number_format not in ("", right):
        lines.append(f"the kernel was told {case.number_format}, the buffer holds {right}")
    return lines
