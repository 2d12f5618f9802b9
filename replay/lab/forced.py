"""Small rounds in which a fault shows for certain: the same code paths as in the demo, with the interleaving
held by barriers.

For tests. A round has a few requests that stay (the *others*) and one or two that the fault is to hit. With
``twin`` it is the same clients on an engine without the fault, held at the same points where that can end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replay.lab.config import LabConfig
from replay.lab.faults import FAULTS
from replay.lab.rounds import CHUNK, LAYERS, ROUNDS, unheld

TOP_K = 512


@dataclass(frozen=True, slots=True)
class Forced:
    """A round, and whom its fault is meant to hit."""

    config: LabConfig
    room: int  #: the request that reads wrong bytes
    donor: int = -1  #: the request whose bytes or table it reads, -1 if it is none


def forced(
    kind: str, format_: str, seed: int, flags: Path, *, first_room: int = 7000, twin: bool = False
) -> Forced:
    """The round for fault ``kind``. ``flags`` is an empty folder for the barriers of this round alone."""
    draw = random.Random(f"{kind} {format_} {seed}")  # not for secrets
    made = ROUNDS.get(kind, unheld)(draw, first_room)
    jobs = (made.twin if twin else ()) or made.jobs
    sizes: dict[str, Any] = {"prefill_pages": 64, **made.sizes}
    config = LabConfig(
        format=format_,
        layers=LAYERS,
        requests=len(jobs),
        concurrency=len(jobs),
        seed=seed,
        fault="none" if twin else kind,
        first_room=first_room,
        decode_pages=48,
        chunk_tokens=CHUNK,
        batch_tokens=2 * CHUNK,
        wire_pages_s=4000.0,
        layer_ms=0.2,
        heads=4,
        top_k=int(FAULTS[kind].sizes.get("top_k", TOP_K)),
        triton_pages=0,
        timeout_s=60.0,
        jobs=jobs,
        flags=str(flags),
        rules=dict(made.twin_rules if twin else made.rules),
        **sizes,
    )
    return Forced(config, made.room, made.donor)


def with_transport(found: Forced, transport: str) -> Forced:
    """The same round over another transport."""
    return replace(found, config=replace(found.config, transport=transport))
