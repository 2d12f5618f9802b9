"""One trace with one fault in it: written from (kind, variant, format, seed) alone."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.accuracy.deed import Deed, Truth
from benchmarks.accuracy.fault import Fault
from benchmarks.accuracy.faults import FAULTS, variants
from benchmarks.accuracy.request import Job
from benchmarks.accuracy.side import Recording
from benchmarks.accuracy.traffic import crowd, pages_of_size, rows_of, shape_of
from benchmarks.accuracy.world import World
from replay.trace.builder import TraceBuilder

#: How often another draw is tried where a fault found no occasion to happen.
TRIES = 40


def variant_of(code: str, seed: int) -> str:
    """Variants take turns."""
    known = variants(code)
    return known[seed % len(known)]


def write(path: Path, code: str, variant: str, format: str, seed: int, *, twin: bool = False) -> Truth:
    """Write the trace of a case and return what really happened; with ``twin`` the same pair without the fault.

    Raises ``RuntimeError`` where the fault cannot be made to happen.
    """
    for attempt in range(TRIES):
        rng = random.Random(f"{code}.{variant}.{format}.{seed}.{attempt}")
        kind = FAULTS[(code, variant)]
        pages = pages_of_size(rng, *kind.pages)
        room = rng.randrange(3000, 9000)
        victim = Job(room, room, rows_of(rng, pages), steps=rng.randint(2, 4), sampled=rng.random() < 0.3)
        recording = Recording(bytes=rng.random() < 0.7, threads=rng.random() < 0.4)
        shape = shape_of(rng, format, room_for=pages)
        if kind.with_ranks and seed % 4 == 3:
            shape.ranks, shape.slices = 2, rng.choice(["range", "row"])
        shape.chunk_pages = max(shape.chunk_pages, -(-pages // 6))
        requests = crowd(rng, rng.randint(10, 30), first_room=room + 1000)
        fault: Fault = kind(rng, variant, victim)
        requests = fault.arrange(shape, recording, requests)
        deed: Deed = Deed() if twin else fault
        with TraceBuilder(path, replace=True) as builder:
            world = World(builder, rng.randrange(1 << 30), shape, recording, deed)
            world.play(requests, rng.randint(2, 8))
            world.close()
        if fault.truth.happened or twin:
            for job in world.jobs:  # whoever goes on from a text that was hit has its pages
                if job.parent is not None and job.parent.room in fault.truth.rooms:
                    fault.truth.rooms.add(job.room)
            return fault.truth
    raise RuntimeError(f"{code} {variant} {format} seed {seed}: the fault never happened")
