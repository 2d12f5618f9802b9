"""Small rounds in which a fault shows for certain: the same code paths as in the demo, with the interleaving
held by barriers.

For tests. A round has a few requests that stay (the *others*) and one or two that the fault is to hit. With
``twin`` it is the same clients on an engine without the fault, and nothing is held.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replay.lab.config import PAGE_TOKENS, Job, LabConfig
from replay.lab.faults import FAULTS

LAYERS = 3
CHUNK = 512
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
    rounds = {
        "late-foreign-write": _late_foreign_write,
        "sent-before-written": _sent_before_written,
        "completion-early": _completion_early,
        "torn-block-table": _torn_block_table,
    }
    jobs, rules, room, donor = rounds.get(kind, _unheld)(draw, first_room)
    config = LabConfig(
        format=format_,
        layers=LAYERS,
        requests=len(jobs),
        concurrency=len(jobs),
        seed=seed,
        fault="none" if twin else kind,
        first_room=first_room,
        prefill_pages=64,
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
        rules={} if twin else rules,
    )
    return Forced(config, room, donor)


Round = tuple[tuple[Job, ...], dict[str, str], int, int]


def _tokens(draw: random.Random, pages: int) -> int:
    """A prompt of ``pages`` pages whose last one is not full."""
    return (pages - 1) * PAGE_TOKENS + draw.randint(8, PAGE_TOKENS - 4)


def _others(draw: random.Random, first: int, count: int, **more: Any) -> tuple[Job, ...]:
    """Requests that stay for the whole round."""
    return tuple(
        Job(first + i, _tokens(draw, draw.randint(1, 4)), draw.randint(70, 90), **more) for i in range(count)
    )


def _unheld(draw: random.Random, first: int) -> Round:
    """Nothing depends on timing: five requests, one of them given up by its client, the first of several
    chunks.
    """
    jobs = (
        Job(first, _tokens(draw, draw.randint(4, 7)), draw.randint(8, 30)),
        *(Job(first + i, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 30)) for i in range(1, 4)),
        Job(first + 4, _tokens(draw, draw.randint(3, 6)), 12, abort_when=f"sender.taken:{first + 4}.0"),
    )
    return jobs, {}, first, -1


def _late_foreign_write(draw: random.Random, first: int) -> Round:
    """A is aborted while a sender has one of its chunks in hand; B gets its pages, arrives, and then A's chunk
    is posted.
    """
    others = _others(draw, first, 2)
    a, b = first + 2, first + 3  # of different sender threads
    pages = draw.randint(4, 7)
    chunk = draw.randrange(1, -(-pages // 2))
    last = others[-1].room
    jobs = (
        *others,
        Job(
            a, _tokens(draw, pages), 8, after=f"decode.arrived:{last}", abort_when=f"sender.taken:{a}.{chunk}"
        ),
        Job(b, _tokens(draw, pages), draw.randint(8, 24), after=f"decode.over:{a}"),
    )
    rules = {
        f"sender.post:{a}.{chunk}": f"decode.arrived:{b}",
        f"read.first:{b}.0": f"sender.done:{a}.{chunk}",
    }
    return jobs, rules, b, a


def _sent_before_written(draw: random.Random, first: int) -> Round:
    """The stream stops before a layer of one chunk until that chunk was sent."""
    others = _others(draw, first, 2)
    room = first + 2
    pages = draw.randint(3, 6)
    chunk = draw.randrange(-(-pages // 2))
    layer = draw.randrange(LAYERS)
    job = Job(room, _tokens(draw, pages), draw.randint(8, 24), after=f"decode.arrived:{others[-1].room}")
    return (*others, job), {f"forward.layer:{room}.{chunk}.{layer}": f"sender.done:{room}.{chunk}"}, room, -1


def _completion_early(draw: random.Random, first: int) -> Round:
    """The wire stops within the last chunk until decode has read the request for the first time."""
    others = _others(draw, first, 2)
    room = first + 2
    pages = draw.randint(3, 6)
    chunk = -(-pages // 2) - 1
    layer = draw.randrange(1, LAYERS)
    job = Job(room, _tokens(draw, pages), draw.randint(60, 70), after=f"decode.arrived:{others[-1].room}")
    return (*others, job), {f"wire.slice:{room}.{chunk}.{layer}": f"read.over:{room}"}, room, -1


def _torn_block_table(draw: random.Random, first: int) -> Round:
    """The last step of the first request in the batch stops before a layer until the next step's table is
    filled.
    """
    room, other = first, first + 1
    layer = draw.randrange(LAYERS)
    pages = draw.randint(2, 6)
    jobs = (
        Job(room, _tokens(draw, pages), draw.randint(30, 40)),
        *_others(draw, other, 2, after=f"decode.arrived:{room}"),
    )
    return jobs, {f"read.last:{room}.{layer}": f"step.left:{room}"}, room, -1


def with_transport(found: Forced, transport: str) -> Forced:
    """The same round over another transport."""
    return replace(found, config=replace(found.config, transport=transport))
