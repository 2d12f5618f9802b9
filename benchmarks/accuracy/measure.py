"""Judges the traces and compares the verdicts with the truth."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy import case, clean
from benchmarks.accuracy.deed import Truth
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from replay.verdict import Finding, Verdict
from replay.writing import WriteError

#: The Triton kernels are left out: their sample needs an interpreter on a CPU and says nothing more here.
OPTIONS = JudgeOptions(reexecute=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One trace to write and judge; ``code`` "" is a clean one with ``requests`` requests."""

    code: str
    variant: str
    format: str
    seed: int
    requests: int = 0

    @property
    def again(self) -> str:
        """The command that does this task again."""
        same = f"{self.seed}..{self.seed}"
        which = f"--kinds {self.code} --formats {self.format} --seeds {same} --clean 0"
        if not self.code:
            which = f"--kinds none --clean {same}"
        return f"python -m benchmarks.accuracy {which} --processes 1 --verbose"


@dataclass(slots=True)
class Outcome:
    """What came of a task."""

    task: Task
    answer: str = ""  #: code that was named, "unclassified", or "none"
    stage: str = ""
    confidence: str = ""
    stage_right: bool = False
    kind_right: bool = False
    certain: bool = False
    wrong_certain: list[str] = field(default_factory=list)
    bystanders: list[str] = field(default_factory=list)
    verdict: str = ""
    accusations: list[str] = field(default_factory=list)
    requests: int = 0
    lossy: bool = False
    seconds: float = 0.0  #: of CPU time
    note: str = ""


class NotWrittenError(Exception):
    """A trace could not be written; comes back from another process, as ``WriteError`` does not."""


def begin_worker() -> None:
    """For the processes of a measurement: Ctrl-C is the parent's to handle, and without a parent they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    multiprocessing.connection.wait([parent])
    os._exit(1)


def judged(path: Path) -> Verdict:
    """The verdict on a trace."""
    with open_trace(path) as trace:
        return judge(trace, OPTIONS)


def run(task: Task, folder: Path) -> Outcome:
    """Write one trace, judge it, compare, remove it.

    Raises :class:`NotWrittenError` where the folder cannot be written to: that is no outcome.
    """
    begin = time.process_time()
    gc.disable()  # a fifth of the time, for the few objects of one trace
    path = folder / f"{task.code or 'clean'}-{task.variant}-{task.format}-{task.seed}.h5"
    outcome = Outcome(task)
    try:
        if task.code:
            _faulty(task, path, outcome)
        else:
            _clean(task, path, outcome)
    except WriteError as error:
        raise NotWrittenError(str(error)) from None
    except (
        Exception
    ) as error:  # a judge that fails gives no right answer, and the rest is measured all the same
        outcome.answer, outcome.note = (
            "failed",
            f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}",
        )
    finally:
        path.unlink(missing_ok=True)
        gc.enable()
        gc.collect()
    outcome.seconds = time.process_time() - begin
    return outcome


def _faulty(task: Task, path: Path, outcome: Outcome) -> None:
    truth = case.write(path, task.code, task.variant, task.format, task.seed)
    verdict = judged(path)
    compare(verdict, truth, outcome)


def compare(verdict: Verdict, truth: Truth, outcome: Outcome) -> None:
    """The answer is the first finding about the request that the fault hit, in the judge's own order."""
    outcome.verdict = verdict.verdict
    mine = [finding for finding in verdict.findings if finding.request.room == truth.room]
    outcome.answer, outcome.stage = "none", verdict.verdict
    right = (truth.code, *truth.also)
    if mine:
        first = mine[0]
        outcome.answer, outcome.stage, outcome.confidence = first.code, first.stage, first.confidence
        outcome.stage_right = first.stage in truth.stages
        same = [finding for finding in mine if finding.code == truth.code]
        outcome.kind_right = outcome.stage_right and first.code in right and bool(same)
        outcome.certain = outcome.kind_right and any(finding.confidence == "certain" for finding in same)
        outcome.note = "; ".join(first.evidence)[:300]
    for finding in verdict.findings:
        if finding.code not in (*right, "unclassified") and finding.confidence == "certain":
            outcome.wrong_certain.append(_words(finding))
        if finding.request.room not in truth.rooms:
            outcome.bystanders.append(_words(finding))


