"""Recorded stores and reads with everything that doing them again takes: inputs, tables and page bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.kernels.reference import StoreInputs
from replay.timeline import Timeline

if TYPE_CHECKING:
    from replay.trace.reader import Table

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: (process, request, buffer, step) -> moment -> logical page -> row of Timeline.snapshots.
Looks = dict[tuple[int, int, int, int], dict[str, dict[int, int]]]


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
    kernel: str = ""  #: the user's kernel that wrote ``data``, "" where the trace has it

    def part(self, chosen: I64) -> StoreCase:
        """The case of some of its rows (indices into ``rows``)."""
        return replace(self, rows=self.rows[chosen], inputs=self.inputs.part(chosen))


@dataclass(frozen=True, slots=True)
class ReadCase:
    """One recorded read with everything it needs to be done again."""

    read: int  #: row of the read table
    process: int
    request: int
    buffer: int
    seq: int
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
    stride: int  #: bytes from a page to the next in the view that the kernel was given, -1 where not told
    number_format: str  #: type tags that the kernel was given, "" where not told
    kernel: str = ""  #: the user's kernel that computed ``logits``, "" where the trace has them


@dataclass(slots=True)
class Skipped:
    """What could not be done again, and how often, by reason."""

    counts: dict[str, int]

    def add(self, why: str) -> None:
        """Count one more."""
        self.counts[why] = self.counts.get(why, 0) + 1


def store_cases(timeline: Timeline, store: int, skipped: Skipped) -> list[StoreCase]:
    """One case for each page that a recorded store wrote to, padding aside; what cannot be done again is counted."""
    table = timeline.trace.table("store")
    process = int(table["process"][store])
    number = timeline.buffer_number(process, int(table["buffer"][store]))
    params = _params(timeline, process, int(table["params"][store]))
    if number < 0 or params is None:
        skipped.add("stores whose buffer or parameters were not recorded")
        return []
    buffer = timeline.buffers[number]
    slots = np.asarray(table.array("slots", store), np.int64)
    keys, rope = table.bulk("keys", store), table.bulk("rope", store)
    if len(keys) != len(slots) or len(rope) != len(slots):
        skipped.add("stores whose inputs are incomplete")
        return []
    snaps, contents = timeline.snapshots, timeline.trace.contents
    seq = int(table["seq"][store])
    page, row = np.divmod(slots, buffer.layout.rows)
    logical = np.asarray(table.array("logical_rows", store), np.int64)
    real = (slots >= 0) & (logical >= 0 if len(logical) == len(slots) else True)  # the others are padding
    request = timeline.request_number(int(table["room"][store]), int(table["attempt"][store]))
    cases = []
    for physical in np.unique(page[real]).tolist():
        seen = snaps.at_place("ST", number, physical)
        seen = seen[snaps.seq[seen] >= seq]
        seen = seen[(snaps.content[seen] >= 0) & (snaps.request[seen] == request)]
        if not len(seen):
            skipped.add("stores whose page was not looked at afterwards")
            continue
        first = int(seen[0])
        content = snaps.content[[first]]
        if not contents.has_data[int(content[0])]:
            skipped.add("stores whose page bytes were not kept")
            continue
        chosen = np.flatnonzero(real & (page == physical))
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


def read_snapshots(timeline: Timeline) -> Looks:
    """(process, request, buffer, step) -> moment -> logical page -> row of Timeline.snapshots."""
    snaps = timeline.snapshots
    found: Looks = {}
    reads, looks = timeline.trace.table("read"), timeline.trace.table("snapshot")
    with_logits = np.flatnonzero(reads.bulk_size("logits") > 0)
    if not len(with_logits):
        return found
    wanted = {_step(reads, row) for row in with_logits.tolist()}
    theirs = np.zeros(len(looks), bool)
    theirs[[row for row in np.flatnonzero(snaps.stage == "RD").tolist() if _step(looks, row) in wanted]] = (
        True
    )
    rows = np.flatnonzero(theirs[snaps.event])
    columns = (snaps.process, snaps.request, snaps.buffer, snaps.step, snaps.logical, snaps.event)
    for row, (process, request, buffer, step, logical, event) in zip(
        rows.tolist(), zip(*(c[rows].tolist() for c in columns), strict=True), strict=True
    ):
        key = (process, request, buffer, step)
        found.setdefault(key, {}).setdefault(str(snaps.moment[event]), {})[logical] = row
    return found


def _step(table: Table, row: int) -> tuple[int, ...]:
    """What a read and the looks at its pages have in common."""
    return tuple(int(table[name][row]) for name in ("process", "room", "attempt", "buffer", "step"))


def read_case(
    timeline: Timeline,
    read: int,
    process: int,
    request: int,
    looks: Looks,
    skipped: Skipped,
) -> ReadCase | None:
    """The case of one recorded read, None where something that it takes was not recorded (which is counted)."""
    table = timeline.trace.table("read")
    number = timeline.buffer_number(process, int(table["buffer"][read]))
    if number < 0:
        skipped.add("reads of a buffer that was not declared")
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
        skipped.add("reads whose pages were not all looked at (RD)")
        return None
    picked = np.array([before[k] for k in range(needed)], np.int64)
    if not np.array_equal(snaps.page[picked], physical[:needed]):
        skipped.add("reads whose RD snapshots show other pages than the table")
        return None
    content = snaps.content[picked]
    if (content < 0).any() or not contents.has_data[content].all():
        skipped.add("reads whose page bytes were not kept")
        return None
    whole = all(k in after for k in range(needed))
    if whole and not np.array_equal(snaps.content[[after[k] for k in range(needed)]], content):
        skipped.add("reads whose pages changed while the kernel ran")
        return None
    logits = np.asarray(table.bulk("logits", read), np.float32).reshape(-1)
    weights = np.asarray(table.bulk("weights", read), np.float32).reshape(-1)
    query = np.asarray(table.bulk("query", read), np.float32).reshape(-1)
    if len(logits) < rows or not len(weights) or len(query) != len(weights) * layout.head_dim:
        skipped.add("reads whose query, weights or logits are incomplete")
        return None
    return ReadCase(
        read=read,
        process=process,
        request=request,
        buffer=number,
        seq=int(table["seq"][read]),
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
        stride=int(table["stride"][read]),
        number_format=str(table["number_format"][read]),
    )
