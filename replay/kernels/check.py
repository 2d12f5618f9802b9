"""The offline check of store and read kernels: a kernel against the float64 reference, on made-up caches.

What somebody who suspects a kernel writes by hand: each format, batch 1, 8 and 32, requests of one length and of
varied lengths, pages scattered over the pool. Every logit is compared with its own bound, the top-512 with the
reference's (Jaccard) and with the kernel's own logits; every stored row with what an fp32 store may write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from capture_hooks.layouts import LAYOUTS, Layout
from replay.kernels import read, reference, store, twins, userkernel

EPSILON = 1e-6
HEADS = 64
TOP_K = 512
#: Rows of each request by batch: more than 512, so that the top-512 is a choice, and few enough for the interpreter.
INTERPRETED_ROWS = {1: 4096, 8: 2048, 32: 1024}
COMPILED_ROWS = 8192
STORE_ROWS = {"interpreted": 4096, "compiled": 65536}

Status = Literal["right", "wrong", "not judged"]


@dataclass(frozen=True, slots=True)
class ReadCase:
    """One batch of a read: a pool of pages, a table and queries, as numpy arrays."""

    layout: Layout
    lengths: str  #: "uniform" or "varied"
    cache: npt.NDArray[np.uint8]  #: [pages, page_bytes]
    table: npt.NDArray[np.int64]  #: [B, maxpages]
    rows: npt.NDArray[np.int64]  #: [B]
    query: npt.NDArray[np.float32]  #: [B, H, 128]
    weights: npt.NDArray[np.float32]  #: [B, H]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How one kernel did on one `ReadCase`."""

    kernel: str
    format: str
    batch: int
    lengths: str
    rows: int  #: rows of all requests
    status: Status
    wrong_rows: int = 0  #: rows outside their bound
    unjudged_rows: int = 0
    error: float = 0.0  #: largest error over its bound: 1 is the bound
    absolute_error: float = 0.0
    jaccard: float = 1.0  #: the least over the requests: top-512 of the kernel and of the reference
    invalid_top_k: int = 0  #: requests whose top-k does not follow from the kernel's own logits
    seconds: float = 0.0
    why: str = ""
    detail: str = ""  #: what a user's kernel printed or its traceback; not in the JSON


