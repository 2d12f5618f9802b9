"""What all faults share: a deed that goes wrong for one request (or for all), and the truth about it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.accuracy.deed import Deed, Truth
from benchmarks.accuracy.request import ROWS, Job, Shape, Transfer
from benchmarks.accuracy.side import I64, Recording, Side, Unit
from benchmarks.accuracy.world import World


class Fault(Deed):
    """One kind of fault. ``pages``: the victim's least and most pages."""

    code = ""
    stages: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("",)
    also: tuple[str, ...] = ()
    pages = (1, 200)
    with_ranks = False  #: some of its pairs have several prefill ranks, each with a slice of every page

    def __init__(self, rng: random.Random, variant: str, victim: Job) -> None:
        self.rng, self.variant, self.victim = rng, variant, victim
        self.everyone = False
        self.truth = Truth(self.code, variant, self.stages, victim.room, rooms={victim.room}, also=self.also)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        """Change the pair so that the fault can happen there; returns the requests, the victim among them."""
        return self.among(crowd, self.victim)

    def among(self, crowd: list[Job], job: Job) -> list[Job]:
        """The crowd with one more request somewhere in its middle third."""
        place = self.rng.randint(len(crowd) // 3, 2 * len(crowd) // 3)
        return [*crowd[:place], job, *crowd[place:]]

    def hits(self, job: Job) -> bool:
        return job is self.victim or (self.everyone and not job.mark)

    def struck(
        self, job: Job, pages: Sequence[int] = (), rows: Sequence[int] = (), layers: Sequence[int] = ()
    ) -> None:
        """Remember what the fault did to a request."""
        truth = self.truth
        truth.rooms.add(job.room)
        if job is self.victim:
            truth.happened = True
            truth.attempt = job.attempt
            truth.pages = tuple(sorted({*truth.pages, *map(int, pages)}))
            truth.rows = tuple(sorted({*truth.rows, *map(int, rows)}))
            truth.layers = tuple(sorted({*truth.layers, *layers}))

    def wrong(self, world: World, side: Side, job: Job) -> tuple[list[int], list[int]]:
        """Logical pages of the prompt, and layers, where memory is not what it should be."""
        pages: set[int] = set()
        layers: set[int] = set()
        rows = np.arange(job.rows)
        slots = job.slots(side, rows)
        for unit in side.units:
            if side is world.decode and not any(unit in p.units for p in world.prefills):
                continue
            right = world.model.rows(job.streams(rows), world.layer_key(unit), rows)
            values, scales = side.rows_at(unit, slots)
            bad = (values != right.values).any(1) | (scales != right.scales).any(1)
            if bad.any():
                pages |= set((rows[bad] // ROWS).tolist())
                layers.add(unit[1])
        return sorted(pages), sorted(layers)

    def check(self, world: World, job: Job, side: Side | None = None) -> None:
        """Strike a request if its bytes are wrong now."""
        pages, layers = self.wrong(world, side or world.decode, job)
        if pages:
            self.struck(job, pages, layers=layers)

    def others(self, world: World, side: Side, pages: Sequence[int], job: Job) -> None:
        """Remember whoever holds pages that a fault of ``job`` wrote to."""
        for page in set(pages):
            for other in world.owners(side, page):
                if other is not job:
                    self.truth.rooms.add(other.room)

    def advance_until(self, world: World, life: Iterator[None], arrived: Job) -> None:
        """Let another request run until it has arrived."""
        while not arrived.arrived and world.advance(life):
            pass


class ArrivesWrong(Fault):
    """A fault that, if it did anything, shows in the bytes of a request that has arrived."""

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        yield from super().complete(world, job, pending)
        if self.hits(job):
            self.check(world, job)


def landed_pages(world: World, transfer: Transfer) -> list[int]:
    """Destination pages that the descriptors of a transfer write to."""
    pages: set[int] = set()
    for _, destination, length in transfer.parts:
        for _, page, _, _, _ in world.decode._parts(destination, length):
            pages.add(page)
    return sorted(pages)


__all__ = [
    "I64",
    "ROWS",
    "ArrivesWrong",
    "Fault",
    "Job",
    "Recording",
    "Shape",
    "Side",
    "Transfer",
    "Unit",
    "World",
    "landed_pages",
]
