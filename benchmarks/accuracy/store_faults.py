"""Faults of stores: which bytes are written, where, and when."""

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
    Unit,
    World,
)
from benchmarks.accuracy.model import Rows
from benchmarks.accuracy.side import U8


class SentBeforeWritten(ArrivesWrong):
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


class WrongStore(Fault):
    """F30: the store writes other bytes than its own inputs give."""

    code = "F30"
    stages = ("store",)
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
        return self.among(crowd, self.mover)

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
