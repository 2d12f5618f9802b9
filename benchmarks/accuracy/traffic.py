"""Which requests come, in what order, of what size."""

from __future__ import annotations

import math
import random

from benchmarks.accuracy.request import ROWS, Job, Shape


def pages_of_size(rng: random.Random, low: int = 1, high: int = 200) -> int:
    """Log-uniform, as lengths of real prompts are."""
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high + 0.49))))))


def rows_of(rng: random.Random, pages: int) -> int:
    """A length that needs this many pages; often not a whole number of them."""
    return pages * ROWS if rng.random() < 0.2 else (pages - 1) * ROWS + rng.randint(1, ROWS)


def crowd(
    rng: random.Random,
    count: int,
    *,
    first_room: int,
    high: int = 4,
    sampled: float = 0.2,
    aborts: float = 0.12,
) -> list[Job]:
    """Requests of all sorts: shared prefixes, aborts with and without retry, overshoot steps, warm-up requests."""
    jobs: list[Job] = []
    for number in range(count):
        room = first_room + number
        if rng.random() < 0.03:
            jobs.append(Job(room, room, rng.randint(1, ROWS), mark=rng.choice(["warmup", "health"])))
            continue
        job = Job(room, room, rows_of(rng, pages_of_size(rng, 1, high)), steps=rng.randint(1, 4))
        job.sampled = rng.random() < sampled
        job.overshoot = rng.random() < 0.2
        if rng.random() < 0.4:
            job.again = rng.choice([rng.randint(1, ROWS), rng.randint(1, 2 * ROWS)])
        elif rng.random() < aborts:
            job.abort_at = rng.choice(["announced", "computed", "posted"])
            job.retries = rng.randint(0, 1)
        jobs.append(job)
    return jobs


def shape_of(rng: random.Random, format: str, *, crowd_pages: int = 40, room_for: int = 0) -> Shape:
    """A random pair with room for a crowd and one request of ``room_for`` pages beside it."""
    shape = Shape(format=format, layers=rng.choice([1, 2, 2, 3]))
    if rng.random() < 0.25 and shape.layers > 1:
        shape.stages = 2
    shape.prefill_only = int(rng.random() < 0.15)
    shape.decode_only = int(rng.random() < 0.15)
    if rng.random() < 0.2 and shape.layers < 3:
        shape.components = ("index_k", "compressed_kv")
    shape.powers = rng.random() < 0.5
    shape.shares = rng.random() < 0.3
    shape.host_tier = rng.random() < 0.4
    shape.draft = rng.choice([0, 0, 0, 3])
    shape.moves = bool(shape.draft) and rng.random() < 0.5
    shape.mapping = rng.random() < 0.4
    shape.metadata = rng.random() < 0.8
    shape.padding = rng.random() < 0.7
    shape.lifo = rng.random() < 0.6
    shape.chunk_pages = rng.choice([1, 2, 4, 16])
    shape.prefill_pages = crowd_pages + 2 * room_for + rng.randrange(24)
    shape.decode_pages = crowd_pages + room_for + 4 + rng.randrange(24)
    return shape
