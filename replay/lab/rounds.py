"""The clients of the forced rounds, one function a fault: whom it is to hit, and what waits for what.

Each takes what it may draw from and the first room, and gives a :class:`Round`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from replay.lab.config import PAGE_TOKENS, TOKENS_PER_ROW, Job, pages_for

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


def _tokens(draw: random.Random, pages: int, least: int = 8) -> int:
    """A prompt of ``pages`` pages whose last one is not full, and has ``least`` tokens or more."""
    return (pages - 1) * PAGE_TOKENS + draw.randint(least, PAGE_TOKENS - 4)


def _others(draw: random.Random, first: int, count: int, **more: Any) -> tuple[Job, ...]:
    """Requests that stay for the whole round."""
    return tuple(
        Job(first + i, _tokens(draw, draw.randint(1, 4)), draw.randint(70, 90), **more) for i in range(count)
    )


def _chunks(job: Job) -> int:
    """Chunks of a prompt that is prefilled with others."""
    return -(-pages_for(job.tokens) // CHUNK_PAGES)


def _settled(
    draw: random.Random, first: int, *, apart: bool = False
) -> tuple[tuple[Job, ...], str, dict[str, str]]:
    """Two requests that stay, the flags that both have arrived and nothing of them is on the wire, and what holds
    them: also where success is told early, nobody reads them before they are there. ``apart``: a component follows
    the chunks.
    """
    one, two = _others(draw, first, 2)
    last = {job.room: _chunks(job) - (not apart) for job in (one, two)}
    flags = {room: f"sender.done:{room}.{last[room]}" for room in last}
    jobs = (one, replace(two, after=f"decode.arrived:{one.room}, {flags[one.room]}"))
    rules = {f"read.first:{room}.0": flag for room, flag in flags.items()}
    return jobs, f"decode.arrived:{two.room}, {flags[two.room]}", rules


def _stay(jobs: tuple[Job, ...], until: str) -> dict[str, str]:
    """Holds the last step of ``jobs``: none gives its pages back before ``until``, for somebody to be given them."""
    return {f"read.last:{job.room}.0": until for job in jobs}


def unheld(draw: random.Random, first: int) -> Round:
    """Nothing depends on timing: five requests, one of them given up by its client, the first of several
    chunks. None is read before all is sent, so what lands in the pages of another has landed by then.
    """
    jobs = (
        Job(first, _tokens(draw, draw.randint(4, 7)), draw.randint(8, 30)),
        *(Job(first + i, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 30)) for i in range(1, 4)),
        Job(first + 4, _tokens(draw, draw.randint(3, 6)), 12, abort_when=f"sender.taken:{first + 4}.0"),
    )
    sent = ", ".join(f"prefill.over:{job.room}" for job in jobs)
    return Round(jobs, {f"read.first:{job.room}.0": sent for job in jobs}, first)


def late_foreign_write(draw: random.Random, first: int) -> Round:
    """A is aborted while a sender has one of its chunks in hand and those before it have landed; B gets its pages,
    arrives, and then A's chunk is posted.
    """
    others, settled, _ = _settled(draw, first)
    a, b = first + 2, first + 3  # of different sender threads
    pages = draw.randint(4, 7)
    chunk = draw.randrange(1, -(-pages // CHUNK_PAGES))
    jobs = (
        *others,
        Job(a, _tokens(draw, pages), 8, after=settled, abort_when=f"wire.over:{a}.{chunk - 1}"),
        Job(b, _tokens(draw, pages), draw.randint(8, 24), after=f"decode.over:{a}"),
    )
    rules = {
        **_stay(others, f"decode.arrived:{b}"),
        **{f"wire.slice:{a}.{later}.0": f"wire.over:{a}.{later - 1}" for later in range(1, chunk)},
        f"wire.over:{a}.{chunk - 1}": f"sender.taken:{a}.{chunk}",
        f"sender.post:{a}.{chunk}": f"decode.arrived:{b}",
        # Once nothing of A is in a sender's hands: it may have taken up another chunk meanwhile.
        f"read.first:{b}.0": f"prefill.over:{a}",
    }
    return Round(jobs, rules, b, a)


def sent_before_written(draw: random.Random, first: int) -> Round:
    """The stream stops before a layer of one chunk until that chunk was sent; all others are sent once they are
    written.
    """
    others, settled, _ = _settled(draw, first)
    room = first + 2
    pages = draw.randint(3, 6)
    job = Job(room, _tokens(draw, pages), draw.randint(8, 24), after=settled)
    chunk = draw.randrange(_chunks(job))
    layer = draw.randrange(LAYERS)
    every = [(one.room, index) for one in (*others, job) for index in range(_chunks(one))]
    rules = {f"wire.slice:{r}.{c}.0": f"prefill.stored:{r}.{c}" for r, c in every if (r, c) != (room, chunk)}
    rules[f"forward.layer:{room}.{chunk}.{layer}"] = f"sender.done:{room}.{chunk}"
    return Round((*others, job), rules, room)


def completion_early(draw: random.Random, first: int) -> Round:
    """The wire stops within the last chunk until decode has read the request for the first time."""
    others, settled, rules = _settled(draw, first)
    room = first + 2
    pages = draw.randint(3, 6)
    job = Job(room, _tokens(draw, pages), draw.randint(60, 70), after=settled)
    layer = draw.randrange(1, LAYERS)
    rules[f"wire.slice:{room}.{_chunks(job) - 1}.{layer}"] = f"read.over:{room}"
    return Round((*others, job), rules, room)


def torn_block_table(draw: random.Random, first: int) -> Round:
    """The last step of the first request in the batch stops before a layer until the next step's table is
    filled. The other one ends alone: no step comes after it.
    """
    room, other = first, first + 1
    layer = draw.randrange(LAYERS)
    pages = draw.randint(2, 6)
    jobs = (
        Job(room, _tokens(draw, pages), draw.randint(30, 40)),
        *_others(draw, other, 1, after=f"decode.arrived:{room}"),
    )
    return Round(jobs, {f"read.last:{room}.{layer}": f"step.left:{room}"}, room)


def wrong_store_bytes(draw: random.Random, first: int) -> Round:
    """As :func:`unheld`. The last page of the first one has rows enough to be known for its own where nobody saw the
    page before: of fewer than eight nobody can be certain.
    """
    made = unheld(draw, first)
    pages = pages_for(made.jobs[0].tokens)
    one = replace(made.jobs[0], tokens=_tokens(draw, pages, 16 * TOKENS_PER_ROW))
    return replace(made, jobs=(one, *made.jobs[1:]))


def wrong_page_id_space(draw: random.Random, first: int) -> Round:
    """As :func:`unheld`. With a small pool the sender's ids are pages that decode has given to nobody; with a larger
    one some are other requests' pages, or others of the same request.
    """
    return replace(unheld(draw, first), sizes={"prefill_pages": draw.choice((16, 40, 44))})


def source_overwritten(draw: random.Random, first: int) -> Round:
    """The wire stops before a layer of A's last chunk until B, which was given A's pages, has stored into them; B waits
    for what goes before that layer.
    """
    others, settled, _ = _settled(draw, first)
    a, b = first + 2, first + 3
    pages = draw.randint(3, 7)
    jobs = (
        *others,
        Job(a, _tokens(draw, pages), draw.randint(8, 24), after=settled),
        Job(b, _tokens(draw, pages), draw.randint(8, 24), after=f"prefill.over:{a}"),
    )
    chunk, layer = _chunks(jobs[-1]) - 1, draw.randrange(LAYERS)
    rules = {f"wire.slice:{a}.{chunk}.{layer}": f"prefill.stored:{b}.{chunk}"}
    before = [f"wire.over:{a}.{earlier}" for earlier in range(chunk)]
    before += [f"wire.done:{a}.{chunk}.{lower}" for lower in range(layer)]
    if before:
        rules[f"forward.layer:{b}.0.0"] = ", ".join(before)
    # A right engine keeps A's pages until they are sent: B comes all the same, and gets others.
    twin = (*jobs[:-1], replace(jobs[-1], after=f"sender.post:{a}.{chunk}"))
    return Round(jobs, rules, a, b, twin=twin, twin_rules=rules)


def component_late(draw: random.Random, first: int) -> Round:
    """The wire stops before the component until decode has read the request for the first time."""
    others, settled, rules = _settled(draw, first, apart=True)
    room = first + 2
    job = Job(room, _tokens(draw, draw.randint(1, 6)), draw.randint(60, 70), after=settled)
    component = _chunks(job)
    held = f"wire.slice:{room}.{component}.0"
    apart = draw.randint(1, LAYERS - 1)
    # A right engine reads the component no sooner than it is there.
    twin_rules = {**rules, held: f"sender.done:{room}.{component - 1}"}
    rules = {**rules, held: f"read.over:{room}"}
    return Round((*others, job), rules, room, sizes={"apart": apart}, twin_rules=twin_rules)


def failed_transfer_used(draw: random.Random, first: int) -> Round:
    """The sender loses its peer while it posts one chunk of one request."""
    others, settled, _ = _settled(draw, first)
    room = first + 2
    job = Job(room, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 24), after=settled)
    job = replace(job, outage=draw.randrange(_chunks(job)))
    return Round((*others, job), {}, room)


def local_clear(draw: random.Random, first: int) -> Round:
    """As :func:`unheld`: the last page of every prompt there is not full."""
    return replace(unheld(draw, first), sizes={"clears": True})


def freed_page_referenced(draw: random.Random, first: int) -> Round:
    """C shares A's first pages; A ends, D gets them and arrives; then C reads for the first time."""
    others, settled, _ = _settled(draw, first)
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
        # They begin with A, which is over long before them.
        **{f"read.first:{job.room}.0": f"decode.arrived:{a}" for job in others},
        **_stay(others, f"decode.arrived:{d}"),
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
    others, settled, _ = _settled(draw, first)
    a, b = first + 2, first + 3  # of different sender threads
    jobs = (
        *others,
        Job(a, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 24), after=settled),
        Job(b, _tokens(draw, draw.randint(1, 6)), draw.randint(8, 24), after=f"metadata.freed:{a}"),
    )
    chunk = _chunks(jobs[-2]) - 1
    rules = {f"wire.slice:{a}.{chunk}.{LAYERS}": f"metadata.written:{b}"}
    # A right engine keeps A's slot until it is sent: B comes all the same, and gets another.
    twin = (*jobs[:-1], replace(jobs[-1], after=f"sender.post:{a}.{chunk}"))
    return Round(jobs, rules, a, b, sizes={"metadata_slots": 8}, twin=twin, twin_rules=rules)


#: Fault -> its round; all others are :func:`unheld`.
ROUNDS: dict[str, Callable[[random.Random, int], Round]] = {
    "late-foreign-write": late_foreign_write,
    "sent-before-written": sent_before_written,
    "completion-early": completion_early,
    "torn-block-table": torn_block_table,
    "wrong-store-bytes": wrong_store_bytes,
    "wrong-page-id-space": wrong_page_id_space,
    "source-overwritten": source_overwritten,
    "component-late": component_late,
    "failed-transfer-used": failed_transfer_used,
    "local-clear": local_clear,
    "freed-page-referenced": freed_page_referenced,
    "padding-row-written": padding_row_written,
    "metadata-mix-up": metadata_mix_up,
}
