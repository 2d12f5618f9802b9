"""A prefill/decode pair that is simulated byte for byte and records itself as honest hooks would.

The engine does something to memory and the hooks write down what they see of it; nothing else gets into a trace. Where
engines go wrong, the world asks its :class:`~benchmarks.accuracy.deed.Deed`, which does right unless a fault replaces
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.accuracy.passage import Passage
from benchmarks.accuracy.request import ROWS, Job, Transfer
from benchmarks.accuracy.side import I64


class World(Passage):
    """A pair at work; several worlds may share a builder (data-parallel ranks)."""

    def play(self, waiting: list[Job], concurrency: int) -> None:
        """Run requests to their end, interleaved at random."""
        for _ in self.playing(waiting, concurrency):
            pass

    def playing(self, waiting: list[Job], concurrency: int) -> Iterator[None]:
        """As :meth:`play`, one step at a time."""
        active, self.waiting = self.active, list(waiting)
        while self.waiting or active:
            if self.waiting and len(active) < concurrency and (not active or self.rng.random() < 0.5):
                self.admit()
            if active:
                self.advance(self.rng.choice(active))
            yield

    def admit(self) -> None:
        """The next request that may start does."""
        ready = [job for job in self.waiting if self.deed.ready(self, job)] or self.waiting[: not self.active]
        if not ready:
            return
        if self.enter(ready[0]) is None and not self.evict() and not self.active:
            raise RuntimeError(f"room {ready[0].room} of {ready[0].rows} rows never fits")

    def enter(self, job: Job) -> Iterator[None] | None:
        """Start a request now; None where it finds no pages."""
        if not self.start(job):
            return None
        if job in self.waiting:
            self.waiting.remove(job)
        self.jobs.append(job)
        self.active.append(self.life(job))
        return self.active[-1]

    def advance(self, life: Iterator[None]) -> bool:
        """One step of one request; False at its end."""
        if next(life, "over") != "over":
            return True
        if life in self.active:
            self.active.remove(life)
        return False

    def life(self, job: Job) -> Iterator[None]:
        """All of one request."""
        if job.mark:
            yield from self.warm_up(job)
            return
        yield
        self.announce(job)
        yield
        if job.abort_at == "announced":
            yield from self.deed.abort(self, job, [])
            return
        pending: list[Transfer] = []
        for chunk in self.chunks(job):
            yield from self.deed.compute(self, job, chunk)
            if job.abort_at == "computed":
                yield from self.deed.abort(self, job, pending)
                return
            posted = yield from self.deed.carry(self, job, chunk)
            pending += posted
            if job.abort_at == "posted":
                yield from self.deed.abort(self, job, pending)
                return
            if self.deed.drains(self, job, chunk):
                yield from self.drain(pending)
        job.stored = True
        yield from self.deed.complete(self, job, pending)
        self.end_prefill(job)
        yield
        yield from self.deed.decode(self, job)
        if self.decode.agent not in job.over:
            self.finish(job)

    def decoding(self, job: Job) -> Iterator[None]:
        """The steps of decode."""
        for step in range(job.steps):
            if step and self.shape.retracts and self.rng.random() < 0.15:
                yield from self.retract(job)
            if step:
                self.grow(job)
                yield
            self.read(job, looks=step == 0 or self.rng.random() < 0.4)
            yield
            if step == 0:
                self.look(job, "LT")

    def grow(self, job: Job) -> None:
        """Rows that the step before brought are stored, drafted ones first where the engine speculates."""
        side = self.decode
        count = 1 if not self.shape.draft else self.rng.randint(1, self.shape.draft)
        ahead = max(count, self.shape.draft)
        need = -(-(job.length + ahead) // ROWS) - len(job.pages[side.agent])
        if need > 0:
            fresh = side.take(need)
            if fresh is None:
                return
            side.emit("alloc", logical=len(job.pages[side.agent]), pages=fresh, **job.who)
            job.pages[side.agent] += fresh
            self._translate(job)
        self._step += 1
        first = job.length
        rows = np.arange(first, first + ahead)
        order = list(range(ahead))
        if self.shape.moves:
            self.rng.shuffle(order)  # a tree of drafts: the accepted path lies scattered
        slots = self.deed.append_slots(self, job, rows[order])
        told = {"mapping": self.deed.write_mapping(self, job)} | ({"draft": True} if self.shape.draft else {})
        self.write(side, job, first, first + ahead, slots, **told)
        if self.shape.draft:
            self.verify(job, ahead)
            self.compact(job, rows[order][:count], rows[:count])
        job.appended += count
        job.drafted = first + ahead
        self.seen_stored(side, job, first, job.length)
        if self.shape.trims:
            self.trim(job)

    def trim(self, job: Job) -> None:
        """Pages that only rejected drafts had needed go back, and the request goes on."""
        side = self.decode
        pages = job.pages[side.agent]
        spare = pages[-(-job.length // ROWS) :]
        if spare:
            del pages[-len(spare) :]
            side.emit("free", pages=side.drop(spare), reason="trim", **job.who)
            job.drafted = min(job.drafted, len(pages) * ROWS)
            self._translate(job)

    def retract(self, job: Job) -> Iterator[None]:
        """Decode needs the room: the request waits with its pages in the host tier, and gets others later."""
        side = self.decode
        count = -(-job.length // ROWS)
        self.look(job, "LT", "end")
        self.host.offload(side, job, count)
        job.gone.add(side.agent)
        side.emit("free", pages=side.drop(job.pages[side.agent]), reason="retract", **job.who)
        yield
        fresh = side.take(count)
        while fresh is None:
            yield
            fresh = side.take(count)
        job.gone.discard(side.agent)
        job.pages[side.agent], job.shared[side.agent] = fresh, 0
        job.drafted = min(job.drafted, count * ROWS)
        side.emit("alloc", pages=fresh, **job.who)
        self.host.load_back(side, job, job.key, count)
        self._translate(job)
        self.look(job, "LT")

    def compact(self, job: Job, here: I64, there: I64) -> None:
        """Accepted rows move to where they belong."""
        side = self.decode
        moved = here != there
        if not moved.any():
            return
        here, there = here[moved], there[moved]
        source, target = job.slots(side, here), job.slots(side, there)
        length = self.deed.move(self, job, source, target)
        for unit in side.units:
            side.emit(
                "copy",
                operation="move",
                source_buffer=side.buffer(unit),
                buffer=side.buffer(unit),
                unit="row",
                source_ids=source,
                ids=target,
                logical=there,
                length=length,
                source_stride=length,
                stride=length,
                step=self._step,
                **job.who,
            )

    def verify(self, job: Job, ahead: int) -> None:
        """The target model reads every drafted row: query i sees the drafts before it."""
        for i in range(1, ahead):
            rows = job.length + i
            self.read_once(job, rows, looks=False, accepted=rows, drafted=job.length + ahead)

    def read(self, job: Job, *, looks: bool) -> None:
        """One step's read of all layers."""
        told = {"accepted": job.length, "drafted": max(job.drafted, job.length)} if self.shape.draft else {}
        self.read_once(job, self.deed.length(self, job), looks=looks, **told)

    def read_once(self, job: Job, rows: int, *, looks: bool, **told: Any) -> None:
        side = self.decode
        self._step += 1
        pages = job.pages[side.agent]
        needed = -(-rows // ROWS)
        table = self.deed.table(self, job, (pages + [0] * needed)[:needed])
        exist = -(-job.length // ROWS)
        logical = range(min(len(table), exist))
        at = {"rows": job.length, "step": self._step} | job.who
        if looks:
            side.look("RD", "before", logical=logical, pages=table[: len(logical)], **at)
        pad = [0] * self.rng.choice([0, 0, 1, 3]) if self.shape.padding else []
        for unit in side.units:
            more: dict[str, Any] = {}
            if looks and job.sampled and self.recording.bytes:
                more = self.deed.kernel(self, job, unit, table, rows)
            side.emit(
                "read",
                buffer=side.buffer(unit),
                step=self._step,
                rows=rows,
                table=table + pad,
                table_after=table + pad,
                mapping=self.deed.read_mapping(self, job),
                stride=self.deed.read_stride(self, job),
                **job.who,
                **told,
                **more,
            )
        if looks:
            side.look("RD", "after", logical=logical, pages=table[: len(logical)], **at)

    def finish(self, job: Job) -> None:
        """The request is over at decode; the step that was launched already may still run."""
        side = self.decode
        self.look(job, "LT", "end")
        side.emit("request", phase="finish", **job.who)
        back = side.drop(job.pages[side.agent])
        side.emit("free", pages=back, reason="finish", **job.who)
        job.over.add(side.agent)
        if job.overshoot:
            self.read(job, looks=True)

    def abort(self, job: Job, pending: list[Transfer]) -> Iterator[None]:
        """The client went away: decode waits until no write is under way, then both give the pages back."""
        side = self.decode
        side.emit("request", phase="abort", **job.who)
        self.edge(side, self.prefills, "abort", job.key)
        yield
        while pending:
            transfer = pending.pop(0)
            self.land(transfer)
            self.done(transfer)
        self.acknowledge(job)
        for each in self.sides:
            each.emit("request", phase="abort", **job.who)
            if each.agent not in job.gone:
                each.emit("free", pages=each.drop(job.pages[each.agent]), reason="abort", **job.who)
            job.over.add(each.agent)
        if job.slot >= 0:
            side.emit("metadata", moment="freed", slot=job.slot, **job.who)
            self.slots.append(job.slot)
        if job.retries:
            again = Job(job.room, job.stream, job.rows, job.attempt + 1, steps=job.steps, sampled=job.sampled)
            self.waiting.insert(0, again)

    def warm_up(self, job: Job) -> Iterator[None]:
        """A warm-up or health request: decode reads pages that nobody ever filled."""
        yield
        self.read(job, looks=True)
        yield
        for side in self.sides:
            side.emit("request", phase="finish", mark=job.mark, **job.who)
            side.emit("free", pages=side.drop(job.pages[side.agent]), reason="finish", **job.who)
            job.over.add(side.agent)
