"""A trace of many page snapshots with row and page digests and no bytes, and what is wrong in it.

A prefill/decode pair serves many requests, 60 at a time, and pages are reused all the time. Some requests meet one of
three faults, as an engine could have it:

* completion early: a page is torn when its arrival is told and complete a little later;
* sent before written: the last rows of a page were not stored yet when it was sent;
* late foreign write: an aborted request's write lands in two pages that another request owns by then.

The memory of both sides is kept as row digests and scale words, and what a snapshot holds is always what that memory
held, so that the answer follows from the story and not from the events.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import page_digests
from capture_hooks.layouts import layout
from replay.trace.builder import TraceBuilder

ROWS = 64
PAGE_BYTES = layout("fp8").page_bytes
CONCURRENT = 60
#: Snapshots of a page in one life: ST, SE before and after, RC before and at completion, LT, RD before.
LOOKS = 7
#: Pages of a request: 5 to 14.
FEWEST, MOST = 5, 14

#: (room, layer, code) -> logical pages
Wrong = dict[tuple[int, int, str], tuple[int, ...]]


@dataclass(slots=True)
class Digests:
    """One side's memory: digests of every row of every page of every layer."""

    values: npt.NDArray[np.uint64]
    scales: npt.NDArray[np.uint32]

    @classmethod
    def fresh(cls, rng: np.random.Generator, layers: int, pages: int) -> Digests:
        shape = (layers, pages, ROWS)
        return cls(
            rng.integers(0, 2**64, shape, np.uint64, endpoint=False),
            rng.integers(0, 2**32, shape, np.uint32, endpoint=False),
        )


@dataclass(slots=True)
class Job:
    room: int
    rows: int
    prefill: list[int]
    decode: list[int]
    values: npt.NDArray[np.uint64]
    scales: npt.NDArray[np.uint32]
    fault: str = ""
    transfer: int = -1


