"""Stores and reads done again with Triton: the project's own kernels on a sample, the user's kernels where asked.

The only part of a replay that imports torch. On a machine without a GPU the kernels run on Triton's interpreter, which
takes milliseconds a page: hence the sample, whose size is in the verdict's scope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replay.classify import kernel_numerics, wrong_store_bytes
from replay.classify.base import Evidence
from replay.findings import PageEvidence, group
from replay.judge_options import JudgeOptions
from replay.kernels.reference import check_store, logits_reference, wrong_logits
from replay.recorded import ReadCase, StoreCase
from replay.reexecute import Rung
from replay.timeline import Timeline
from replay.verdict import Finding, NotJudged

if TYPE_CHECKING:
    import torch

    from replay.kernels.userkernel import Job

Progress = Callable[[str, int, int], None]

#: Calls of a user's kernel in one child: what they take lies in files until it ends.
_CALLS = 64


def run(
    timeline: Timeline,
    evidence: Evidence,
    stores: Rung,
    reads: Rung,
    options: JudgeOptions,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Finding], list[NotJudged]]:
    """(what to add to the scope, findings about the user's kernels, what could not be judged)."""
    from replay.kernels import launch

    store_cases = [*stores.suspects, *stores.sample][: max(options.sample, 0) or None]
    read_cases = [*reads.suspects, *reads.sample][: max(options.sample, 0) or None]
    if options.exhaustive:
        store_cases, read_cases = [*stores.suspects, *stores.sample], [*reads.suspects, *reads.sample]
    try:
        device = launch.prepare()
    except RuntimeError as error:
        # The reference has judged these stores and reads; a second opinion that cannot be had is scope.
        if options.read_kernel is None and options.store_kernel is None:
            return {"triton": {"device": "none", "why": str(error)}}, [], []
        return {"triton": {"device": "none"}}, [], [NotJudged("your kernels", str(error))]
    unclear: list[NotJudged] = []
    counts: dict[str, Any] = {"device": "GPU" if device == "cuda" else "interpreter"}
    total = len(store_cases) + len(read_cases)
    wrong_rows = 0
    for number, case in enumerate(store_cases):
        if progress is not None:
            progress("Triton", number, total)
        wrong_rows += _store_again(case, device)
    counts["stores"] = len(store_cases)
    for number, read in enumerate(read_cases):
        if progress is not None:
            progress("Triton", len(store_cases) + number, total)
        wrong_rows += _read_again(read, device)
    counts["reads"] = len(read_cases)
    if wrong_rows:
        unclear.append(
            NotJudged(
                "re-execution in Triton", f"{wrong_rows} rows disagree with the reference on this machine"
            )
        )
    pages: list[PageEvidence] = []
    if options.read_kernel is not None:
        counts["read_kernel"] = options.read_kernel
        pages += _user_reads(timeline, evidence, read_cases, options, unclear)
    if options.store_kernel is not None:
        counts["store_kernel"] = options.store_kernel
        pages += _user_stores(timeline, evidence, store_cases, options, unclear)
    return {"triton": counts}, group(timeline, pages), unclear


def _tensor(array: npt.NDArray[Any], device: str) -> torch.Tensor:
    """A tensor of its own: what was read from a trace may be a read-only view."""
    import torch

    return torch.from_numpy(array.copy()).to(device)


def _store_again(case: StoreCase, device: str) -> int:
    """Rows that the Triton store writes outside the reference's bound."""
    import torch

    from replay.kernels.store import store

    inputs = case.inputs
    cache = torch.zeros((1, case.layout.page_bytes), dtype=torch.uint8, device=device)
    store(
        case.layout,
        cache,
        _tensor(case.rows, device),
        _tensor(inputs.keys, device),
        _tensor(inputs.rope, device),
        _tensor(inputs.norm_weight, device),
        inputs.epsilon,
    )
    page = cache.cpu().numpy()
    check = check_store(
        case.layout, inputs, case.layout.values(page)[0][case.rows], case.layout.scales(page)[0][case.rows]
    )
    return int((~check.reproduced).sum())  # rows that the reference cannot judge disagree with nobody


def _read_again(case: ReadCase, device: str) -> int:
    """Rows that the Triton read gives outside the reference's bound."""
    import torch

    from replay.kernels.read import read

    logits, _ = read(
        case.layout,
        _tensor(case.pages, device),
        torch.arange(len(case.pages), dtype=torch.int64, device=device)[None],
        torch.tensor([case.rows], dtype=torch.int64, device=device),
        _tensor(case.query, device)[None],
        _tensor(case.weights, device)[None],
        max(case.k, 1),
    )
    reference, bound = logits_reference(case.layout, case.pages, case.rows, case.query, case.weights)
    return int(wrong_logits(logits[0, : case.rows].cpu().numpy(), reference, bound).sum())


def _user_reads(
    timeline: Timeline,
    evidence: Evidence,
    cases: list[ReadCase],
    options: JudgeOptions,
    unclear: list[NotJudged],
) -> list[PageEvidence]:
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
        logits = np.asarray(outputs["logits"][0, : case.rows], np.float32)
        mine = replace(case, logits=logits, bracketed=True, kernel=spec)
        reference, bound = logits_reference(case.layout, case.pages, case.rows, case.query, case.weights)
        wrong = wrong_logits(mine.logits, reference, bound)
        if wrong.any():
            pages += kernel_numerics.explain(timeline, evidence, mine, reference, bound, wrong)
    return [_as_users(page, spec) for page in pages]


def _user_stores(
    timeline: Timeline,
    evidence: Evidence,
    cases: list[StoreCase],
    options: JudgeOptions,
    unclear: list[NotJudged],
) -> list[PageEvidence]:
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
        calls = f"{len(details)} of {len(jobs)} calls"
        unclear.append(NotJudged(f"{what}, {calls}", reason, details[0]))
    return found


def _as_users(page: PageEvidence, spec: str) -> PageEvidence:
    """A page that the user's kernel got wrong, said to be so."""
    return replace(page, rule=f"your kernel {spec}" + (f": {page.rule}" if page.rule else ""))
