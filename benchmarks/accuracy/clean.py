"""Traces of pairs in which nothing is wrong, though much looks like it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.deed import Deed
from benchmarks.accuracy.side import Recording
from benchmarks.accuracy.traffic import crowd, shape_of
from benchmarks.accuracy.world import World
from replay.trace.builder import TraceBuilder

FORMATS = ("fp8", "bf16", "fp4")


@dataclass(frozen=True, slots=True)
class Clean:
    """What a clean trace has in it."""

    requests: int
    lossy: bool


def write(path: Path, seed: int, requests: int) -> Clean:
    """A fault-free trace of so many requests; every third one lost some of its records."""
    rng = random.Random(f"clean.{seed}")
    ranks = 2 if rng.random() < 0.15 else 1
    lossy = seed % 3 == 2
    recording = Recording(bytes=rng.random() < 0.5, threads=rng.random() < 0.4)
    if lossy:
        recording.loss = rng.choice([0.001, 0.01, 0.05])
    high = rng.choice([2, 4, 8])
    # Not in step with the losses: each format comes with and without them.
    format = FORMATS[(seed + seed // 3) % len(FORMATS)]
    shape = shape_of(rng, format, crowd_pages=14 * high + 16)
    if seed // 3 % 2:  # again not in step with the losses
        shape.ranks, shape.slices = rng.choice([1, 2, 2, 4]), rng.choice(["range", "row"])
        shape.host_rows, shape.retracts, shape.trims = (rng.random() < 0.6 for _ in range(3))
    with TraceBuilder(path, replace=True) as builder:
        clock = [rng.randrange(10**9)]
        worlds = [
            World(builder, seed, shape, recording, Deed(), rank=rank, clock=clock) for rank in range(ranks)
        ]
        going = [
            world.playing(
                crowd(rng, requests // ranks, first_room=7000 + 100_000 * rank, high=high, sampled=0.1),
                rng.randint(1, 12),
            )
            for rank, world in enumerate(worlds)
        ]
        while going:
            chosen = rng.choice(going)
            if next(chosen, "over") == "over":
                going.remove(chosen)
        for world in worlds:
            world.close()
    return Clean(requests // ranks * ranks, lossy)
