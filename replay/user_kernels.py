"""Recorded stores and reads done again with the kernels that a user named, each judged by the reference.

A kernel gets the recorded pages side by side, in a cache of its own, and runs in a child process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replay.classify import read_kernel, top_k, wrong_store_bytes
from replay.classify.base import Evidence
from replay.classify.hypotheses import Buffer, Question
from replay.findings import PageEvidence
from replay.judge_options import JudgeOptions
from replay.kernels.reference import check_store, logits_reference, top_k_violations, wrong_logits
from replay.recorded import ReadCase, StoreCase
from replay.timeline import Timeline
from replay.verdict import NotJudged
from replay.words import counted

if TYPE_CHECKING:
    from replay.kernels.userkernel import Job

#: Calls of a user's kernel in one child: what they take lies in files until it ends.
_CALLS = 64

U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache that a user's kernel is given: the pages of one read, from address 0 on, and nothing else."""

    data: U8

    def gather(self, addresses: I64, length: int) -> tuple[U8, Bool]:
        """``uint8[n, length]`` from each address on, and which of these bytes lie inside the cache."""
        index = addresses[:, None] + np.arange(length)
        known = (index >= 0) & (index < self.data.size)
        return np.where(known, self.data.reshape(-1)[np.where(known, index, 0)], np.uint8(0)), known


def read_again(
    timeline: Timeline,
    evidence: Evidence,
    cases: list[ReadCase],
    options: JudgeOptions,
    unclear: list[NotJudged],
) -> list[PageEvidence]:
    """What the user's read kernel gets wrong in recorded reads: its logits, or a top-k that they do not give."""
    from replay.kernels.userkernel import read_job

    spec = str(options.read_kernel)
    jobs = [
        read_job(
            spec,
            case.layout.name,
            case.pages,
            np.arange(len(case.pages), dtype=np.int64)[None],
            np.array([case.rows], np.int64),
            case.query[None],
            case.weights[None],
            max(case.k, 1),
        )
        for case in cases
    ]
    pages: list[PageEvidence] = []
    for case, outputs in zip(
        cases, _run_user(f"your read kernel {spec}", jobs, options, unclear), strict=True
    ):
        if outputs is None:
            continue
        pages += _judge_read(timeline, evidence, case, spec, outputs)
    return [_as_users(page, spec) for page in pages]


def _judge_read(
    timeline: Timeline, evidence: Evidence, case: ReadCase, spec: str, outputs: dict[str, npt.NDArray[Any]]
) -> list[PageEvidence]:
    mine = replace(
        case,
        logits=np.asarray(outputs["logits"][0, : case.rows], np.float32),
        top_k=np.asarray(outputs["top_k"][0], np.int32),
        k=max(case.k, 1),
        physical=np.arange(len(case.pages), dtype=np.int64),
        bracketed=True,
        accumulator_bits=None,
        stride=-1,
        number_format="",
        kernel=spec,
    )
    reference, bound = logits_reference(case.layout, case.pages, case.rows, case.query, case.weights)
    wrong = wrong_logits(mine.logits, reference, bound)
    found: list[PageEvidence] = []
    if wrong.any():
        size = case.layout.page_bytes
        buffer = Buffer(0, size, timeline.buffers[case.buffer].layer, size)
        cache = Cache(np.ascontiguousarray(case.pages[:, :size]))
        question = Question(mine, reference, bound, wrong, cache, buffer)
        found = read_kernel.explain(timeline, evidence, question)
    else:
        broken = top_k_violations(mine.logits, mine.top_k, case.rows, mine.k)
        if broken.within:
            found = [top_k.explain(timeline, mine, broken)]
    return [
        replace(item, page=replace(item.page, physical=int(case.physical[item.page.logical])))
        for item in found
        if item.page is not None
    ]


def store_again(
    timeline: Timeline,
    evidence: Evidence,
    cases: list[StoreCase],
    options: JudgeOptions,
    unclear: list[NotJudged],
) -> list[PageEvidence]:
    """What the user's store kernel gets wrong in recorded stores."""
    from replay.kernels.userkernel import store_job

    spec = str(options.store_kernel)
    jobs = [
        store_job(
            spec,
            case.layout.name,
            np.zeros((1, case.layout.page_bytes), np.uint8),
            case.rows,
            case.inputs.keys,
            case.inputs.rope,
            case.inputs.norm_weight,
            case.inputs.epsilon,
        )
        for case in cases
    ]
    pages: list[PageEvidence] = []
    for case, outputs in zip(
        cases, _run_user(f"your store kernel {spec}", jobs, options, unclear), strict=True
    ):
        if outputs is None:
            continue
        stored = np.asarray(outputs["cache"], np.uint8)
        check = check_store(
            case.layout,
            case.inputs,
            case.layout.values(stored)[0][case.rows],
            case.layout.scales(stored)[0][case.rows],
        )
        if not check.reproduced.all():
            mine = replace(case, data=stored[0], kernel=spec)
            pages.append(wrong_store_bytes.explain(timeline, evidence, mine, check))
    return [_as_users(page, spec) for page in pages]


def _run_user(
    what: str, jobs: list[Job], options: JudgeOptions, unclear: list[NotJudged]
) -> list[dict[str, npt.NDArray[Any]] | None]:
    """Outputs of each call, None where there are none; why not is told once for all calls with the same reason."""
    from replay.kernels.userkernel import UserKernelError, run_jobs

    if not jobs:
        unclear.append(
            NotJudged(what, "the trace has nothing to run it on: no inputs were recorded with the bytes")
        )
        return []
    found: list[dict[str, npt.NDArray[Any]] | None] = []
    reasons: dict[str, list[str]] = {}
    for first in range(0, len(jobs), _CALLS):
        for outputs in run_jobs(jobs[first : first + _CALLS], options.timeout):
            if isinstance(outputs, UserKernelError):
                reasons.setdefault(outputs.reason, []).append(outputs.detail)
                found.append(None)
            else:
                found.append(outputs)
    for reason, details in reasons.items():
        calls = f"{len(details)} of {counted(len(jobs), 'call')}"
        unclear.append(NotJudged(f"{what}, {calls}", reason, details[0]))
    return found


def _as_users(page: PageEvidence, spec: str) -> PageEvidence:
    """A page that the user's kernel got wrong, said to be so."""
    return replace(page, rule=f"your kernel {spec}" + (f": {page.rule}" if page.rule else ""))
