"""Re-execution: every recorded store and read is done again and compared with what was captured.

The reference (``kernels/reference.py``, numpy, float64) judges all of them. The Triton kernels run on a fixed
sample and on what is suspect, or on everything with ``exhaustive``; torch is imported only for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.classify import padding_row_written, read_kernel, top_k, wrong_store_bytes
from replay.classify.base import Evidence
from replay.findings import PageEvidence
from replay.kernels.reference import check_store, logits_reference, top_k_violations, wrong_logits
from replay.memory import Memory
from replay.recorded import Skipped, StoreCase, read_case, read_snapshots, store_cases
from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Rung:
    """Counts and findings of one re-executed rung."""

    judged: int = 0
    rows: int = 0
    wrong: int = 0
    skipped: Skipped = field(default_factory=lambda: Skipped({}))
    pages: list[PageEvidence] = field(default_factory=list)
    worst: float = 0.0  #: largest error as a fraction of its bound
    suspects: list[Any] = field(default_factory=list)
    sample: list[Any] = field(default_factory=list)


#: Why a row that differs is not judged.
GONE = "stores of rows that were written again, moved or not accepted before their page was looked at"

#: Cases kept for the Triton sample; suspects are kept besides, up to the same number.
SAMPLE_LIMIT = 64


def _in_scope(timeline: Timeline, table: str, stages: tuple[str, ...], kept: Bool) -> I64:
    """Records of ``table`` whose payload was ``kept`` and that the scope of the verdict takes in."""
    scope = timeline.scope
    if not scope.has_stage(*stages):
        return np.zeros(0, np.int64)
    layers = np.array([b.layer for b in timeline.buffers] or [0], np.int64)
    said = (
        scope.layers_in(layers[timeline.buffer_column(table)])
        & ~timeline.beside[timeline.request_column(table)]
    )
    return np.flatnonzero(kept & said)


def replay_stores(
    timeline: Timeline, evidence: Evidence, limit: int = SAMPLE_LIMIT, progress: Progress | None = None
) -> Rung:
    """Do every store again whose inputs were recorded and compare with the page bytes after it (ST)."""
    rung = Rung()
    table = timeline.trace.table("store")
    recorded = _in_scope(timeline, "store", ("store",), table.bulk_size("keys") > 0)
    for number, store in enumerate(recorded.tolist()):
        if progress is not None and number % 64 == 0:
            progress("stores", number, len(recorded))
        for case in store_cases(timeline, store, rung.skipped):
            check = check_store(
                case.layout,
                case.inputs,
                case.layout.values(case.data[None])[0][case.rows],
                case.layout.scales(case.data[None])[0][case.rows],
            )
            gone = ~check.reproduced
            if gone.any():  # asked only then: it takes all writes to the page
                gone &= ~_standing(timeline, evidence, case)
            if gone.any():
                rung.skipped.add(GONE)
                case, check = case.part(np.flatnonzero(~gone)), check.part(~gone)
                if not len(case.rows):
                    continue
            rung.judged += 1
            rung.rows += int(check.judged.sum())
            rung.worst = max(rung.worst, float(check.excess[check.reproduced].max(initial=0.0)))
            wrong = ~check.reproduced
            stored, seen = timeline.moment("store", case.store), timeline.snapshots.moment_of(case.snapshot)
            if wrong.any() and evidence.descriptors.may_write(case.buffer, case.page, stored, seen):
                rung.skipped.add("stores whose page a transfer may have written before it was looked at")
                continue
            keep = rung.suspects if wrong.any() else rung.sample
            if len(keep) < limit:
                keep.append(case)
            if wrong.any():
                rung.wrong += int(wrong.sum())
                rung.pages.append(wrong_store_bytes.explain(timeline, evidence, case, check))
    return rung


def _standing(timeline: Timeline, evidence: Evidence, case: StoreCase) -> Bool:
    """Rows of the case that the look can still show as this store left them.

    Speculative decoding writes rows anew that were not accepted, and moves those that were. Only the request's own
    writes are asked for, and no padding: what others write over a row is a fault with a name of its own.
    """
    snaps, layout = timeline.snapshots, case.layout
    stored, seen = timeline.moment("store", case.store), snaps.moment_of(case.snapshot)
    written = np.zeros(layout.rows, bool)
    for write, _ in evidence.local.between(case.buffer, case.page, stored, seen):
        misled = write.row in evidence.local.strided_set  # where it lands is a fault with a name
        if write.request != case.request or (write.table == "store" and (write.row == case.store or misled)):
            continue
        hit = np.asarray(write.mask[: layout.scale_base].reshape(layout.rows, -1).any(axis=1), bool)
        hit[padding_row_written.padding_rows(timeline, write, case.page)] = False
        written |= hit
    if bool(timeline.trace.table("store")["draft"][case.store]) and int(snaps.rows[case.snapshot]) >= 0:
        accepted = int(snaps.rows[case.snapshot]) - case.logical * layout.rows
        written[max(0, accepted) :] = True
    return ~written[case.rows]


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
    memory = Memory(timeline, evidence.local, evidence.descriptors)
    table = timeline.trace.table("read")
    looks = read_snapshots(timeline)
    late = timeline.owners.over(
        table["process"].astype(np.int64), timeline.request_column("read"), table["seq"]
    )
    kept = (table.bulk_size("logits") > 0) & (table.bulk_size("query") > 0)
    recorded = _in_scope(timeline, "read", ("read-kernel", "top-k"), kept)
    for number, read in enumerate(recorded.tolist()):
        if progress is not None and number % 16 == 0:
            progress("reads done again", number, len(recorded))
        process = int(table["process"][read])
        request = timeline.request_number(int(table["room"][read]), int(table["attempt"][read]))
        if late[read]:
            continue  # an overshoot step
        if read in doubtful:
            rung.skipped.add("reads whose table was wrong or changed while the kernel ran")
            continue
        case = read_case(timeline, read, process, request, looks, rung.skipped)
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
        with np.errstate(invalid="ignore"):  # recorded logits may be infinite or no numbers
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
            question = read_kernel.question(timeline, memory, case, logits, bound, wrong)
            rung.pages += read_kernel.explain(timeline, evidence, question)
        elif case.k > 0 and len(case.top_k):
            broken = top_k_violations(case.logits, case.top_k, case.rows, case.k)
            if broken.within:
                rung.wrong += 1
                rung.pages.append(top_k.explain(timeline, case, broken))
    return rung
