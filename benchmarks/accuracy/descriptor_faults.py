"""Faults of descriptors: what is sent and copied, and where it is to land."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.accuracy.fault import (
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
    landed_pages,
)
from benchmarks.accuracy.pages import Pages
from benchmarks.accuracy.request import Part
from capture_hooks.layouts import Layout, layout

#: The page of another format whose size a sender takes by mistake.
OTHER_FORMAT = {"fp8": 4352, "bf16": 8448, "fp4": 4096}


class Descriptors(ArrivesWrong):
    """A fault of configuration: often all requests have it."""

    stages = ("descriptor",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.everyone = self.rng.random() < 0.4
        return super().arrange(shape, recording, crowd)


class BufferMissing(Descriptors):
    code = "F01"

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.layers = max(2, shape.layers)
        return super().arrange(shape, recording, crowd)

    def pairs(self, world: World, side: Side, job: Job) -> list[tuple[Unit, Unit]]:
        right = super().pairs(world, side, job)
        if not self.hits(job) or side is not world.prefills[-1]:
            return right
        return right[:-1]  # the last layer of the last stage: a draft layer is the usual one


class ListTooShort(Descriptors):
    code = "F02"
    pages = (2, 200)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        whole = -(-self.victim.rows // ROWS)
        self.short = self.rng.choice([1, 1, self.rng.randint(1, whole - 1)])
        jobs = super().arrange(shape, recording, crowd)
        self.everyone = False
        return jobs

    def sent(self, world: World, job: Job, logical: list[int]) -> list[int]:
        if not self.hits(job):
            return logical
        count = -(-job.rows // ROWS) - self.short
        return [k for k in logical if k < count]


class WrongItemLength(Descriptors):
    code = "F03"
    variants = ("pitch", "length")

    def geometry(self, world: World, side: Side, job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
        lengths, strides = super().geometry(world, side, job)
        if not self.hits(job):
            return lengths, strides
        wrong = OTHER_FORMAT[world.shape.format]
        return (wrong, wrong), (strides if self.variant == "length" else (wrong, wrong))

    def land(self, world: World, transfer: Transfer) -> None:
        super().land(world, transfer)
        if self.hits(transfer.job):
            self.others(world, world.decode, landed_pages(world, transfer), transfer.job)


class WrongPageIdSpace(Descriptors):
    code = "F04"

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.decode_pages = max(shape.decode_pages, shape.prefill_pages)
        jobs = super().arrange(shape, recording, crowd)
        self.everyone = False
        return jobs

    def targets(self, world: World, side: Side, job: Job, logical: Sequence[int]) -> list[int]:
        if not self.hits(job):
            return super().targets(world, side, job, logical)
        return [job.pages[side.agent][k] for k in logical]

    def land(self, world: World, transfer: Transfer) -> None:
        super().land(world, transfer)
        if self.hits(transfer.job):
            self.others(world, world.decode, landed_pages(world, transfer), transfer.job)


class WrongLayerPairing(Descriptors):
    code = "F05"
    also = ("F01",)  # layers that nobody writes are missing from the transfer, too

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.layers = max(2, shape.layers)
        shape.stages = 2 if self.rng.random() < 0.5 else 1
        shape.layers += shape.layers % shape.stages
        return super().arrange(shape, recording, crowd)

    def pairs(self, world: World, side: Side, job: Job) -> list[tuple[Unit, Unit]]:
        right = super().pairs(world, side, job)
        if not self.hits(job):
            return right
        found = []
        for name in world.shape.components:
            mine = [unit for unit, _ in right if unit[0] == name]
            if world.shape.stages > 1:  # pairs by position: the second stage's layers begin at 0
                theirs = [unit for unit in world.decode.units if unit[0] == name]
                found += list(zip(mine, theirs, strict=False))
            else:
                found += [(unit, (name, unit[1] - 1)) for unit in mine if unit[1] >= 1]
        return found


class PartialSlice(Descriptors):
    code = "F06"
    variants = ("part",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        size = layout(shape.format).page_bytes
        half = self.rng.choice([size // 2, size // 4])
        first = self.rng.choice([half, size - half, 0])
        self.slice = (first, first + half)
        return super().arrange(shape, recording, crowd)

    def cut(self, world: World, side: Side, job: Job, parts: list[Part]) -> list[Part]:
        if not self.hits(job):
            return parts
        first, last = self.slice
        return [(a + first, b + first, last - first) for a, b, _ in parts]


class RankSlices(Descriptors):
    """Several ranks have a slice of each page to send: only one does, or all send the first one's."""

    code = "F06"
    variants = ("one-rank", "ranks-alike")
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.ranks, shape.slices = self.rng.choice([2, 4]), self.rng.choice(["range", "row"])
        if self.variant == "ranks-alike":  # in slices of equal length
            shape.slices = "row" if layout(shape.format).page_bytes % shape.ranks else shape.slices
        self.only = self.rng.randrange(shape.ranks)
        return super().arrange(shape, recording, crowd)

    def skips(self, world: World, side: Side, job: Job) -> bool:
        return self.hits(job) and self.variant == "one-rank" and side.rank % world.shape.ranks != self.only

    def cut(self, world: World, side: Side, job: Job, parts: list[Part]) -> list[Part]:
        if not self.hits(job) or self.variant == "one-rank":
            return super().cut(world, side, job, parts)
        mine, first = world.slice_of(side), world.slice_of(world.prefills[0])
        return [
            (a + low, b + there, high - low)
            for a, b, _ in parts
            for (low, high), (there, _) in zip(first, mine, strict=True)
        ]


