"""What an engine does at the places where engines go wrong. This one does right; a fault replaces some of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.accuracy import numbers
from benchmarks.accuracy.model import Rows, logits, top_k
from benchmarks.accuracy.pages import Pages
from benchmarks.accuracy.request import ROWS, Job, Part, Transfer, sliced
from benchmarks.accuracy.side import I64, U8, Side, Unit
from benchmarks.accuracy.world import World


@dataclass(slots=True)
class Truth:
    """What really went wrong. It is kept beside the trace and never in it.

    ``stages`` are the stages that ``faults.md`` allows for what was done; ``also`` are kinds that are true as well of
    what the fault did elsewhere; ``rooms`` are all rooms that it touched.
    """

    code: str
    variant: str = ""
    stages: tuple[str, ...] = ()
    room: int = -1
    attempt: int = 0
    layers: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    rooms: set[int] = field(default_factory=set)
    also: tuple[str, ...] = ()
    happened: bool = False


class Deed:
    """Right everywhere."""

    # The scheduler

    def ready(self, world: World, job: Job) -> bool:
        """Whether a request may start yet."""
        return True

    def starting(self, world: World, job: Job) -> None:
        """A request is about to get its pages."""

    def shareable(self, world: World, side: Side, job: Job, parent: Job) -> bool:
        return world.shareable(side, parent)

    def keeps(self, world: World, job: Job) -> bool:
        """Whether prefill keeps a finished request's pages for prefixes."""
        return world.shape.cache and job.rows >= ROWS and world.rng.random() < 0.7

    def abort(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from world.abort(job, pending)

    def compute(self, world: World, job: Job, chunk: tuple[int, int]) -> Iterator[None]:
        yield from world.compute(job, chunk)

    def carry(self, world: World, job: Job, chunk: tuple[int, int]) -> Any:
        return (yield from world.carry(job, chunk))

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from world.complete(job, pending)

    def decode(self, world: World, job: Job) -> Iterator[None]:
        yield from world.decoding(job)

    # Store

    def store(self, world: World, side: Side, job: Job, unit: Unit, rows: I64, found: Rows) -> tuple[U8, U8]:
        return found.values, found.scales

    def put(self, world: World, side: Side, job: Job, unit: Unit, slots: I64, values: U8, scales: U8) -> None:
        side.put_rows(unit, slots, values, scales)

    def store_stride(self, world: World, side: Side, job: Job) -> int:
        return side.pitch

    def write_mapping(self, world: World, job: Job) -> int:
        """Version of the slot translation that decode's store is given."""
        return job.mapping

    def append_slots(self, world: World, job: Job, rows: I64) -> I64:
        """Slots of rows that decode stores, and of the padding rows of the batch (slot 0 of the reserved page)."""
        slots = job.slots(world.decode, rows)
        if world.shape.padding and world.rng.random() < 0.3:
            slots = np.concatenate([slots, np.zeros(world.rng.randint(1, 3), np.int64)])
        return slots

    # Transfer

    def bundles(self, world: World, side: Side, job: Job) -> list[tuple[Unit, ...]]:
        """Buffers that go in one transfer: one bundle a component."""
        if len(world.shape.components) == 1:
            return [()]
        return [tuple(u for u in side.units if u[0] == name) for name in world.shape.components]

    def sent(self, world: World, job: Job, logical: list[int]) -> list[int]:
        return logical

    def targets(self, world: World, side: Side, job: Job, logical: Sequence[int]) -> list[int]:
        return [job.pages[world.decode.agent][k] for k in logical]

    def pairs(self, world: World, side: Side, job: Job) -> list[tuple[Unit, Unit]]:
        return [(unit, unit) for unit in side.units if unit in world.decode.units]

    def geometry(self, world: World, side: Side, job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes a page at both ends, and bytes from page to page."""
        return (side.layout.page_bytes, world.decode.layout.page_bytes), (side.pitch, world.decode.pitch)

    def cut(self, world: World, side: Side, job: Job, parts: list[Part]) -> list[Part]:
        """Descriptors of whole pages as they are posted: the side's slice of each."""
        return sliced(parts, world.slice_of(side))

    def skips(self, world: World, side: Side, job: Job) -> bool:
        """Whether a process posts nothing."""
        return False

    def drains(self, world: World, job: Job, chunk: tuple[int, int]) -> bool:
        """Whether the transfers so far are waited for before the next chunk is computed."""
        return world.rng.random() < 0.7

    def state(self, world: World, transfer: Transfer) -> str:
        """What the transport says at the end."""
        return "done"

    def land(self, world: World, transfer: Transfer) -> None:
        world.land(transfer)

    def metadata(self, world: World, job: Job) -> int:
        return job.room

    # Copies within a process

    def move(self, world: World, job: Job, source: I64, target: I64) -> int:
        """Rows move within the decode side; returns the bytes a row."""
        side = world.decode
        for unit in side.units:
            side.put_rows(unit, target, *side.rows_at(unit, source))
        return side.layout.value_bytes + side.layout.scale_bytes

    def copied(self, world: Pages, side: Side, job: Job) -> int:
        """Bytes of a page (of a row, where the host tier has rows) that go to the host tier and come back."""
        return self.host_pitch(world, side)

    def host_pitch(self, world: Pages, side: Side) -> int:
        page = side.layout
        return page.value_bytes + page.scale_bytes if world.shape.host_rows else page.page_bytes

    # Read

    def length(self, world: World, job: Job) -> int:
        return job.length

    def table(self, world: World, job: Job, pages: list[int]) -> list[int]:
        return pages

    def read_mapping(self, world: World, job: Job) -> int:
        return job.mapping

    def read_stride(self, world: World, job: Job) -> int:
        return world.decode.pitch

    def keys(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> tuple[U8, U8]:
        """Value and scale rows that the kernel loads."""
        at = np.arange(rows)
        slots = np.asarray(table, np.int64)[at // ROWS] * ROWS + at % ROWS
        return world.decode.rows_at(unit, slots)

    def tags(self, world: World, job: Job) -> str:
        return numbers.TAGS[world.shape.format]

    def scores(
        self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int, query: Any, weights: Any
    ) -> Any:
        values, scales = self.keys(world, job, unit, table, rows)
        decoded = numbers.decode(world.decode.layout, values, scales, self.tags(world, job))
        return logits(decoded, query, weights)

    def best(self, world: World, job: Job, scores: Any, k: int) -> Any:
        return top_k(scores, k)

    def kernel(self, world: World, job: Job, unit: Unit, table: Sequence[int], rows: int) -> dict[str, Any]:
        """What the read kernel was given and computed."""
        query, weights = world.model.query(job.stream, world.layer_key(unit), rows)
        scores = self.scores(world, job, unit, table, rows, query, weights)
        return {
            "k": world.shape.k,
            "kernel": "sim",
            "query": query.ravel(),
            "weights": weights,
            "logits": scores,
            "top_k": self.best(world, job, scores, world.shape.k),
            "number_format": self.tags(world, job),
        }
