"""Re-execution: every recorded store and read is done again and compared with what was captured.

The reference (``kernels/reference.py``, numpy, float64) judges all of them. The Triton kernels run on a fixed
sample and on what is suspect, or on everything with ``exhaustive``; torch is imported only for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.classify import kernel_numerics, wrong_store_bytes
from replay.findings import PageEvidence
from replay.kernels.reference import (
    StoreInputs,
    check_store,
    logits_reference,
    top_k_violations,
    wrong_logits,
)
from replay.timeline import Timeline

if TYPE_CHECKING:
    from replay.classify.base import Evidence

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class StoreCase:
    """The rows of one store that lie in one page, with their inputs and the bytes found after it."""

    store: int  #: row of the store table
    snapshot: int  #: row of Timeline.snapshots (ST)
    process: int
    request: int
    buffer: int
    page: int
    logical: int
    rows: I64  #: rows within the page
    inputs: StoreInputs
    data: U8  #: the page
    layout: Layout


@dataclass(frozen=True, slots=True)
class ReadCase:
    """One recorded read with everything it needs to be done again."""

    read: int  #: row of the read table
    process: int
    request: int
    buffer: int
    rows: int
    k: int
    pages: U8  #: uint8[p, page_bytes] in table order, from the RD snapshots
    physical: I64
    query: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    bracketed: bool  #: the pages were the same before and after the kernel, and so was the table
    layout: Layout
    accumulator_bits: int | None


@dataclass(slots=True)
class Rung:
    """Counts and findings of one re-executed rung."""

    judged: int = 0
    rows: int = 0
    wrong: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    pages: list[PageEvidence] = field(default_factory=list)
    worst: float = 0.0  #: largest error as a fraction of its bound
    suspects: list[Any] = field(default_factory=list)
    sample: list[Any] = field(default_factory=list)

    def skip(self, why: str, count: int = 1) -> None:
        """Count something that could not be done again."""
        self.skipped[why] = self.skipped.get(why, 0) + count


#: Cases kept for the Triton sample; suspects are kept besides, up to the same number.
SAMPLE_LIMIT = 64


def replay_stores(
    timeline: Timeline, evidence: Evidence, limit: int = SAMPLE_LIMIT, progress: Progress | None = None
) -> Rung:
    """Do every store again whose inputs were recorded and compare with the page bytes after it (ST)."""
    rung = Rung()
    table = timeline.trace.table("store")
    recorded = np.flatnonzero(table.bulk_size("keys") > 0)
    for number, store in enumerate(recorded.tolist()):
        if progress is not None and number % 64 == 0:
            progress("stores", number, len(recorded))
        for case in _store_cases(timeline, store, rung):
            check = check_store(
                case.layout,
                case.inputs,
                case.layout.values(case.data[None])[0][case.rows],
                case.layout.scales(case.data[None])[0][case.rows],
            )
            rung.judged += 1
            rung.rows += int(check.judged.sum())
            rung.worst = max(rung.worst, float(check.excess[check.reproduced].max(initial=0.0)))
            wrong = ~check.reproduced
            keep = rung.suspects if wrong.any() else rung.sample
            if len(keep) < limit:
                keep.append(case)
            if wrong.any():
                rung.wrong += int(wrong.sum())
                rung.pages.append(wrong_store_bytes.explain(timeline, evidence, case, check))
    return rung


def _store_cases(timeline: Timeline, store: int, rung: Rung) -> list[StoreCase]:
    table = timeline.trace.table("store")
    process = int(table["process"][store])
    number = timeline.buffer_number(process, int(table["buffer"][store]))
    params = _params(timeline, process, int(table["params"][store]))
    if number < 0 or params is None:
        rung.skip("stores whose buffer or parameters were not recorded")
        return []
    buffer = timeline.buffers[number]
    slots = np.asarray(table.ragged("slots")[store], np.int64)
    keys, rope = table.bulk("keys", store), table.bulk("rope", store)
    if len(keys) != len(slots) or len(rope) != len(slots):
        rung.skip("stores whose inputs are incomplete")
        return []
    snaps, contents = timeline.snapshots, timeline.trace.contents
    seq = int(table["seq"][store])
    page, row = np.divmod(slots, buffer.layout.rows)
    request = timeline.request_number(int(table["room"][store]), int(table["attempt"][store]))
    cases = []
    for physical in np.unique(page).tolist():
        seen = snaps.at_place("ST", number, physical)
        seen = seen[snaps.seq[seen] >= seq]
        seen = seen[(snaps.content[seen] >= 0) & (snaps.request[seen] == request)]
        if not len(seen):
            rung.skip("stores whose page was not looked at afterwards")
            continue
        first = int(seen[0])
        content = snaps.content[[first]]
        if not contents.has_data[int(content[0])]:
            rung.skip("stores whose page bytes were not kept")
            continue
        chosen = np.flatnonzero(page == physical)
        # A slot that one batch writes twice keeps the later row.
        _, last = np.unique(row[chosen][::-1], return_index=True)
        chosen = chosen[::-1][last]
        cases.append(
            StoreCase(
                store=store,
                snapshot=first,
                process=process,
                request=request,
                buffer=number,
                page=physical,
                logical=int(snaps.logical[first]),
                rows=row[chosen],
                inputs=StoreInputs(keys[chosen], rope[chosen], *params),
                data=np.asarray(contents.data(content)[0]),
                layout=buffer.layout,
            )
        )
    return cases


def _params(timeline: Timeline, process: int, params: int) -> tuple[npt.NDArray[np.float32], float] | None:
    table = timeline.trace.table("store_params")
    rows = np.flatnonzero((table["process"] == process) & (table["params"] == params))
    if not len(rows):
        return None
    weight = table.bulk("norm_weight", int(rows[-1]))
    return (weight, float(table["epsilon"][int(rows[-1])])) if weight.shape == (128,) else None


def replay_reads(
    timeline: Timeline,
    evidence: Evidence,
    doubtful: frozenset[int],
    limit: int = SAMPLE_LIMIT,
    progress: Progress | None = None,
) -> Rung:
    """Do every read again whose logits were recorded, on the page bytes that it saw (RD).

    ``doubtful`` are reads whose table was wrong or changed under the kernel: what they saw is not known.
    """
    rung = Rung()
    table = timeline.trace.table("read")
    looks = _read_snapshots(timeline)
    freed = timeline.freed_seq
    recorded = np.flatnonzero((table.bulk_size("logits") > 0) & (table.bulk_size("query") > 0))
    for number, read in enumerate(recorded.tolist()):
        if progress is not None and number % 16 == 0:
            progress("reads done again", number, len(recorded))
        process = int(table["process"][read])
        request = timeline.request_number(int(table["room"][read]), int(table["attempt"][read]))
        seq = int(table["seq"][read])
        if freed.get((process, request), seq) < seq:
            continue  # an overshoot step
        if read in doubtful:
            rung.skip("reads whose table was wrong or changed while the kernel ran")
            continue
        case = _read_case(timeline, read, process, request, looks, rung)
        if case is None:
            continue
        logits, bound = logits_reference(
            case.layout,
            case.pages,
            case.rows,
            case.query,
            case.weights,
            accumulator_bits=case.accumulator_bits,
        )
        wrong = wrong_logits(case.logits[: case.rows], logits, bound)
        finite = np.isfinite(bound) & (bound > 0)
        error = np.abs(case.logits[: case.rows].astype(np.float64) - logits)
        rung.judged += 1
        rung.rows += case.rows
        if (finite & ~wrong).any():
            rung.worst = max(rung.worst, float((error[finite & ~wrong] / bound[finite & ~wrong]).max()))
        keep = rung.suspects if wrong.any() else rung.sample
        if len(keep) < limit:
            keep.append(case)
        if wrong.any():
            rung.wrong += int(wrong.sum())
            rung.pages += kernel_numerics.explain(timeline, evidence, case, logits, bound, wrong)
        elif case.k > 0 and len(case.top_k):
            broken = top_k_violations(case.logits, case.top_k, case.rows, case.k)
            if broken:
                rung.wrong += 1
                rung.pages.append(kernel_numerics.top_k(timeline, case, broken))
    return rung


def _read_snapshots(timeline: Timeline) -> dict[tuple[int, int, int, int], dict[str, dict[int, int]]]:
    """(process, request, buffer, step) -> moment -> logical page -> row of Timeline.snapshots."""
    snaps = timeline.snapshots
    found: dict[tuple[int, int, int, int], dict[str, dict[int, int]]] = {}
    with_logits = timeline.trace.table("read").bulk_size("logits") > 0
    if not with_logits.any():
        return found
    rows = snaps.where("RD")
    columns = (snaps.process, snaps.request, snaps.buffer, snaps.step, snaps.logical, snaps.event)
    for row, (process, request, buffer, step, logical, event) in zip(
        rows.tolist(), zip(*(c[rows].tolist() for c in columns), strict=True), strict=True
    ):
        key = (process, request, buffer, step)
        found.setdefault(key, {}).setdefault(str(snaps.moment[event]), {})[logical] = row
    return found


def _read_case(
    timeline: Timeline,
    read: int,
    process: int,
    request: int,
    looks: dict[tuple[int, int, int, int], dict[str, dict[int, int]]],
    rung: Rung,
) -> ReadCase | None:
    table = timeline.trace.table("read")
    number = timeline.buffer_number(process, int(table["buffer"][read]))
    if number < 0:
        rung.skip("reads of a buffer that was not declared")
        return None
    layout = timeline.buffers[number].layout
    rows = int(table["rows"][read])
    physical = np.asarray(table.ragged("table")[read], np.int64)
    needed = -(-rows // layout.rows)
    moments = looks.get((process, request, number, int(table["step"][read])), {})
    before = moments.get("before") or moments.get("") or {}
    after = moments.get("after", {})
    snaps, contents = timeline.snapshots, timeline.trace.contents
    if needed > len(physical) or any(k not in before for k in range(needed)):
        rung.skip("reads whose pages were not all looked at (RD)")
        return None
    picked = np.array([before[k] for k in range(needed)], np.int64)
    if not np.array_equal(snaps.page[picked], physical[:needed]):
        rung.skip("reads whose RD snapshots show other pages than the table")
        return None
    content = snaps.content[picked]
    if (content < 0).any() or not contents.has_data[content].all():
        rung.skip("reads whose page bytes were not kept")
        return None
    whole = all(k in after for k in range(needed))
    if whole and not np.array_equal(snaps.content[[after[k] for k in range(needed)]], content):
        rung.skip("reads whose pages changed while the kernel ran")
        return None
    logits = np.asarray(table.bulk("logits", read), np.float32).reshape(-1)
    weights = np.asarray(table.bulk("weights", read), np.float32).reshape(-1)
    query = np.asarray(table.bulk("query", read), np.float32).reshape(-1)
    if len(logits) < rows or not len(weights) or len(query) != len(weights) * layout.head_dim:
        rung.skip("reads whose query, weights or logits are incomplete")
        return None
    return ReadCase(
        read=read,
        process=process,
        request=request,
        buffer=number,
        rows=rows,
        k=int(table["k"][read]),
        pages=np.asarray(contents.data(content)),
        physical=physical[:needed],
        query=query.reshape(len(weights), layout.head_dim),
        weights=weights,
        logits=logits[:rows],
        top_k=np.asarray(table.bulk("top_k", read), np.int32).reshape(-1),
        bracketed=whole and len(table.ragged("table_after")[read]) > 0,
        layout=layout,
        # Hopper's fp8 tensor cores keep 13 fraction bits while they add (vLLM and SGLang call DeepGEMM there).
        accumulator_bits=13 if str(table["kernel"][read]).startswith("deep_gemm") else None,
    )
