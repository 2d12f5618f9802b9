"""The way of a request from the store to its arrival, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.accuracy.model import TOKENS_PER_ROW
from benchmarks.accuracy.pages import Pages
from benchmarks.accuracy.request import ROWS, Job, Part, Transfer, grouped
from benchmarks.accuracy.side import I64, Side, Unit


class Passage(Pages):
    """What prefill, the wire and decode do until a request has arrived."""

    def chunks(self, job: Job) -> list[tuple[int, int]]:
        """Row ranges that prefill computes one after the other, cut at pages."""
        first = (min(job.prefix_rows, job.rows) // ROWS) * ROWS
        step = self.shape.chunk_pages * ROWS
        cuts = [*range(first, job.rows, step), job.rows]
        return [(a, b) for a, b in pairwise(cuts) if a < b]

    def announce(self, job: Job) -> None:
        """Decode tells where the pages are to go."""
        side = self.decode
        first = job.shared[side.agent]
        pages = job.pages[side.agent][first:]
        if self.shape.metadata:
            job.slot = self.slots.pop(0)
            side.emit("metadata", moment="given", slot=job.slot, **job.who)
        logical = range(first, first + len(pages))
        side.look("RC", "before", logical=logical, pages=pages, rows=job.rows, **job.who)
        filled = [u for u in side.units if any(u in p.units for p in self.prefills)]
        side.emit(
            "receive",
            logical=first,
            pages=pages,
            buffers=[side.buffer(unit) for unit in filled],
            item_lengths=[side.layout.page_bytes] * len(filled),
            **job.who,
        )
        self.edge(side, self.prefills, "announce", job.key)

    def write(self, side: Side, job: Job, first: int, last: int, slots: I64, **fields: Any) -> None:
        """A store of rows ``first .. last - 1`` into ``slots``, and its record."""
        rows = np.arange(first, last)
        extra = len(slots) - len(rows)  # padding rows of the batch
        for unit in side.units:
            found = self.model.rows(job.streams(rows), self.layer_key(unit), rows)
            values, scales = self.deed.store(self, side, job, unit, rows, found)
            told: dict[str, Any] = {}
            if self.keeps_inputs and job.sampled:
                given = np.minimum(np.arange(len(slots)), len(rows) - 1)  # padding rows go with the last one
                told = {"params": 0, "keys": found.keys[given], "rope": found.rope[given]}
            if extra:
                values = np.concatenate([values, np.repeat(values[-1:], extra, 0)])
                scales = np.concatenate([scales, np.repeat(scales[-1:], extra, 0)])
            self.deed.put(self, side, job, unit, slots, values, scales)
            side.emit(
                "store",
                buffer=side.buffer(unit),
                slots=slots,
                positions=np.concatenate([rows * TOKENS_PER_ROW, np.zeros(extra, np.int64)]),
                logical_rows=np.concatenate([rows, np.full(extra, -1)]),
                stride=self.deed.store_stride(self, side, job),
                step=self._step,
                **job.who,
                **told,
                **fields,
            )

    def compute(self, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        """Prefill computes a chunk and looks at it once it is whole."""
        first, last = chunk
        self._step += 1
        for side in self.prefills:
            self.write(side, job, first, last, job.slots(side, np.arange(first, last)))
            self.seen_stored(side, job, first, last)
        yield

    def seen_stored(self, side: Side, job: Job, first: int, last: int) -> None:
        logical = range(first // ROWS, (last - 1) // ROWS + 1)
        pages = [job.pages[side.agent][k] for k in logical]
        side.look("ST", "", logical=logical, pages=pages, rows=last, step=self._step, **job.who)

    def post(
        self, side: Side, job: Job, chunk: tuple[int, int], *, units: Sequence[Unit] = (), **fields: Any
    ) -> Transfer | None:
        """A prefill process posts the pages of a chunk; nothing has landed yet."""
        target = self.decode
        logical = self.pages_of(job, chunk)
        logical = self.deed.sent(self, job, logical)
        if not logical:
            return None
        source_pages = [job.pages[side.agent][k] for k in logical]
        pages = self.deed.targets(self, side, job, logical)
        pairs = self.deed.pairs(self, side, job)
        if units:
            pairs = [pair for pair in pairs if pair[0] in units]
        lengths, strides = self.deed.geometry(self, side, job)
        parts: list[Part] = []
        for here, there in pairs:
            if not all(0 <= page < (1 << 31) for page in pages):
                continue
            mine = [
                (side.address(here) + a * strides[0], target.address(there) + b * strides[1], min(lengths))
                for a, b in zip(source_pages, pages, strict=True)
            ]
            parts += self.deed.cut(self, side, job, mine)
        parts = grouped(parts)
        if not parts or self.deed.skips(self, side, job):
            return None
        self._transfer += 1
        number = self._transfer
        side.hand(0, self.wire)
        at = {"transfer": number, "thread": self.wire}
        side.look("SE", "before", logical=logical, pages=source_pages, rows=chunk[1], **at, **job.who)
        told = {"written": 1, "awaited": 1} | fields
        side.emit(
            "send",
            transfer=number,
            chunk=self.chunks(job).index(chunk) if chunk in self.chunks(job) else 0,
            last=chunk[1] == job.rows,
            agent=side.agent,
            peer=target.agent,
            logical=logical[0],
            pages=source_pages,
            destination_pages=pages,
            item_lengths=[lengths[0]] * len(pairs),
            source=np.array([(a, n) for a, _, n in parts], np.uint64),
            destination=np.array([(b, n) for _, b, n in parts], np.uint64),
            thread=self.wire,
            **job.who,
            **told,
        )
        side.emit("transfer_state", state="posted", agent=side.agent, **at, **job.who)
        return Transfer(number, job, side, logical, parts)

    def pages_of(self, job: Job, chunk: tuple[int, int]) -> list[int]:
        """Logical pages that go with a chunk: the first one takes the prefix along that decode does not have."""
        first = chunk[0] // ROWS
        if chunk == self.chunks(job)[0]:
            first = job.shared[self.decode.agent]
        return list(range(first, -(-chunk[1] // ROWS)))

    def slice_of(self, side: Side) -> list[tuple[int, int]]:
        """What of every page a prefill process sends, as (first byte, last byte + 1); nothing: the whole page."""
        count, rank, page = self.shape.ranks, side.rank % self.shape.ranks, side.layout
        if count == 1:
            return []
        if self.shape.slices == "range":
            part = page.page_bytes // count
            return [(rank * part, page.page_bytes if rank == count - 1 else (rank + 1) * part)]
        part = page.value_bytes // count
        values = [(row * page.value_bytes + rank * part, part) for row in range(page.rows)]
        scales = (page.page_bytes - page.scale_base) // count
        return [(at, at + part) for at, part in [*values, (page.scale_base + rank * scales, scales)] if part]

    def land(self, transfer: Transfer, *, first: int = 0, last: int | None = None) -> None:
        """Bytes ``first .. last - 1`` of a transfer reach the destination, as the source is now."""
        at = 0
        for source, destination, length in transfer.parts:
            low, high = max(first, at), min(at + length, at + length if last is None else last)
            if low < high:
                data = transfer.side.read_bytes(source + low - at, high - low)
                self.decode.write_bytes(destination + low - at, data)
            at += length

    def done(self, transfer: Transfer, state: str = "done") -> None:
        """The sender learns of the end, and looks at the source again."""
        side, job = transfer.side, transfer.job
        transfer.over = True
        at = {"transfer": transfer.number, "thread": self.wire}
        side.emit("transfer_state", state=state, agent=side.agent, **at, **job.who)
        pages = [job.pages[side.agent][k] for k in transfer.logical]
        side.look("SE", "after", logical=transfer.logical, pages=pages, rows=job.rows, **at, **job.who)

    def carry(self, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        """Post one chunk from every prefill process; the transfers are returned."""
        posted = []
        for side in self.prefills:
            for units in self.deed.bundles(self, side, job):
                found = self.post(side, job, chunk, units=units)
                if found is not None:
                    posted.append(found)
        yield
        return posted  # the value of ``yield from``

    def drain(self, pending: list[Transfer]) -> Iterator[None]:
        """Everything that is under way lands."""
        while pending:
            transfer = pending.pop(0)
            self.deed.land(self, transfer)
            yield
            self.done(transfer, self.deed.state(self, transfer))

    def complete(self, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from self.drain(pending)
        self.tell(job)
        self.arrive(job)
        yield

    def tell(self, job: Job) -> None:
        """Prefill tells that the request is complete."""
        for side in self.prefills:
            self.edge(side, self.decode, "status", job.key)

    def arrive(self, job: Job) -> None:
        """Decode believes it, and looks."""
        side = self.decode
        if self.shape.metadata:
            holds = self.deed.metadata(self, job)
            side.emit("metadata", moment="read", slot=job.slot, holds=holds, **job.who)
            side.emit("metadata", moment="freed", slot=job.slot, holds=holds, **job.who)
            self.slots.append(job.slot)
        side.emit("transfer_state", state="arrived", agent=side.agent, **job.who)
        self.look(job, "RC")
        told = {"tokens": job.rows * TOKENS_PER_ROW, "rows": job.rows}
        side.emit("request", phase="arrived", **told, **job.who)
        job.arrived = True

    def look(self, job: Job, stage: str, moment: str = "") -> None:
        """A look at the destination pages of the prompt."""
        side = self.decode
        first = job.shared[side.agent] if stage == "RC" else 0
        logical = range(first, -(-job.rows // ROWS))
        pages = [job.pages[side.agent][k] for k in logical]
        side.look(stage, moment, logical=logical, pages=pages, rows=job.length, **job.who)

    def end_prefill(self, job: Job) -> None:
        """The prefill side is through with the request; its pages stay for prefixes or go back."""
        for side in self.prefills:
            side.emit("request", phase="finish", **job.who)
            job.over.add(side.agent)
        if not job.gone and self.deed.keeps(self, job):
            self.cache.append(job)
            while len(self.cache) > 6:
                self.evict()
            return
        for side in self.prefills:
            if side.agent not in job.gone:
                back = side.drop(job.pages[side.agent])
                side.emit("free", pages=back, reason="finish", **job.who)

    def acknowledge(self, job: Job) -> None:
        """Prefill tells that no write of the request is under way."""
        for prefill in self.prefills:
            self.edge(prefill, self.decode, "ack", job.key)
        self.decode.emit("transfer_state", state="acknowledged", agent=self.decode.agent, **job.who)