def _clean(task: Task, path: Path, outcome: Outcome) -> None:
    made = clean.write(path, task.seed, task.requests)
    outcome.requests, outcome.lossy = made.requests, made.lossy  # they count, even where the judge fails
    verdict = judged(path)
    outcome.verdict = verdict.verdict
    outcome.accusations = [_words(finding) for finding in verdict.findings]
    outcome.note = "; ".join(f"{item.what}: {item.why}" for item in verdict.not_judged)[:300]


def _words(finding: Finding) -> str:
    pages = [page.logical for page in finding.pages[:4]]
    return (
        f"{finding.code} {finding.stage} {finding.confidence} room {finding.request.room} layer {finding.layer} "
        f"pages {pages}: {finding.evidence[0][:160]}"
    )


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of all outcomes, as JSON."""
    faulty = [item for item in outcomes if item.task.code]
    clean_ones = [item for item in outcomes if not item.task.code]
    right = [item for item in faulty if item.kind_right]
    lossless = [item for item in clean_ones if not item.lossy]
    matrix: dict[str, dict[str, int]] = {}
    for item in faulty:
        row = matrix.setdefault(item.task.code, {})
        row[item.answer] = row.get(item.answer, 0) + 1
    return {
        "kinds": len(matrix),
        "traces": len(faulty),
        "stage_right": _share(item.stage_right for item in faulty),
        "kind_right": _share(item.kind_right for item in faulty),
        "certain_of_right": _share(item.certain for item in right),
        "wrong_certain": sum(bool(item.wrong_certain) for item in faulty),
        "clean_requests": sum(item.requests for item in clean_ones),
        "accusations": sum(len(item.accusations) for item in clean_ones),
        "clean_of_lossless": _weighted(lossless),
        "matrix": {code: dict(sorted(matrix[code].items())) for code in sorted(matrix)},
        "details": {code: _details([i for i in faulty if i.task.code == code]) for code in sorted(matrix)},
        "fair": _fair(clean_ones),
    }


def _share(hits: Any) -> float | None:
    found = [bool(hit) for hit in hits]
    return round(sum(found) / len(found), 4) if found else None


def _weighted(items: list[Outcome]) -> float | None:
    """Share of requests whose trace came out clean."""
    total = sum(item.requests for item in items)
    if not total:
        return None
    return round(sum(item.requests for item in items if item.verdict == "clean") / total, 4)


def _fair(items: list[Outcome]) -> list[str]:
    """Clean traces that were accused, failed, or lost nothing and did not come out clean."""
    found = []
    for item in items:
        said = [*item.accusations, *([f"failed: {item.note}"] if item.answer else [])]
        if not said and not item.lossy and item.verdict != "clean":
            said = [f"{item.verdict}: {item.note}"]
        found += [f"seed {item.task.seed}: {line}" for line in said]
    return found


def _details(items: list[Outcome]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traces": len(items),
        "stage_right": _share(i.stage_right for i in items),
        "kind_right": _share(i.kind_right for i in items),
        "certain_of_right": _share(i.certain for i in items if i.kind_right),
        "seconds": round(sum(i.seconds for i in items), 1),
        "formats": {
            name: _share(i.kind_right for i in items if i.task.format == name)
            for name in sorted({i.task.format for i in items})
        },
        "variants": {
            name or "-": _share(i.kind_right for i in items if i.task.variant == name)
            for name in sorted({i.task.variant for i in items})
        },
    }
    wrong = Counter(
        f"{i.task.variant or '-'} {i.task.format} seed {i.task.seed}: {i.answer} at {i.stage}"
        for i in items
        if not i.kind_right
    )
    if wrong:
        found["not_right"] = sorted(wrong)
    for name in ("wrong_certain", "bystanders"):
        said = [
            f"{i.task.variant or '-'} {i.task.format} seed {i.task.seed}: {line}"
            for i in items
            for line in getattr(i, name)[:3]
        ]
        if said:
            found[name] = said
    return found
