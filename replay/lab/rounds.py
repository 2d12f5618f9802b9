"""The clients of the forced rounds, one function a fault: whom it is to hit, and what waits for what.

Each takes what it may draw from and the first room, and gives a :class:`Round`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from replay.lab.config import PAGE_TOKENS, Job

LAYERS = 3
CHUNK = 512
#: Pages of one chunk.
CHUNK_PAGES = CHUNK // PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Round:
    """Clients, what holds them, and whom the fault hits.

    ``twin`` are the clients and ``twin_rules`` what holds them on an engine without the fault: where a right engine
    would wait for itself for ever, something else lets it go.
    """

    jobs: tuple[Job, ...]
    rules: Mapping[str, str]
    room: int  #: the request that reads wrong bytes
    donor: int = -1  #: the request whose bytes or table it reads, -1 if it is none
    sizes: Mapping[str, Any] = field(default_factory=dict)  #: fields of ``LabConfig``
    twin: tuple[Job, ...] = ()  #: empty = the same
    twin_rules: Mapping[str, str] = field(default_factory=dict)


def _tokens(draw: random.Random, pages: int) -> int:
    """A prompt of ``pages`` pages whose last one is not full."""
    return (pages - 1) * PAGE_TOKENS + draw.randint(8, PAGE_TOKENS - 4)


def _others(draw: random.Random, first: int, count: int, **more: Any) -> tuple[Job, ...]:
    """Requests that stay for the whole round."""
    return tuple(
        Job(first + i, _tokens(draw, draw.randint(1, 4)), draw.randint(70, 90), **more) for i in range(count)
    )


def unheld(draw: random.Random, first: int) -> Round:
    """Nothing depends on timing: five requests, one of them given up by its client, the first of several
    chunks.
    """
    jobs = (
        Job(first, _tokens(draw, draw.randint(4, 7)), draw.randint(8, 30)),
        *(Job(first + i, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 30)) for i in range(1, 4)),
        Job(first + 4, _tokens(draw, draw.randint(3, 6)), 12, abort_when=f"sender.taken:{first + 4}.0"),
    )
    return Round(jobs, {}, first)


def late_foreign_write(draw: random.Random, first: int) -> Round:
    """A is aborted while a sender has one of its chunks in hand and those before it have landed; B gets its pages,
    arrives, and then A's chunk is posted.
    """
    others = _others(draw, first, 2)
    a, b = first + 2, first + 3  # of different sender threads
    pages = draw.randint(4, 7)
    chunk = draw.randrange(1, -(-pages // 2))
    last = others[-1].room
    jobs = (
        *others,
        Job(
            a,
            _tokens(draw, pages),
            8,
            after=f"decode.arrived:{last}",
            abort_when=f"wire.over:{a}.{chunk - 1}",
        ),
        Job(b, _tokens(draw, pages), draw.randint(8, 24), after=f"decode.over:{a}"),
    )
    rules = {
        **{f"wire.slice:{a}.{later}.0": f"wire.over:{a}.{later - 1}" for later in range(1, chunk)},
        f"wire.over:{a}.{chunk - 1}": f"sender.taken:{a}.{chunk}",
        f"sender.post:{a}.{chunk}": f"decode.arrived:{b}",
        f"read.first:{b}.0": f"sender.done:{a}.{chunk}",
    }
    return Round(jobs, rules, b, a)


def sent_before_written(draw: random.Random, first: int) -> Round:
    """The stream stops before a layer of one chunk until that chunk was sent."""
    others = _others(draw, first, 2)
    room = first + 2
    pages = draw.randint(3, 6)
    chunk = draw.randrange(-(-pages // 2))
    layer = draw.randrange(LAYERS)
    job = Job(room, _tokens(draw, pages), draw.randint(8, 24), after=f"decode.arrived:{others[-1].room}")
    return Round(
        (*others, job), {f"forward.layer:{room}.{chunk}.{layer}": f"sender.done:{room}.{chunk}"}, room
    )


def completion_early(draw: random.Random, first: int) -> Round:
    """The wire stops within the last chunk until decode has read the request for the first time."""
    others = _others(draw, first, 2)
    room = first + 2
    pages = draw.randint(3, 6)
    chunk = -(-pages // 2) - 1
    layer = draw.randrange(1, LAYERS)
    job = Job(room, _tokens(draw, pages), draw.randint(60, 70), after=f"decode.arrived:{others[-1].room}")
    return Round((*others, job), {f"wire.slice:{room}.{chunk}.{layer}": f"read.over:{room}"}, room)


def torn_block_table(draw: random.Random, first: int) -> Round:
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
    return Round(jobs, {f"read.last:{room}.{layer}": f"step.left:{room}"}, room)


def _settled(draw: random.Random, first: int) -> tuple[tuple[Job, ...], str]:
    """Two requests that stay, and the flag that both have arrived."""
    one, two = _others(draw, first, 2)
    return (one, replace(two, after=f"decode.arrived:{one.room}")), f"decode.arrived:{two.room}"


def wrong_page_id_space(draw: random.Random, first: int) -> Round:
    """Nothing is held. With a small pool the sender's ids are pages that decode has given to nobody; with a larger one
    some are other requests' pages, or others of the same request.
    """
    return replace(unheld(draw, first), sizes={"prefill_pages": draw.choice((16, 40, 44))})


def source_overwritten(draw: random.Random, first: int) -> Round:
    """The wire stops before a layer of A's last chunk until B, which was given A's pages, has stored into them."""
    others, settled = _settled(draw, first)
    a, b = first + 2, first + 3
    pages = draw.randint(3, 7)
    chunk = -(-pages // CHUNK_PAGES) - 1
    jobs = (
        *others,
        Job(a, _tokens(draw, pages), draw.randint(8, 24), after=settled),
        Job(b, _tokens(draw, pages), draw.randint(8, 24), after=f"prefill.over:{a}"),
    )
    rules = {f"wire.slice:{a}.{chunk}.{draw.randrange(LAYERS)}": f"prefill.stored:{b}.{chunk}"}
    # A right engine keeps A's pages until they are sent: B comes all the same, and gets others.
    twin = (*jobs[:-1], replace(jobs[-1], after=f"sender.post:{a}.{chunk}"))
    return Round(jobs, rules, a, b, twin=twin, twin_rules=rules)


def component_late(draw: random.Random, first: int) -> Round:
    """The wire stops before the component until decode has read the request for the first time."""
    others, settled = _settled(draw, first)
    room = first + 2
    pages = draw.randint(1, 6)
    component = -(-pages // CHUNK_PAGES)
    job = Job(room, _tokens(draw, pages), draw.randint(60, 70), after=settled)
    held = f"wire.slice:{room}.{component}.0"
    apart = draw.randint(1, LAYERS - 1)
    # A right engine reads the component no sooner than it is there.
    twin_rules = {held: f"sender.done:{room}.{component - 1}"}
    rules = {held: f"read.over:{room}"}
    return Round((*others, job), rules, room, sizes={"apart": apart}, twin_rules=twin_rules)


def failed_transfer_used(draw: random.Random, first: int) -> Round:
    """The sender loses its peer while it posts one chunk of one request."""
    others, settled = _settled(draw, first)
    room = first + 2
    pages = draw.randint(1, 6)
    chunk = draw.randrange(-(-pages // CHUNK_PAGES))
    job = Job(room, _tokens(draw, pages), draw.randint(8, 24), after=settled, outage=chunk)
    return Round((*others, job), {}, room)


def local_clear(draw: random.Random, first: int) -> Round:
    """Nothing is held: the last page of every prompt here is not full."""
    return replace(unheld(draw, first), sizes={"clears": True})


def freed_page_referenced(draw: random.Random, first: int) -> Round:
    """C shares A's first pages; A ends, D gets them and arrives; then C reads for the first time."""
    others, settled = _settled(draw, first)
    a, c, d = first + 2, first + 3, first + 4
    pages, alike = draw.randint(3, 6), draw.randint(1, 2)
    jobs = (
        *others,
        Job(a, _tokens(draw, pages), 8, after=settled),
        Job(
            c, _tokens(draw, alike + draw.randint(1, 3)), draw.randint(8, 24), after=f"decode.arrived:{a}",
            prefix_of=a, prefix_pages=alike,
        ),
        Job(d, _tokens(draw, pages), draw.randint(30, 40), after=f"decode.over:{a}"),
    )  # fmt: skip
    rules = {
        f"read.last:{a}.0": f"decode.shared:{c}",
        f"sender.post:{c}.0": f"decode.over:{a}",
        f"read.first:{c}.0": f"decode.arrived:{d}",
    }
    return Round(jobs, rules, c, d, twin_rules=rules)