def permutation(page: Layout, how: str) -> np.ndarray:
    """Where each byte of a page comes from: ``new = old[permutation]``."""
    at = np.arange(page.page_bytes)
    values, scales = (
        at[: page.scale_base].reshape(page.rows, -1),
        at[page.scale_base :].reshape(page.rows, -1),
    )
    if how == "interleaved":
        return np.concatenate([values, scales], 1).ravel()
    if how == "rows":
        order = np.arange(page.rows).reshape(4, -1).T.ravel()
        return np.concatenate([values[order].ravel(), scales[order].ravel()])
    tiles = values.reshape(page.rows // 16, 16, -1, 16).transpose(0, 2, 1, 3)
    return np.concatenate([tiles.ravel(), scales.ravel()])


class LayoutPermuted(ArrivesWrong):
    code = "F07"
    variants = ("descriptor", "unpack", "read")
    pages = (1, 40)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        page = layout(shape.format)
        self.how = self.rng.choice(
            ["interleaved", "tiles", "rows"] if page.scale_bytes else ["tiles", "rows"]
        )
        self.truth.stages = ("read-kernel",) if self.variant == "read" else ("descriptor",)
        if self.variant == "descriptor":
            self.how = "interleaved" if page.scale_bytes and self.how == "tiles" else self.how
            self.how = "rows" if self.how == "tiles" else self.how
        # An order shows in the rows that it moves: of one or two nobody can tell where they came from.
        self.victim.rows = max(16, self.victim.rows)
        if self.variant == "read":
            self.how = "interleaved" if page.scale_bytes else "tiles"
            recording.bytes, self.victim.sampled = True, True
        return super().arrange(shape, recording, crowd)

    def cut(self, world: World, side: Side, job: Job, parts: list[Part]) -> list[Part]:
        if not self.hits(job) or self.variant != "descriptor":
            return parts
        source = permutation(side.layout, self.how)
        edges = np.flatnonzero(np.diff(source) != 1) + 1
        starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(source)]
        return [
            (a + int(source[start]), b + start, stop - start)
            for a, b, _ in parts
            for start, stop in zip(starts, stops, strict=True)
        ]

    def land(self, world: World, transfer: Transfer) -> None:
        super().land(world, transfer)
        if self.hits(transfer.job) and self.variant == "unpack":
            order = permutation(world.decode.layout, self.how)
            for unit in world.decode.units:
                if unit in transfer.side.units:
                    pages = [transfer.job.pages[world.decode.agent][k] for k in transfer.logical]
                    world.decode.memory[unit][pages] = world.decode.memory[unit][pages][:, order]

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int):  # type: ignore[no-untyped-def]
        if self.variant != "read" or not self.hits(job):
            return super().keys(world, job, unit, table, rows)
        page = world.decode.layout
        raw = world.decode.memory[unit][list(table)]
        at = np.arange(rows)
        self.struck(job, range(len(table)), layers=[unit[1]])
        if self.how == "tiles":
            moved = raw[:, permutation(page, self.how)]
            return page.values(moved)[at // ROWS, at % ROWS], page.scales(moved)[at // ROWS, at % ROWS]
        both = raw.reshape(len(raw), page.rows, -1)[at // ROWS, at % ROWS]
        return both[:, : page.value_bytes].copy(), both[:, page.value_bytes :].copy()


class TruncatedCopy(Fault):
    """Pages go to a host tier whose pages are too small, and come back from it for another request."""

    code = "F08"
    stages = ("descriptor",)
    variants = ("page", "row")
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        page = layout(shape.format)
        shape.host_tier, shape.lifo, shape.shares = True, False, False
        self.short = self.rng.choice([256, page.page_bytes // 8, page.value_bytes])
        shape.host_rows = self.variant == "row"
        if shape.host_rows:  # the scales are left out, or a part of the values as well
            self.short = self.rng.choice([page.scale_bytes or 16, page.scale_bytes + 16])
        whole = -(-self.victim.rows // ROWS)
        self.parent = Job(self.victim.room + 500, self.victim.room + 500, whole * ROWS + 5)
        self.victim.parent, self.victim.prefix_rows = self.parent, whole * ROWS
        self.victim.rows = whole * ROWS + self.rng.randint(1, 2 * ROWS)
        self.truth.rooms.add(self.parent.room)  # others may load its pages back as well
        shape.prefill_pages += 2 * whole + 8
        place = self.rng.randint(2, len(crowd) // 2)
        return [*crowd[:place], self.parent, *crowd[place : place + 3], self.victim, *crowd[place + 3 :]]

    def ready(self, world: World, job: Job) -> bool:
        return job is not self.victim or world.prefills[0].agent in self.parent.over

    def keeps(self, world: World, job: Job) -> bool:
        return job is self.parent or super().keeps(world, job)

    def starting(self, world: World, job: Job) -> None:
        while job is self.victim and self.parent in world.cache:
            world.evict()

    def copied(self, world: Pages, side: Side, job: Job) -> int:
        right = super().copied(world, side, job)
        return right - self.short if job in (self.parent, self.victim) else right

    def compute(self, world: World, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        for (
            side
        ) in world.prefills:  # others may load the parent's pages back too, and more of them go on from there
            known = max(job.loaded.get(side.agent, 0), job.shared[side.agent])
            pages, layers = self.wrong(world, side, job) if known else ([], [])
            prefix = [k for k in pages if k < known]
            if prefix:
                self.struck(job, prefix, layers=layers)
        yield from super().compute(world, job, chunk)
