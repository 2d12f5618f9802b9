"""Faults of the read: tables, lengths, addresses, number formats, arithmetic and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.fault import ROWS, Fault, Job, Recording, Shape, Unit, World
from benchmarks.accuracy.model import top_k
from benchmarks.accuracy.numbers import to_bf16
from benchmarks.accuracy.side import U8


class Kernel(Fault):
    """A fault that only logits or top-k show."""

    stages = ("read-kernel",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        recording.bytes, self.victim.sampled = True, True
        return super().arrange(shape, recording, crowd)


class TornBlockTable(Fault):
    code = "F18"
    stages = ("table",)

    def table(self, world: World, job: Job, pages: list[int]) -> list[int]:
        side = world.decode
        if job is not self.victim or side.agent in job.over:
            return pages
        foreign = [
            page
            for other in world.jobs
            if other.room != job.room and not other.mark
            for page in other.pages.get(side.agent, [])
            if page not in pages
        ]
        if not foreign:
            return pages
        first = self.rng.randrange(len(pages))
        count = len(pages) - first if self.rng.random() < 0.5 else 1
        torn = list(pages)
        for k in range(first, first + count):
            torn[k] = foreign[(k * 7) % len(foreign)]
        self.struck(job, range(first, first + count))
        return torn


class LengthOffByOne(Fault):
    code = "F19"
    stages = ("table",)
    variants = ("row", "page")

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.draft, shape.moves = 0, False
        self.by = self.rng.choice([-1, 1]) * (1 if self.variant == "row" else ROWS)
        return super().arrange(shape, recording, crowd)

    def length(self, world: World, job: Job) -> int:
        if job is not self.victim or job.length + self.by < 1 or world.decode.agent in job.over:
            return job.length
        self.struck(job, [(job.length - 1) // ROWS])
        return job.length + self.by


class WrongStrideRead(Kernel):
    """The kernel's view has another stride than the pool: page p is looked for at byte p * stride."""

    code = "F20"
    variants = ("read",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.told = self.rng.random() < 0.7
        self.half = self.rng.random() < 0.4
        return super().arrange(shape, recording, crowd)

    def _stride(self, world: World) -> int:
        return world.decode.pitch * 2 if not self.half else world.decode.pitch // 2

    def read_stride(self, world: World, job: Job) -> int:
        if job is not self.victim:
            return world.decode.pitch
        return self._stride(world) if self.told else -1

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        side = world.decode
        if job is not self.victim or side.agent in job.over:
            return super().keys(world, job, unit, table, rows)
        size, stride = side.layout.page_bytes, self._stride(world)
        raw = np.stack([side.read_bytes(side.address(unit) + page * stride, size) for page in table])
        at = np.arange(rows)
        self.struck(job, range(len(table)), layers=[unit[1]])
        return side.layout.values(raw)[at // ROWS, at % ROWS], side.layout.scales(raw)[at // ROWS, at % ROWS]


class WrongStrideTable(Fault):
    """Table entries are multiplied as if the pool's pages were smaller."""

    code = "F20"
    stages = ("table",)
    variants = ("table",)
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.decode_pages = 2 * shape.decode_pages + 2
        return super().arrange(shape, recording, crowd)

    def starting(self, world: World, job: Job) -> None:
        if job is self.victim:  # a young pool: low page ids
            world.decode.free_pages.sort(reverse=world.shape.lifo)

    def table(self, world: World, job: Job, pages: list[int]) -> list[int]:
        side = world.decode
        if job is not self.victim or side.agent in job.over:
            return pages
        if any(page * 2 >= side.pages for page in pages):
            return pages
        self.struck(job, range(len(pages)))
        return [page * 2 for page in pages]


class IntegerWrap(Kernel):
    """Page offsets are computed in 32 bits: pages far into a packed slab give 0."""

    code = "F21"
    variants = ("zeros",)
    pages = (1, 60)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.pitch = self.rng.choice([1_002_240, 1_039_680, 1_077_120, 1_308_672])
        self.first_bad = (2**31 - 1) // shape.pitch + 1
        shape.decode_pages = self.first_bad + 128
        shape.layers, shape.lifo = min(2, shape.layers), True
        shape.components = ("index_k",)
        return super().arrange(shape, recording, crowd)

    def starting(self, world: World, job: Job) -> None:
        side = world.decode
        high = [p for p in side.free_pages if p >= self.first_bad]
        low = [p for p in side.free_pages if p < self.first_bad]
        if job is self.victim:
            mixed = high[-70:] + low[-30:]
            self.rng.shuffle(mixed)
            side.free_pages = high[:-70] + low[:-30] + mixed
        else:
            side.free_pages = high + low

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        values, scales = super().keys(world, job, unit, table, rows)
        lost = np.repeat(np.asarray(table) >= self.first_bad, ROWS)[:rows]
        if lost.any():
            values, scales = values.copy(), scales.copy()
            values[lost], scales[lost] = 0, 0
            bad = [k for k, page in enumerate(table) if page >= self.first_bad]
            self.struck(job, bad, layers=[unit[1]])
        return values, scales


class IntegerWrapElsewhere(IntegerWrap):
    """The offset wraps around a whole turn of 32 bits: far pages give what lies at the wrapped address."""

    variants = ("elsewhere",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        jobs = super().arrange(shape, recording, crowd)
        shape.pitch = 1 << 20  # a turn is a whole number of pages: the wrapped address is another page
        self.first_bad = (1 << 32) // shape.pitch
        shape.decode_pages = self.first_bad + 128
        jobs.remove(self.victim)
        return [*jobs, self.victim]  # once the others have used pages

    def starting(self, world: World, job: Job) -> None:
        """Everybody has low pages; the victim also far ones, whose wrapped ones have been in use."""
        side = world.decode
        used = {p for other in world.jobs for p in other.pages.get(side.agent, ())}
        low = sorted((p for p in side.free_pages if p < 128), reverse=True)
        rest = [p for p in side.free_pages if p >= 128]
        if job is self.victim:
            far = [p for p in rest if p - self.first_bad in used]
            mixed = far[:60] + low[-4:]
            self.rng.shuffle(mixed)
            side.free_pages = [p for p in rest if p not in mixed] + low[:-4] + mixed
        else:
            side.free_pages = rest + low

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        wrapped = [page % self.first_bad for page in table]
        bad = [k for k, page in enumerate(table) if page != wrapped[k]]
        if bad:
            self.struck(job, bad, layers=[unit[1]])
        return Kernel.keys(self, world, job, unit, wrapped, rows)


class TokenIndexAsPage(Kernel):
    """The gather takes the number of a row for the number of a page."""

    code = "F22"
    variants = ("token",)
    pages = (1, 1)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        super().arrange(shape, recording, [])
        self.victim.rows = max(16, self.victim.rows)
        shape.lifo = False
        self.first = self.rng.random() < 0.5
        return [*crowd, self.victim]

    def starting(self, world: World, job: Job) -> None:
        if not world.jobs:  # a young pool: the low pages come into use first
            world.decode.free_pages.sort()

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        if job is not self.victim or rows > world.decode.pages:
            return super().keys(world, job, unit, table, rows)
        at = np.arange(rows)
        self.struck(job, range(len(table)), layers=[unit[1]])
        return world.decode.rows_at(unit, at * ROWS + (0 if self.first else at % ROWS))


class TokenIndexGathered(Kernel):
    """The gather takes one row of every page for all of its rows."""

    code = "F22"
    variants = ("read",)

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        values, scales = super().keys(world, job, unit, table, rows)
        if job is not self.victim or rows < 2:
            return values, scales
        at = np.arange(rows) // ROWS * ROWS
        self.struck(job, range(len(table)), layers=[unit[1]])
        return values[at], scales[at]


class NumberFormat(Kernel):
    code = "F24"

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        choices = {
            "fp8": ["e4m3fnuz/fp32", "e4m3fn/ue8m0"],
            "bf16": ["fp16"],
            "fp4": ["e2m1/ue8m0-128"],
        }
        self.wrong_tags = self.rng.choice(choices[shape.format])
        self.told = self.rng.random() < 0.6
        self.everyone = self.rng.random() < 0.4
        if self.wrong_tags == "e4m3fn/ue8m0":
            shape.powers = False
        return super().arrange(shape, recording, crowd)

    def tags(self, world: World, job: Job) -> str:
        return self.wrong_tags if self.hits(job) else super().tags(world, job)

    def kernel(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> dict[str, Any]:
        found = super().kernel(world, job, unit, table, rows)
        if self.hits(job):
            self.struck(job, range(len(table)), layers=[unit[1]])
            if not self.told:
                found["number_format"] = ""
        return found


class KernelNumerics(Kernel):
    code = "F25"
    variants = ("tile", "query", "head")

    def scores(
        self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int, query: Any, weights: Any
    ) -> Any:
        right = super().scores(world, job, unit, table, rows, query, weights)
        if job is not self.victim:
            return right
        if self.variant == "query":
            rounded = (to_bf16(query).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
            found = super().scores(world, job, unit, table, rows, rounded.reshape(query.shape), weights)
        elif self.variant == "head":
            found = super().scores(world, job, unit, table, rows, query[:-1], weights[:-1])
        else:
            found = right.copy()
            tile = self.rng.choice([64, 128, 256])
            first = tile * ((rows - 1) // tile)
            found[first:] = (right * np.float32(1 + self.rng.choice([-1, 1]) * 2.0**-6))[first:]
        bad = np.flatnonzero(np.abs(found - right) > 1e-3 * np.abs(right) + 1e-6)
        if len(bad):
            self.struck(job, np.unique(bad // ROWS).tolist(), layers=[unit[1]])
        return found


class InvalidTopK(Kernel):
    code = "F26"
    stages = ("top-k",)
    variants = ("missing", "outside")

    def best(self, world: World, job: Job, scores: Any, k: int) -> Any:
        found = top_k(scores, k)
        if job is not self.victim:
            return found
        wanted = min(len(scores), k)
        bad = self.rng.randint(1, wanted)
        found[wanted - bad : wanted] = -1 if self.variant == "missing" else len(scores) + np.arange(bad)
        self.struck(job)
        return found


class WrongTopK(Kernel):
    """The selection compares scores by their upper bits only."""

    code = "F27"
    stages = ("top-k",)
    pages = (3, 200)

    def best(self, world: World, job: Job, scores: Any, k: int) -> Any:
        right = top_k(scores, k)
        if job is not self.victim or len(scores) <= k:
            return right
        coarse = (scores.view(np.uint32) >> np.uint32(20)).astype(np.int64)
        order = np.lexsort((scores, -coarse))[:k].astype(np.int32)
        least = np.sort(scores)[-k]
        if (scores[order] < least).any():
            self.struck(job)
        return order


class DraftedRowsRead(Fault):
    """After a rejection the length is not taken back: rejected drafts are read."""

    code = "F29"
    stages = ("table",)
    variants = ("table",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.draft, shape.moves = 4, False
        self.victim.steps = max(4, self.victim.steps)
        return super().arrange(shape, recording, crowd)

    def length(self, world: World, job: Job) -> int:
        if job is not self.victim or job.drafted <= job.length or world.decode.agent in job.over:
            return job.length
        self.struck(job, rows=range(job.length, job.drafted))
        return job.drafted
