"""Faults of pages: whose they are, and who else writes to them or reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.accuracy.fault import (
    I64,
    ROWS,
    ArrivesWrong,
    Fault,
    Job,
    Recording,
    Shape,
    Side,
    Transfer,
    Unit,
    World,
)
from benchmarks.accuracy.side import U8
from benchmarks.accuracy.traffic import rows_of


class SourceOverwritten(ArrivesWrong):
    code = "F11"
    stages = ("source",)
    pages = (1, 120)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.lifo, shape.chunk_pages = True, 256
        self.early = self.rng.random() < 0.5
        whole = -(-self.victim.rows // ROWS)
        self.thief = Job(self.victim.room + 500, self.victim.room + 500, rows_of(self.rng, whole), steps=2)
        shape.prefill_pages += 2 * whole
        shape.decode_pages += 2 * whole
        return super().arrange(shape, recording, crowd)

    def carry(self, world: World, job: Job, chunk: tuple[int, int]) -> Any:
        if job is not self.victim:
            return (yield from super().carry(world, job, chunk))
        posted = [] if self.early else (yield from super().carry(world, job, chunk))
        for side in world.prefills:
            back = side.drop(job.pages[side.agent])
            side.emit("free", pages=back, reason="finish", **job.who)
            job.gone.add(side.agent)
        life = world.enter(self.thief)
        while life is not None and not self.thief.stored and world.advance(life):
            pass
        if self.early:
            posted = yield from super().carry(world, job, chunk)
        yield from world.drain(posted)
        return []


class LateForeignWrite(Fault):
    """A request is aborted, its pages are given on at once, and its write lands in them later."""

    code = "F14"
    with_ranks = True
    stages = ("destination",)
    pages = (1, 120)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.lifo, shape.chunk_pages = True, 256
        whole = -(-self.victim.rows // ROWS)
        room = self.victim.room + 500
        self.first = Job(room, room, rows_of(self.rng, whole + self.rng.randint(0, 2)), abort_at="posted")
        shape.prefill_pages += 2 * whole + 4
        shape.decode_pages += whole + 4
        self.victim.steps = max(2, self.victim.steps)
        return self.among(crowd, self.first)

    def abort(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        if job is not self.first:
            yield from super().abort(world, job, pending)
            return
        side = world.decode
        side.emit("request", phase="abort", **job.who)
        world.edge(side, world.prefills, "abort", job.key)
        back = side.drop(job.pages[side.agent])
        side.emit("free", pages=back, reason="abort", **job.who)
        job.over.add(side.agent)
        yield
        life = world.enter(self.victim)
        if life is not None:
            self.advance_until(world, life, self.victim)
        before = self.wrong(world, side, self.victim)[0] if life is not None else []
        for transfer in pending:
            world.land(transfer)
            world.done(transfer)
        if life is not None and not before and self.victim.arrived and side.agent not in self.victim.over:
            self.check(world, self.victim)
        world.acknowledge(job)
        for each in world.prefills:
            each.emit("request", phase="abort", **job.who)
            each.emit("free", pages=each.drop(job.pages[each.agent]), reason="abort", **job.who)
            job.over.add(each.agent)
        if job.slot >= 0:
            side.emit("metadata", moment="freed", slot=job.slot, **job.who)
            world.slots.append(job.slot)


class LocalClear(Fault):
    """Decode clears pages, or brings an old state of them back, after they have arrived."""

    code = "F15"
    with_ranks = True
    stages = ("destination",)
    variants = ("clear", "clear-seen", "stale")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.before: dict[Unit, U8] = {}
        self.victim.steps = max(3, self.victim.steps)
        return super().arrange(shape, recording, crowd)

    def compute(self, world: World, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        if job is self.victim and not self.before:
            pages = job.pages[world.decode.agent]
            self.before = {unit: world.decode.memory[unit][pages].copy() for unit in world.decode.units}
        yield from super().compute(world, job, chunk)

    def decode(self, world: World, job: Job) -> Iterator[None]:
        if job is not self.victim:
            yield from super().decode(world, job)
            return
        side = world.decode
        if self.rng.random() < 0.5:
            world.read(job, looks=True)
            world.look(job, "LT")
            yield
        count = -(-job.rows // ROWS)
        first = self.rng.randrange(count)
        last = min(count, first + self.rng.choice([1, 1, 2, 8]))
        units = side.units if self.rng.random() < 0.6 else side.units[:1]
        pages = job.pages[side.agent][first:last]
        for unit in units:
            fresh = self.before[unit][first:last] if self.variant == "stale" else 0
            side.memory[unit][pages] = fresh
            if self.variant == "clear-seen":
                at = {"ids": pages, "length": side.layout.page_bytes, "stride": side.pitch}
                side.emit("copy", operation="clear", buffer=side.buffer(unit), **at)
        self.check(world, job)
        yield from super().decode(world, job)


class FreedPageReferenced(ArrivesWrong):
    """Decode's prefix tree still names pages that were freed and given to another request."""

    code = "F16"
    stages = ("destination", "table")
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.shares, shape.lifo, shape.cache = True, True, True
        whole = -(-self.victim.rows // ROWS)
        room = self.victim.room
        self.parent = Job(room + 500, room + 500, whole * ROWS + 3, steps=1)
        self.thief = Job(room + 501, room + 501, whole * ROWS + 9, steps=4)
        self.victim.parent, self.victim.prefix_rows = self.parent, whole * ROWS
        self.victim.rows = whole * ROWS + self.rng.randint(1, ROWS)
        shape.prefill_pages += 4 * whole + 8
        shape.decode_pages += 3 * whole + 8
        return self.among(crowd, self.parent)

    def keeps(self, world: World, job: Job) -> bool:
        return job is self.parent or super().keeps(world, job)

    def decode(self, world: World, job: Job) -> Iterator[None]:
        yield from super().decode(world, job)
        if job is not self.parent:
            return
        # The last step is over; the request ends, its pages are reused, and the tree is asked for its prefix.
        world.finish(job)
        life = world.enter(self.thief)
        if life is not None:
            self.advance_until(world, life, self.thief)
        if life is not None and self.thief.arrived and (self.parent in world.cache):
            self.now = True
            world.enter(self.victim)
            self.now = False

    def shareable(self, world: World, side: Side, job: Job, parent: Job) -> bool:
        if job is self.victim and side is world.decode:
            return getattr(self, "now", False)
        return super().shareable(world, side, job, parent)


class StaleSlotMapping(Fault):
    code = "F17"
    stages = ("table",)
    variants = ("offset", "version", "store-version")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.mapping, shape.draft, shape.moves = True, 0, False
        self.shift = self.rng.choice([1, 2, 3])
        self.victim.steps = max(4, self.victim.steps)
        if self.variant != "offset":
            shape.lifo = False
            self.victim.abort_at, self.victim.retries = "announced", 1
            self.old: list[int] = []
        return super().arrange(shape, recording, crowd)

    def write_mapping(self, world: World, job: Job) -> int:
        return self.old_mapping if self._again(job, "store-version") else job.mapping

    def append_slots(self, world: World, job: Job, rows: I64) -> I64:
        if self._again(job, "store-version"):
            return self._old_slots(world, job, rows)
        if not (job is self.victim and self.variant == "offset"):
            return super().append_slots(world, job, rows)
        room = len(job.pages[world.decode.agent]) * ROWS
        shifted = rows + self.shift
        if int(shifted.max()) >= room:
            return super().append_slots(world, job, rows)
        self.struck(job, (rows // ROWS).tolist(), rows.tolist())
        return job.slots(world.decode, shifted)

    def _old_slots(self, world: World, job: Job, rows: I64) -> I64:
        right, side = job.slots(world.decode, rows), world.decode
        if int(rows.max()) // ROWS >= len(self.old):
            return right
        found = np.asarray(self.old, np.int64)[rows // ROWS] * ROWS + rows % ROWS
        if (found != right).any():
            self.truth.happened, self.truth.attempt = True, 1
            self.others(world, side, (found // ROWS).tolist(), job)
        return np.asarray(found, np.int64)

    def abort(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        if job is self.victim and self.variant != "offset":
            self.old = list(job.pages[world.decode.agent])
            self.old_mapping = job.mapping
        yield from super().abort(world, job, pending)

    def _again(self, job: Job, variant: str = "version") -> bool:
        return self.variant == variant and job.room == self.victim.room and job.attempt == 1

    def table(self, world: World, job: Job, pages: list[int]) -> list[int]:
        if not self._again(job):
            return pages
        stale = [*self.old, *pages[len(self.old) :]][: len(pages)]
        bad = [k for k, (a, b) in enumerate(zip(stale, pages, strict=True)) if a != b]
        if bad:
            self.truth.happened, self.truth.attempt = True, 1
            self.truth.pages = tuple(bad)
        return stale

    def read_mapping(self, world: World, job: Job) -> int:
        return self.old_mapping if self._again(job) else job.mapping
