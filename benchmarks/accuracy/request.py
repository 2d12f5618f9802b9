"""Requests of the simulated pair, what kind of pair it is, and its transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.accuracy.side import I64, Side

ROWS = 64

#: One descriptor: source address, destination address, length.
Part = tuple[int, int, int]


@dataclass(slots=True)
class Shape:
    """What kind of pair it is."""

    format: str = "fp8"
    layers: int = 2
    components: tuple[str, ...] = ("index_k",)
    stages: int = 1  #: prefill processes, each with its share of the layers
    ranks: int = 1  #: prefill processes a stage; each has all rows and sends its slice of every page
    slices: str = "range"  #: what a slice is: a "range" of the page's bytes, or a part of each "row"
    prefill_only: int = 0  #: layers that only the prefill side has (a draft layer)
    decode_only: int = 0
    prefill_pages: int = 64
    decode_pages: int = 64
    pitch: int = 0  #: of the decode side; 0 = the page
    powers: bool = False
    shares: bool = False  #: decode shares the pages of a prefix
    host_tier: bool = False
    host_rows: bool = False  #: pages go to the host tier row by row
    retracts: bool = False  #: decode gives up running requests for a while, their pages in the host tier
    trims: bool = False  #: decode gives a page back that only rejected drafts had needed
    cache: bool = True  #: prefill keeps pages of finished requests for prefixes
    draft: int = 0  #: speculative tokens (rows) a step
    moves: bool = False  #: drafts are a tree, and accepted rows are moved
    mapping: bool = False
    metadata: bool = True
    padding: bool = True
    chunk_pages: int = 4
    lifo: bool = True
    k: int = 64


@dataclass(slots=True, eq=False)
class Job:
    """A request, and where its pages are on each side (by agent)."""

    room: int
    stream: int
    rows: int
    attempt: int = 0
    parent: Job | None = None
    steps: int = 2
    abort_at: str = ""  #: "announced", "computed" or "posted"
    retries: int = 0
    mark: str = ""
    sampled: bool = False
    overshoot: bool = False
    prefix_rows: int = 0
    again: int = (
        0  #: rows that go on from some earlier request's text, where one is still known; 0 = a new text
    )
    pages: dict[str, list[int]] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    appended: int = 0
    drafted: int = 0
    slot: int = -1
    mapping: int = -1
    stored: bool = False
    arrived: bool = False
    over: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)  #: sides that gave its pages back before their time

    @property
    def length(self) -> int:
        """Rows that exist."""
        return self.rows + self.appended

    @property
    def who(self) -> dict[str, int]:
        return {"room": self.room, "attempt": self.attempt}

    @property
    def key(self) -> str:
        return f"{self.room}.{self.attempt}"

    def streams(self, rows: I64) -> I64:
        """The stream that each row belongs to."""
        found = np.full(len(rows), self.stream, np.int64)
        if self.parent is not None:
            old = rows < self.prefix_rows
            found[old] = self.parent.streams(rows[old])
        return found

    def slots(self, side: Side, rows: I64) -> I64:
        """Where rows lie on a side."""
        pages = np.asarray(self.pages[side.agent], np.int64)
        return np.asarray(pages[rows // ROWS] * ROWS + rows % ROWS, np.int64)


@dataclass(slots=True)
class Transfer:
    """A posted transfer."""

    number: int
    job: Job
    side: Side
    logical: list[int]
    parts: list[Part]
    over: bool = False


def sliced(parts: list[Part], pieces: list[tuple[int, int]]) -> list[Part]:
    """Each descriptor cut down to the given pieces (first byte, last byte + 1) of what it carries."""
    return [(a + low, b + low, high - low) for a, b, _ in parts for low, high in pieces] if pieces else parts


def grouped(parts: list[Part]) -> list[Part]:
    """Descriptors whose neighbours go on on both sides are joined, as engines do."""
    found: list[Part] = []
    for a, b, n in parts:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (a, b):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + n)
        else:
            found.append((a, b, n))
    return found
