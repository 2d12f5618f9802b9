"""Stores and reads done again with Triton: the project's own kernels on a sample, the user's kernels where asked.

The only part of a replay that imports torch. On a machine without a GPU the kernels run on Triton's interpreter, which
takes milliseconds a page: hence the sample, whose size is in the verdict's scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from replay import user_kernels
from replay.classify.base import Evidence
from replay.findings import PageEvidence, group
from replay.judge_options import JudgeOptions
from replay.kernels.reference import check_store, logits_reference, wrong_logits
from replay.recorded import ReadCase, StoreCase
from replay.reexecute import Rung
from replay.timeline import Timeline
from replay.verdict import Finding, NotJudged
from replay.words import counted

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]


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
                "re-execution in Triton",
                f"on this machine {counted(wrong_rows, 'row')} outside the bound of the reference",
            )
        )
    pages: list[PageEvidence] = []
    if options.read_kernel is not None:
        counts["read_kernel"] = options.read_kernel
        pages += user_kernels.read_again(timeline, evidence, read_cases, options, unclear)
    if options.store_kernel is not None:
        counts["store_kernel"] = options.store_kernel
        pages += user_kernels.store_again(timeline, evidence, store_cases, options, unclear)
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
