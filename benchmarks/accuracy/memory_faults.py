"""Faults of pages and stores: what is written where, by whom, and who owns it then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.accuracy.fault import (
    I64,
    ROWS,
    Fault,
    Job,
    Recording,
    Shape,
    Side,
    Transfer,
    Unit,
    World,
)
from benchmarks.accuracy.model import Rows
from benchmarks.accuracy.side import U8
from benchmarks.accuracy.traffic import rows_of


class SentBeforeWritten(Fault):
    code = "F10"
    stages = ("source",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.asked = self.rng.random() < 0.7
        self.late_end = self.rng.random() < 0.5
        self.plans: dict[str, tuple[list[Any], list[Any]]] = {}
        return super().arrange(shape, recording, crowd)

    def compute(self, world: World, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        if job is not self.victim or chunk != world.chunks(job)[-1]:
            yield from super().compute(world, job, chunk)
            return
        # The store is launched and has got as far as some row of some layer; the rest comes after the post.
        first, last = chunk
        world._step += 1
        self.begun: dict[str, int] = {}
        for side in world.prefills:
            self.begun[side.agent] = side.seq + 1
            which = self.rng.randrange(len(side.units))
            row = self.rng.randint(first, last - 1)
            for number, unit in enumerate(side.units):
                upto = last if number < which else row if number == which else first
                self._write(world, side, job, unit, first, upto)
        yield

    def _write(self, world: World, side: Side, job: Job, unit: Unit, first: int, last: int) -> None:
        rows = np.arange(first, last)
        found = world.model.rows(job.streams(rows), world.layer_key(unit), rows)
        side.put_rows(unit, job.slots(side, rows), found.values, found.scales)

    def carry(self, world: World, job: Job, chunk: tuple[int, int]) -> Any:
        if job is not self.victim or chunk != world.chunks(job)[-1]:
            return (yield from super().carry(world, job, chunk))
        posted = []
        told = {"written": 0, "awaited": 0} if self.asked else {"written": -1, "awaited": -1}
        for side in world.prefills:
            for units in self.bundles(world, side, job):
                transfer = world.post(side, job, chunk, units=units, **told)
                if transfer is not None:
                    posted.append(transfer)
        for transfer in posted:
            world.land(transfer)
        if not self.late_end:
            for transfer in posted:
                world.done(transfer)
        for side in world.prefills:
            step = {"begin_seq": self.begun[side.agent]}
            world.write(side, job, *chunk, job.slots(side, np.arange(*chunk)), **step)
            world.seen_stored(side, job, *chunk)
        if self.late_end:
            for transfer in posted:
                world.done(transfer)
        yield
        return []

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from super().complete(world, job, pending)
        if job is self.victim:
            self.check(world, job)


class SourceOverwritten(Fault):
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

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from super().complete(world, job, pending)
        if job is self.victim:
            self.check(world, job)


class LateForeignWrite(Fault):
    """A request is aborted, its pages are given on at once, and its write lands in them later."""

    code = "F14"
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
        place = self.rng.randint(len(crowd) // 3, 2 * len(crowd) // 3)
        return [*crowd[:place], self.first, *crowd[place:]]

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
    stages = ("destination",)
    variants = ("clear", "clear-seen", "stale")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.before: dict[Unit, U8] = {}
        self.victim.steps = max(3, self.victim.steps)
        return super().arrange(shape, recording, crowd)

    def ready(self, world: World, job: Job) -> bool:
        return True

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


class FreedPageReferenced(Fault):
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
        place = self.rng.randint(len(crowd) // 3, 2 * len(crowd) // 3)
        return [*crowd[:place], self.parent, *crowd[place:]]

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

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from super().complete(world, job, pending)
        if job is self.victim:
            self.check(world, job)


class StaleSlotMapping(Fault):
    code = "F17"
    stages = ("table",)
    variants = ("offset", "version")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.mapping, shape.draft, shape.moves = True, 0, False
        self.shift = self.rng.choice([1, 2, 3])
        self.victim.steps = max(4, self.victim.steps)
        if self.variant == "version":
            shape.lifo = False
            self.victim.abort_at, self.victim.retries = "announced", 1
            self.old: list[int] = []
        return super().arrange(shape, recording, crowd)

    def append_slots(self, world: World, job: Job, rows: I64) -> I64:
        if not (job is self.victim and self.variant == "offset"):
            return super().append_slots(world, job, rows)
        room = len(job.pages[world.decode.agent]) * ROWS
        shifted = rows + self.shift
        if int(shifted.max()) >= room:
            return super().append_slots(world, job, rows)
        self.struck(job, (rows // ROWS).tolist(), rows.tolist())
        return job.slots(world.decode, shifted)

    def abort(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        if job is self.victim and self.variant == "version":
            self.old = list(job.pages[world.decode.agent])
            self.old_mapping = job.mapping
        yield from super().abort(world, job, pending)

    def _again(self, job: Job) -> bool:
        return self.variant == "version" and job.room == self.victim.room and job.attempt == 1

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


class WrongStore(Fault):
    """F30: the store writes other bytes than its own inputs give."""

    code = "F30"
    stages = ("store",)
    digest = False
    variants = ("no-rotation", "lanes", "scale", "other-rows")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.powers = False
        recording.bytes, self.victim.sampled = True, True
        self.share = self.rng.choice([0.02, 0.2, 1.0])
        if self.variant == "other-rows":
            self.truth.variant = "decode"  # the same, in rows that decode appends
            self.victim.steps = 4
        return super().arrange(shape, recording, crowd)

    def store(self, world: World, side: Side, job: Job, unit: Unit, rows: I64, found: Rows) -> tuple[U8, U8]:
        values, scales = super().store(world, side, job, unit, rows, found)
        at_decode = side is world.decode
        if job is not self.victim or at_decode != (self.variant == "other-rows"):
            return values, scales
        bad = np.array([self.rng.random() < self.share for _ in rows], bool) & (rows > 0)
        if at_decode:
            bad[:] = True
        if not bad.any():
            bad[-1] = int(rows[-1]) > 0
        values, scales = values.copy(), scales.copy()
        page = world.decode.layout
        if self.variant in ("no-rotation", "other-rows"):
            flat = np.tile(np.array([1, 0], np.float32), (len(rows), 32))
            other = world.model.store(found.keys, flat)
            values[bad], scales[bad] = other[0][bad], other[1][bad]
        elif self.variant == "scale" and page.scale_bytes:
            scales[bad] = np.roll(scales, 1, 0)[bad] if page.scale_type == "fp32" else scales[bad] + 1
        else:
            values[np.ix_(bad, range(16, 32))] = 0
        wrong = (values != found.values).any(1) | (scales != found.scales).any(1)
        if wrong.any():
            self.struck(job, (rows[wrong] // ROWS).tolist(), rows[wrong].tolist(), [unit[1]])
        return values, scales


class WrongStrideStore(Fault):
    code = "F20"
    stages = ("store",)
    digest = False
    variants = ("store",)
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.powers = False
        recording.bytes, self.victim.sampled = True, True
        shape.prefill_pages = 2 * shape.prefill_pages + 8
        self.told = self.rng.random() < 0.7
        return super().arrange(shape, recording, crowd)

    def put(self, world: World, side: Side, job: Job, unit: Unit, slots: I64, values: U8, scales: U8) -> None:
        if job is not self.victim or side is world.decode:
            super().put(world, side, job, unit, slots, values, scales)
            return
        page, row = np.divmod(slots, ROWS)
        there = 2 * page
        inside = there < side.pages
        side.put_rows(unit, (there * ROWS + row)[inside], values[inside], scales[inside])
        logical = [job.pages[side.agent].index(p) for p in sorted(set(page.tolist()))]
        self.struck(job, logical, layers=[unit[1]])
        self.others(world, side, there.tolist(), job)

    def store_stride(self, world: World, side: Side, job: Job) -> int:
        if job is not self.victim or side is world.decode:
            return side.pitch
        return 2 * side.pitch if self.told else -1


class TokenIndexAsPageIndex(Fault):
    """Accepted rows are moved by a kernel that takes slot numbers for page numbers."""

    code = "F22"
    stages = ("store",)
    variants = ("store",)
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.draft, shape.moves, shape.lifo, shape.layers = 4, True, True, min(2, shape.layers)
        shape.decode_pages = max(shape.decode_pages, 2 * ROWS + 8)
        room = self.victim.room + 500
        self.mover = Job(room, room, self.rng.randint(1, ROWS - 24), steps=6)
        self.victim.steps = 8
        place = self.rng.randint(len(crowd) // 3, 2 * len(crowd) // 3)
        return [*crowd[:place], self.mover, *crowd[place:]]

    def starting(self, world: World, job: Job) -> None:
        side = world.decode
        if job is self.mover and 1 in side.free_pages:
            side.free_pages.remove(1)
            side.free_pages.append(1)
        elif job is self.victim:
            high = [p for p in side.free_pages if ROWS <= p < 2 * ROWS]
            side.free_pages = [p for p in side.free_pages if p not in high] + high

    def decode(self, world: World, job: Job) -> Iterator[None]:
        if job is self.mover:
            life = world.enter(self.victim)
            if life is not None:
                self.advance_until(world, life, self.victim)
        yield from super().decode(world, job)

    def move(self, world: World, job: Job, source: I64, target: I64) -> int:
        side = world.decode
        if job is not self.mover or 1 not in job.pages[side.agent]:
            return super().move(world, job, source, target)
        size = side.layout.page_bytes
        inside = (source < side.pages) & (target < side.pages)
        for unit in side.units:
            side.memory[unit][target[inside]] = side.memory[unit][source[inside]].copy()
        self.others(world, side, target[inside].tolist(), job)
        self.truth.rooms.add(job.room)
        if self.victim.arrived and side.agent not in self.victim.over:
            self.check(world, self.victim)
        return size


class PaddingRowWritten(Fault):
    """Padding rows of a batch go to the last slot of the pool, or to slot 0 of a page that is somebody's."""

    code = "F23"
    stages = ("store",)
    variants = ("last", "zero")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.padding, shape.lifo = True, True
        self.victim.steps = max(5, self.victim.steps)
        self.slot = -1 if self.variant == "last" else 0
        if self.variant == "last":
            self.victim.rows = -(-self.victim.rows // ROWS) * ROWS
        shape.draft, shape.moves = 0, False
        return super().arrange(shape, recording, crowd)

    def starting(self, world: World, job: Job) -> None:
        side = world.decode
        page = side.pages - 1 if self.variant == "last" else 0
        if job is self.victim and not side.holders[page]:
            if page in side.free_pages:
                side.free_pages.remove(page)
            side.free_pages.append(page)

    def append_slots(self, world: World, job: Job, rows: I64) -> I64:
        return np.concatenate([job.slots(world.decode, rows), np.full(self.rng.randint(1, 3), self.slot)])

    def put(self, world: World, side: Side, job: Job, unit: Unit, slots: I64, values: U8, scales: U8) -> None:
        if side is world.decode and self.variant == "last":
            slots = np.where(slots < 0, side.pages * ROWS - 1, slots)  # the address wraps to the end
        super().put(world, side, job, unit, slots, values, scales)
        victim = self.victim
        page = side.pages - 1 if self.variant == "last" else 0
        if side is world.decode and page in slots // ROWS:
            self.truth.rooms |= {job.room for job in world.owners(side, page)}
        if side is world.decode and victim.arrived and side.agent not in victim.over:
            pages, layers = self.wrong(world, side, victim)
            if pages:
                self.struck(victim, pages, [ROWS - 1 if self.variant == "last" else 0], layers)
                self.truth.rooms.add(job.room)


class DraftRowMisplaced(Fault):
    """Drafted rows are stored at positions that begin too low: below the prompt's end."""

    code = "F29"
    stages = ("destination",)
    variants = ("destination",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.draft, shape.moves = 4, False
        self.victim.steps = max(3, self.victim.steps)
        self.back = self.rng.randint(1, 40)
        return super().arrange(shape, recording, crowd)

    def append_slots(self, world: World, job: Job, rows: I64) -> I64:
        if job is not self.victim or int(rows.max()) - self.back < 0:
            return super().append_slots(world, job, rows)
        return job.slots(world.decode, np.maximum(rows - self.back, 0))

    def put(self, world: World, side: Side, job: Job, unit: Unit, slots: I64, values: U8, scales: U8) -> None:
        super().put(world, side, job, unit, slots, values, scales)
        if job is self.victim and side is world.decode:
            self.check(world, job)