@dataclass(frozen=True, slots=True)
class StoreResult:
    """How one kernel stored rows of one format."""

    kernel: str
    format: str
    rows: int
    status: Status
    wrong_rows: int = 0  #: rows with a code or a scale that an fp32 store cannot have written
    unjudged_rows: int = 0
    error: float = 0.0  #: largest distance of a value from its code's interval over its bound: 1 is the bound
    unequal_rows: int = 0  #: rows that differ from the torch twin in any byte (own kernel: must be 0)
    stray_bytes: int = 0  #: bytes changed outside the rows that were to be written
    seconds: float = 0.0
    why: str = ""
    detail: str = ""  #: what a user's kernel printed or its traceback; not in the JSON


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be checked, and how large."""

    formats: tuple[str, ...] = tuple(LAYOUTS)
    batches: tuple[int, ...] = (1, 8, 32)
    device: str = "cpu"
    seed: int = 0
    accumulator_bits: int | None = None  #: for a user's read kernel that adds on fp8 tensor cores
    hadamard_terms: int = 7  #: 127 for a user's store kernel that makes the Hadamard step as a matrix product
    rows: dict[int, int] = field(default_factory=dict)  #: rows of a request by batch; else the defaults

    def length(self, batch: int) -> int:
        """Rows of the longest request in a batch of this size."""
        if batch in self.rows:
            return self.rows[batch]
        if self.device != "cpu":
            return COMPILED_ROWS
        nearest = min(INTERPRETED_ROWS, key=lambda known: abs(known - batch))
        return INTERPRETED_ROWS[nearest]

    @property
    def store_rows(self) -> int:
        """Rows of a store check."""
        return STORE_ROWS["interpreted" if self.device == "cpu" else "compiled"]


def keys_for(rng: np.random.Generator, count: int) -> reference.StoreInputs:
    """Inputs of a store: usual rows, one in eight of an extreme kind (zeros, tiny, huge, one-hot, constant)."""
    keys = rng.standard_normal((count, 128)).astype(np.float32)
    kind = rng.integers(0, 40, count)
    keys[kind == 0] = 0.0
    keys[kind == 1] *= np.float32(1e-30)
    keys[kind == 2] *= np.float32(1e17)
    keys[kind == 3] = np.eye(128, dtype=np.float32)[rng.integers(0, 128, int((kind == 3).sum()))] * 3
    keys[kind == 4] = np.float32(0.75)
    weight = (1.0 + 0.3 * rng.standard_normal(128)).astype(np.float32)
    return reference.StoreInputs(
        keys, reference.rope_rows(4 * rng.integers(0, 32768, count)), weight, EPSILON
    )


def lengths_for(rng: np.random.Generator, batch: int, longest: int, varied: bool) -> npt.NDArray[np.int64]:
    """Lengths in rows: all ``longest``, or from 1 upwards with page edges among them."""
    if not varied:
        return np.full(batch, longest, np.int64)
    least = TOP_K + 1 if longest > TOP_K else 1
    rows = rng.integers(least, longest + 1, batch)
    edges = np.array([longest - 1, TOP_K + 1, 1, 64, 65, TOP_K, 63])
    few = np.clip(edges[: max(1, batch // 4)], 1, longest)
    rows[: len(few)] = few
    return rng.permutation(rows).astype(np.int64)


def make_case(layout: Layout, rng: np.random.Generator, batch: int, longest: int, varied: bool) -> ReadCase:
    """A pool filled by the torch twin of the store, with its pages in random order."""
    rows = lengths_for(rng, batch, longest, varied)
    pages = -(-rows // layout.rows)
    pool = int(pages.sum()) + 3
    inputs = keys_for(rng, pool * layout.rows)
    values, scales = _twin_rows(layout, inputs)
    cache = np.zeros((pool, layout.page_bytes), np.uint8)
    layout.values(cache)[:] = values.reshape(pool, layout.rows, layout.value_bytes)
    layout.scales(cache)[:] = scales.reshape(pool, layout.rows, layout.scale_bytes)
    order = rng.permutation(pool)
    table = np.full((batch, int(pages.max())), -1, np.int64)
    start = 0
    for request, count in enumerate(pages):
        table[request, :count] = order[start : start + count]
        start += int(count)
    query = rng.standard_normal((batch, HEADS, layout.head_dim)).astype(np.float32)
    weights = rng.standard_normal((batch, HEADS)).astype(np.float32)
    return ReadCase(layout, "varied" if varied else "uniform", cache, table, rows, query, weights)


def _twin_rows(
    layout: Layout, inputs: reference.StoreInputs
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    keys, rope, weight = (torch.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight))
    values, scales = twins.store_rows_torch(layout, keys, rope, weight, inputs.epsilon)
    return values.numpy(), scales.numpy()


def judge_read(
    case: ReadCase,
    logits: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    *,
    kernel: str,
    seconds: float,
    accumulator_bits: int | None = None,
) -> ReadResult:
    """Compare a kernel's logits and top-k with the reference, request by request."""
    wrong = unjudged = invalid = 0
    error = absolute = 0.0
    jaccard = 1.0
    for request, length in enumerate(case.rows.tolist()):
        pages = case.cache[case.table[request, : -(-length // case.layout.rows)]]
        right, bound = reference.logits_reference(
            case.layout,
            pages,
            length,
            case.query[request],
            case.weights[request],
            accumulator_bits=accumulator_bits,
        )
        own = logits[request, :length].astype(np.float64)
        bad = reference.wrong_logits(own, right, bound)
        wrong += int(bad.sum())
        judged = np.isfinite(bound)
        unjudged += int((~judged).sum())
        distance = np.where(np.isnan(own), np.inf, np.abs(own - right))[judged]
        absolute = max(absolute, float(distance.max(initial=0.0)))
        error = max(error, float((distance / bound[judged]).max(initial=0.0)))
        best = np.argsort(-right, kind="stable")[:TOP_K]
        chosen = top_k[request][top_k[request] >= 0]
        jaccard = min(jaccard, len(np.intersect1d(best, chosen)) / len(np.union1d(best, chosen)))
        invalid += bool(reference.top_k_violations(logits[request], top_k[request], length, TOP_K))
    return ReadResult(
        kernel,
        case.layout.name,
        len(case.rows),
        case.lengths,
        int(case.rows.sum()),
        "wrong" if wrong or invalid else "right",
        wrong,
        unjudged,
        error,
        absolute,
        jaccard,
        invalid,
        seconds,
    )


def judge_store(
    layout: Layout,
    inputs: reference.StoreInputs,
    slots: npt.NDArray[np.int64],
    before: npt.NDArray[np.uint8],
    after: npt.NDArray[np.uint8],
    *,
    kernel: str,
    seconds: float,
    exact: bool,
    hadamard_terms: int = 7,
) -> StoreResult:
    """Compare stored rows with the reference and with the twin's bytes (``exact``: those must be equal)."""
    page, row = slots // layout.rows, slots % layout.rows
    values, scales = layout.values(after)[page, row], layout.scales(after)[page, row]
    check = reference.check_store(layout, inputs, values, scales, hadamard_terms=hadamard_terms)
    twin_values, twin_scales = _twin_rows(layout, inputs)
    unequal = (values != twin_values).any(axis=1) | (scales != twin_scales).any(axis=1)
    written = np.zeros((len(after), layout.rows), np.bool_)
    written[page, row] = True
    strays = int(((layout.values(after) != layout.values(before)) & ~written[..., None]).sum())
    strays += int(((layout.scales(after) != layout.scales(before)) & ~written[..., None]).sum())
    wrong = int((~check.reproduced).sum())
    return StoreResult(
        kernel,
        layout.name,
        len(slots),
        "wrong" if wrong or strays or (exact and unequal.any()) else "right",
        wrong,
        int((~check.judged).sum()),
        float(check.excess.max(initial=0.0)),
        int(unequal.sum()),
        strays,
        seconds,
    )


def _cases(plan: Plan) -> Iterator[Callable[[], ReadCase]]:
    for name in plan.formats:
        for batch in plan.batches:
            for varied in (False, True):
                rng = np.random.default_rng([plan.seed, sorted(LAYOUTS).index(name), batch, varied])

                def build(
                    name: str = name,
                    batch: int = batch,
                    varied: bool = varied,
                    rng: np.random.Generator = rng,
                ) -> ReadCase:
                    return make_case(LAYOUTS[name], rng, batch, plan.length(batch), varied)

                yield build


def _store_case(
    plan: Plan, name: str
) -> tuple[Layout, reference.StoreInputs, npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    layout = LAYOUTS[name]
    rng = np.random.default_rng([plan.seed, sorted(LAYOUTS).index(name)])
    count = plan.store_rows
    pages = count // layout.rows + 4
    inputs = keys_for(rng, count)
    slots = rng.permutation(pages * layout.rows)[:count].astype(np.int64)
    before = rng.integers(0, 256, (pages, layout.page_bytes), dtype=np.uint8)
    return layout, inputs, slots, before


def check_reads(plan: Plan) -> Iterator[ReadResult]:
    """Check the Triton read on every case of the plan."""
    for build in _cases(plan):
        case = build()
        arrays = (case.cache, case.table, case.rows, case.query, case.weights)
        cache, table, rows, query, weights = (torch.from_numpy(x).to(plan.device) for x in arrays)
        began = time.perf_counter()
        logits, top_k = read.read(case.layout, cache, table, rows, query, weights, TOP_K)
        found = logits.cpu().numpy(), top_k.cpu().numpy()
        yield judge_read(case, *found, kernel="triton", seconds=time.perf_counter() - began)


def check_stores(plan: Plan) -> Iterator[StoreResult]:
    """Check the Triton store on every format of the plan; its bytes must equal the twin's."""
    for name in plan.formats:
        layout, inputs, slots, before = _store_case(plan, name)
        cache = torch.from_numpy(before.copy()).to(plan.device)
        arrays = (slots, inputs.keys, inputs.rope, inputs.norm_weight)
        on_device, keys, rope, weight = (torch.from_numpy(x).to(plan.device) for x in arrays)
        began = time.perf_counter()
        store.store(layout, cache, on_device, keys, rope, weight, inputs.epsilon)
        after = cache.cpu().numpy()
        seconds = time.perf_counter() - began
        yield judge_store(layout, inputs, slots, before, after, kernel="triton", seconds=seconds, exact=True)


def check_user_reads(plan: Plan, spec: str, timeout: float) -> Iterator[ReadResult]:
    """Check a user's read kernel on every case of the plan, the cases of one format in one child process."""
    for name in plan.formats:
        part = [build() for build in _cases(replace(plan, formats=(name,)))]
        jobs = [
            userkernel.read_job(spec, name, c.cache, c.table, c.rows, c.query, c.weights, TOP_K) for c in part
        ]
        for case, found in zip(part, userkernel.run_jobs(jobs, timeout), strict=True):
            if isinstance(found, userkernel.UserKernelError):
                yield ReadResult(
                    spec,
                    name,
                    len(case.rows),
                    case.lengths,
                    int(case.rows.sum()),
                    "not judged",
                    why=str(found),
                    detail=found.detail,
                )
                continue
            logits = userkernel.mask_past(found["logits"], case.rows)
            yield judge_read(
                case,
                logits,
                found["top_k"],
                kernel=spec,
                seconds=float(found["seconds"]),
                accumulator_bits=plan.accumulator_bits,
            )


def check_user_stores(plan: Plan, spec: str, timeout: float) -> Iterator[StoreResult]:
    """Check a user's store kernel on every format of the plan, each in a child process."""
    for name in plan.formats:
        layout, inputs, slots, before = _store_case(plan, name)
        job = userkernel.store_job(
            spec, name, before, slots, inputs.keys, inputs.rope, inputs.norm_weight, inputs.epsilon
        )
        (found,) = userkernel.run_jobs([job], timeout)
        if isinstance(found, userkernel.UserKernelError):
            yield StoreResult(spec, name, len(slots), "not judged", why=str(found), detail=found.detail)
            continue
        yield judge_store(
            layout,
            inputs,
            slots,
            before,
            found["cache"],
            kernel=spec,
            seconds=float(found["seconds"]),
            exact=False,
            hadamard_terms=plan.hadamard_terms,
        )


def as_json(result: ReadResult | StoreResult) -> dict[str, Any]:
    """A result as plain JSON types; an infinite error becomes null."""
    body = {name: getattr(result, name) for name in result.__slots__ if name != "detail"}
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in body.items()}