class Pair:
    """Writes the trace. ``wrong`` collects what a judge must say."""

    def __init__(self, builder: TraceBuilder, layers: int, requests: int, seed: int) -> None:
        self.builder, self.layers, self.requests = builder, layers, requests
        self.snapshots = 0
        self.wrong: Wrong = {}
        self.rng = np.random.default_rng(seed)
        pages = CONCURRENT * MOST + 4 * MOST
        told: dict[str, Any] = {"host": "5a0c", "engine": "made", "mode": "digest", "transport": "made"}
        self.process = {
            role: self.builder.process(role=role, rank=0, run=role, **told) for role in ("prefill", "decode")
        }
        self.memory = {role: Digests.fresh(self.rng, self.layers, pages) for role in self.process}
        self.pool = {role: deque(range(1, pages)) for role in self.process}
        self.base = {"prefill": 0x7F10_0000_0000, "decode": 0x7E20_0000_0000}
        self.transfers = 0
        for role, process in self.process.items():
            for layer in range(self.layers):
                address = self.address(role, layer)
                process.registration(agent=role, address=address, length=pages * PAGE_BYTES)
                process.buffer(
                    buffer=layer,
                    layer=layer,
                    format="fp8",
                    address=address,
                    pages=pages,
                    pitch=PAGE_BYTES,
                    item_length=PAGE_BYTES,
                )
            process.hooks_complete()

    def address(self, role: str, layer: int) -> int:
        return self.base[role] + layer * (1 << 30)

    # What happens

    def serve(self) -> None:
        plan = self.plan()
        running: deque[Job] = deque()
        room = 7000
        for fault in plan:
            while len(running) >= CONCURRENT:
                self.finish(running.popleft())
            if fault == "late-foreign-write":
                running.append(self.overtaken(room))
                room += 2
                continue
            job = self.job(room, fault)
            room += 1
            self.through(job)
            running.append(job)
        while running:
            self.finish(running.popleft())

    def plan(self) -> list[str]:
        """The fault of each request; 1 % of the pages are bad, a third of them of each kind."""
        pages = self.requests * (FEWEST + MOST) / 2
        each = max(1, round(pages / 100 / 3))
        faults = ["completion-early"] * each + ["sent-before-written"] * each
        faults += ["late-foreign-write"] * max(1, each // 2)
        # A late write takes two requests: the one that was aborted and the one that was hit.
        faults += [""] * (self.requests - len(faults) - max(1, each // 2))
        return [str(fault) for fault in self.rng.permutation(faults)]

    def job(self, room: int, fault: str = "", decode: Sequence[int] = ()) -> Job:
        count = int(self.rng.integers(FEWEST, MOST + 1))
        rows = (count - 1) * ROWS + int(self.rng.integers(1, ROWS + 1))
        shape = (self.layers, count, ROWS)
        return Job(
            room=room,
            rows=rows,
            prefill=[self.pool["prefill"].popleft() for _ in range(count)],
            decode=[*decode, *(self.pool["decode"].popleft() for _ in range(count - len(decode)))],
            values=self.rng.integers(0, 2**64, shape, np.uint64, endpoint=False),
            scales=self.rng.integers(0, 2**32, shape, np.uint32, endpoint=False),
            fault=fault,
        )

    def through(self, job: Job) -> None:
        """A request from its start to its first read, with its own fault if it has one."""
        self.start(job)
        full = max(0, len(job.prefill) - 2)  # a page whose rows are all valid
        if job.fault == "sent-before-written":
            first = self.tell_store(job)
            self.store(job, holes=(full, 40))
            self.post(job, written=0)
            self.land(job)
            self.done(job)
            self.store(job)
            self.see_stored(job)
            self.note(job, "F10", (full,))
            assert first >= 0
        else:
            self.store(job)
            self.tell_store(job)
            self.see_stored(job)
            self.post(job)
            self.land(job, torn=full if job.fault == "completion-early" else -1)
            self.done(job)
        self.arrive(job)
        if job.fault == "completion-early":
            self.read(job)
            self.land(job)
            self.look("LT", job)
            self.note(job, "F09", (full,))
        else:
            self.look("LT", job)
            self.read(job)

    def overtaken(self, room: int) -> Job:
        """``room`` is aborted while its write is in flight; the next room gets two of its pages."""
        first = self.job(room)
        self.start(first)
        self.store(first)
        self.tell_store(first)
        self.see_stored(first)
        self.post(first)
        decode = self.process["decode"]
        decode.request(room=first.room, phase="abort", rows=first.rows)
        decode.free(room=first.room, pages=first.decode, reason="abort")
        second = self.job(room + 1, decode=first.decode[:2])
        self.pool["decode"].extend(first.decode[2:])
        self.start(second)
        self.store(second)
        self.tell_store(second)
        self.see_stored(second)
        self.post(second)
        self.land(second)
        self.done(second)
        self.arrive(second)
        self.land(first)
        self.done(first)
        self.look("LT", second)
        self.read(second)
        self.free("prefill", first, "abort")
        self.note(second, "F14", (0, 1))
        return second

    def note(self, job: Job, code: str, logical: tuple[int, ...]) -> None:
        for layer in range(self.layers):
            self.wrong[job.room, layer, code] = logical

    # Steps

    def start(self, job: Job) -> None:
        for role, pages in (("prefill", job.prefill), ("decode", job.decode)):
            process = self.process[role]
            process.request(room=job.room, phase="start", tokens=job.rows * 4, rows=job.rows)
            process.alloc(room=job.room, pages=pages)
        decode, prefill = self.process["decode"], self.process["prefill"]
        self.look("RC", job, moment="before")
        decode.receive(
            room=job.room,
            pages=job.decode,
            buffers=np.arange(self.layers),
            item_lengths=np.full(self.layers, PAGE_BYTES),
        )
        decode.order(what="announce", key=f"{job.room}.0", end="tail")
        prefill.order(what="announce", key=f"{job.room}.0", end="head")

    def store(self, job: Job, holes: tuple[int, int] = (-1, 0)) -> None:
        """Rows reach memory; ``holes`` leaves out the rows of one logical page from some row on."""
        rows = np.arange(len(job.prefill) * ROWS).reshape(-1, ROWS)
        written = rows < job.rows
        if holes[0] >= 0:
            written[holes[0], holes[1] :] = False
        _put(self.memory["prefill"], job.prefill, job.values, job.scales, written, written)

    def tell_store(self, job: Job) -> int:
        rows = np.arange(job.rows)
        slots = np.asarray(job.prefill)[rows // ROWS] * ROWS + rows % ROWS
        seq = -1
        for layer in range(self.layers):
            seq = self.process["prefill"].store(
                room=job.room,
                buffer=layer,
                step=job.room,
                slots=slots,
                positions=rows,
                logical_rows=rows,
                stream=1,
            )
        return int(seq)

    def see_stored(self, job: Job) -> None:
        self.look("ST", job, role="prefill")

    def post(self, job: Job, written: int = 1) -> None:
        self.transfers += 1
        job.transfer = self.transfers
        prefill = self.process["prefill"]
        self.look("SE", job, moment="before", role="prefill")
        tables = []
        for role, pages in (("prefill", job.prefill), ("decode", job.decode)):
            bases = np.array([self.address(role, layer) for layer in range(self.layers)], np.uint64)
            places = bases[:, None] + np.asarray(pages, np.uint64)[None, :] * np.uint64(PAGE_BYTES)
            tables.append(np.stack([places.ravel(), np.full(places.size, PAGE_BYTES, np.uint64)], axis=1))
        prefill.send(
            transfer=job.transfer,
            room=job.room,
            chunk=0,
            last=True,
            agent="prefill",
            peer="decode",
            written=written,
            awaited=int(written == 1),
            logical=0,
            pages=job.prefill,
            destination_pages=job.decode,
            item_lengths=np.full(self.layers, PAGE_BYTES),
            source=tables[0],
            destination=tables[1],
        )
        prefill.transfer_state(state="posted", transfer=job.transfer, room=job.room, agent="prefill")

    def land(self, job: Job, torn: int = -1) -> None:
        """The pages arrive; of page ``torn`` only its first 4,096 bytes: the values of rows 0 to 31."""
        source = self.memory["prefill"]
        values = np.ones((len(job.decode), ROWS), bool)
        scales = values.copy()
        if torn >= 0:
            values[torn, 32:] = False
            scales[torn] = False
        _put(
            self.memory["decode"],
            job.decode,
            source.values[:, job.prefill],
            source.scales[:, job.prefill],
            values,
            scales,
        )

    def done(self, job: Job) -> None:
        self.process["prefill"].transfer_state(
            state="done", transfer=job.transfer, room=job.room, agent="prefill"
        )
        self.look("SE", job, moment="after", role="prefill")

    def arrive(self, job: Job) -> None:
        prefill, decode = self.process["prefill"], self.process["decode"]
        prefill.order(what="status", key=f"{job.room}.0", end="tail")
        decode.order(what="status", key=f"{job.room}.0", end="head")
        decode.transfer_state(state="arrived", room=job.room, agent="decode")
        self.look("RC", job)
        decode.request(room=job.room, phase="arrived", tokens=job.rows * 4, rows=job.rows)

    def read(self, job: Job) -> None:
        self.look("RD", job, moment="before")
        for layer in range(self.layers):
            self.process["decode"].read(
                room=job.room,
                buffer=layer,
                step=job.room,
                rows=job.rows,
                table=job.decode,
                table_after=job.decode,
            )

    def finish(self, job: Job) -> None:
        self.free("prefill", job, "finish")
        self.process["decode"].request(room=job.room, phase="finish", rows=job.rows)
        self.process["decode"].free(room=job.room, pages=job.decode, reason="finish")
        self.pool["decode"].extend(job.decode)

    def free(self, role: str, job: Job, reason: str) -> None:
        self.process[role].request(room=job.room, phase=reason, rows=job.rows)
        self.process[role].free(room=job.room, pages=job.prefill, reason=reason)
        self.pool[role].extend(job.prefill)

    def look(self, stage: str, job: Job, *, moment: str = "", role: str = "decode") -> None:
        pages = job.prefill if role == "prefill" else job.decode
        memory = self.memory[role]
        logical = np.arange(len(pages))
        for layer in range(self.layers):
            values, scales = memory.values[layer, pages], memory.scales[layer, pages]
            self.process[role].snapshot(
                stage=stage,
                moment=moment,
                room=job.room,
                buffer=layer,
                transfer=job.transfer if stage == "SE" else -1,
                step=job.room if stage in ("ST", "RD") else -1,
                rows=job.rows,
                logical=logical,
                pages=pages,
                digests=page_digests(values, scales),
                row_values=values,
                row_scales=scales,
            )
            self.snapshots += len(pages)


def _put(
    memory: Digests,
    pages: list[int],
    values: npt.NDArray[np.uint64],
    scales: npt.NDArray[np.uint32],
    value_rows: npt.NDArray[np.bool_],
    scale_rows: npt.NDArray[np.bool_],
) -> None:
    memory.values[:, pages] = np.where(value_rows, values, memory.values[:, pages])
    memory.scales[:, pages] = np.where(scale_rows, scales, memory.scales[:, pages])


def build(path: Path, *, requests: int, layers: int, seed: int = 1) -> tuple[int, Wrong]:
    """Write the trace; returns the number of page snapshots in it and what is wrong in it."""
    builder = TraceBuilder(path)
    pair = Pair(builder, layers, requests, seed)
    pair.serve()
    builder.close()
    return pair.snapshots, pair.wrong


if __name__ == "__main__":
    made, answer_path = Path(sys.argv[1]), Path(sys.argv[2])
    count, bad = build(made, requests=int(sys.argv[3]), layers=int(sys.argv[4]), seed=int(sys.argv[5]))
    rows = [[*key, list(logical)] for key, logical in sorted(bad.items())]
    answer_path.write_text(json.dumps({"snapshots": count, "wrong": rows}), encoding="utf-8")