def padding_row_written(draw: random.Random, first: int) -> Round:
    """The first request is given the last page of the pool, and its first step stores one row and seven of padding."""
    tokens = _tokens(draw, draw.randint(2, 5)) // 4 * 4 + 3  # with its first token it has a row more
    room = first
    # Until it has arrived nobody stores anything at decode: its pages are seen right once.
    others = _others(draw, first + 1, 2, after=f"decode.arrived:{room}")
    return Round((Job(room, tokens, draw.randint(16, 30)), *others), {}, room, sizes={"pads": 8})


def metadata_mix_up(draw: random.Random, first: int) -> Round:
    """The wire stops before A's metadata until B, which was given A's slot, has filled it."""
    others, settled = _settled(draw, first)
    a, b = first + 2, first + 3  # of different sender threads
    pages = draw.randint(1, 6)
    chunk = -(-pages // CHUNK_PAGES) - 1
    jobs = (
        *others,
        Job(a, _tokens(draw, pages), draw.randint(8, 24), after=settled),
        Job(b, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 24), after=f"sender.post:{a}.{chunk}"),
    )
    rules = {f"wire.slice:{a}.{chunk}.{LAYERS}": f"metadata.written:{b}"}
    return Round(jobs, rules, a, b, sizes={"metadata_slots": 8}, twin_rules=rules)


#: Fault -> its round; all others are :func:`unheld`.
ROUNDS: dict[str, Callable[[random.Random, int], Round]] = {
    "late-foreign-write": late_foreign_write,
    "sent-before-written": sent_before_written,
    "completion-early": completion_early,
    "torn-block-table": torn_block_table,
    "wrong-page-id-space": wrong_page_id_space,
    "source-overwritten": source_overwritten,
    "component-late": component_late,
    "failed-transfer-used": failed_transfer_used,
    "local-clear": local_clear,
    "freed-page-referenced": freed_page_referenced,
    "padding-row-written": padding_row_written,
    "metadata-mix-up": metadata_mix_up,
}
