"""What a run of the lab is made of: sizes, load and the engine's policy.

The same configuration goes to both processes as JSON over their control connection, never through the
environment, so that nothing of it reaches a trace.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from capture_hooks.layouts import Layout, layout

PAGE_TOKENS = 256
TOKENS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One client: a prompt, the length of its reply, and how long the client is willing to wait.

    ``after`` and ``abort_when`` name barrier flags (``barriers.py``); they are used by tests only.
    """

    room: int
    tokens: int
    new_tokens: int
    patience_ms: float | None = None  #: the client goes away this long after it asked; ``None`` = it waits
    after: str = ""  #: ask only once this flag is up
    abort_when: str = ""  #: go away once this flag is up
    prefix_of: int = -1  #: room of an earlier request whose prompt begins alike, -1 if there is none
    prefix_pages: int = 0  #: whole pages that are alike
    outage: int = -1  #: chunk while whose transfer is posted the sender has lost its peer, -1 if none


@dataclass(frozen=True, slots=True)
class LabConfig:
    """One round of the lab. Sizes in pages are per layer; a page is 256 tokens = 64 rows."""

    format: str = "fp8"
    layers: int = 4
    requests: int = 96
    concurrency: int = 60
    seed: int = 0
    fault: str = "none"
    transport: str = "auto"  #: "nixl", "tcp", or "auto": NIXL where it can be imported
    first_room: int = 7000
    prefill_pages: int = 640
    decode_pages: int = 240
    tokens: tuple[int, int] = (260, 1000)  #: shortest and longest of the short prompts
    long_tokens: tuple[int, int] = (2400, 4000)  #: shortest and longest of the long prompts
    long_share: float = 0.3
    new_tokens: tuple[int, int] = (16, 48)  #: shortest and longest reply
    chunk_tokens: int = 1024  #: longest piece of a prompt that one forward batch takes
    batch_tokens: int = 2048  #: tokens of one forward batch
    launch_ahead: int = 8  #: forward batches that may wait on the stream
    senders: int = 2
    wire_pages_s: float = 60.0  #: bandwidth of the wire, in pages of all layers a second
    window: int = 1 << 18  #: bytes that the transport keeps in flight
    free_list: str = "lifo"
    heads: int = 8
    top_k: int = 512
    impatient: float = 0.5  #: share of clients that may go away
    patience_ms: tuple[float, float] = (300.0, 3000.0)
    layer_ms: float = 1.0  #: stand-in for the rest of a layer's work, per layer and forward batch
    apart: int = 0  #: last layers that go as a component of their own, behind the last chunk
    clears: bool = False  #: decode clears the pages for a reply before its first step
    pads: int = 0  #: stores of decode are padded to a multiple of so many rows; 0 = not at all
    prefixes: float = 0.0  #: share of clients whose prompt begins like that of an earlier one
    outages: float = 0.0  #: share of clients during whose transfer the sender loses its peer for a moment
    metadata_slots: int = 0  #: slots on each side for what is sent beside the pages; 0 = nothing is
    triton_pages: int = 2  #: pages whose store and read run as Triton kernels on the interpreter
    timeout_s: float = 120.0
    jobs: tuple[Job, ...] = ()  #: the clients; empty = drawn from the seed
    flags: str = ""  #: folder of the barrier flags; empty = no barriers
    rules: dict[str, str] = field(default_factory=dict)  #: barrier name -> flag it waits for
    audit: str = ""  #: folder for the lab's own record of what truly happened; empty = none

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work."""
        layout(self.format)
        if min(self.layers, self.requests, self.concurrency, self.senders, self.launch_ahead, self.heads) < 1:
            raise ValueError(
                "layers, requests, concurrency, senders, launch_ahead and heads must be at least 1"
            )
        if self.free_list not in ("lifo", "fifo"):
            raise ValueError(f"free_list must be lifo or fifo, not {self.free_list!r}")
        if self.transport not in ("auto", "nixl", "tcp"):
            raise ValueError(f"transport must be auto, nixl or tcp, not {self.transport!r}")
        if self.chunk_tokens % PAGE_TOKENS or self.chunk_tokens <= 0:
            raise ValueError(f"chunk_tokens must be a multiple of {PAGE_TOKENS}")
        if not 0 <= self.apart < self.layers:
            raise ValueError("apart must be less than layers: something has to go with the chunks")
        for job in self.clients():
            need = pages_for(job.tokens + job.new_tokens)
            if need > min(self.prefill_pages, self.decode_pages) - 1:
                raise ValueError(f"room {job.room} needs {need} pages; the pools are too small")
            if job.tokens < TOKENS_PER_ROW or job.new_tokens < 1:
                raise ValueError(
                    f"room {job.room}: a prompt has at least {TOKENS_PER_ROW} tokens, a reply one"
                )

    @property
    def layout(self) -> Layout:
        """The page format of all layers."""
        return layout(self.format)

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the wire in bytes a second; it goes with the format, so that loads compare."""
        return self.wire_pages_s * self.layers * self.layout.page_bytes

    def clients(self) -> tuple[Job, ...]:
        """The jobs, drawn from the seed where none are given."""
        if self.jobs:
            return self.jobs
        draw = random.Random(f"clients {self.seed}")  # not for secrets
        jobs = []
        for i in range(self.requests):
            tokens = draw.randint(*(self.long_tokens if draw.random() < self.long_share else self.tokens))
            new_tokens = draw.randint(*self.new_tokens)
            leaves = draw.random() < self.impatient
            patience = draw.uniform(*self.patience_ms)
            jobs.append(Job(self.first_room + i, tokens, new_tokens, patience if leaves else None))
        return tuple(self._with_extras(jobs))

    def _with_extras(self, jobs: list[Job]) -> Iterator[Job]:
        """The jobs with prefixes and outages, from draws of their own: the clients stay the same."""
        draw = random.Random(f"extras {self.seed}")  # not for secrets
        for i, job in enumerate(jobs):
            alike, lost = draw.random() < self.prefixes, draw.random() < self.outages
            first = jobs[i - i % 12]  # those after it may begin like it
            pages = min(first.tokens, job.tokens - 1) // PAGE_TOKENS
            if alike and pages and first is not job:
                job = replace(job, prefix_of=first.room, prefix_pages=pages)
            yield replace(job, outage=0) if lost else job

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> LabConfig:
        """The inverse of :meth:`to_json`."""
        pairs = {name: tuple(body[name]) for name in ("tokens", "long_tokens", "new_tokens", "patience_ms")}
        return cls(**{**body, **pairs, "jobs": tuple(Job(**job) for job in body["jobs"])})


def pages_for(tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // PAGE_TOKENS)


def rows_for(tokens: int) -> int:
    """Complete rows of ``tokens`` tokens; the remainder has no row yet."""
    return tokens // TOKENS_PER_ROW
