"""Requests as the prefill side sees them: a prompt, cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from capture_hooks.events import I64
from replay.lab.config import PAGE_TOKENS, pages_for, rows_for
from replay.lab.stream import Event


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on the prefill side."""

    room: int
    attempt: int
    tokens: int
    prefix_of: int = -1  #: room whose prompt begins alike
    prefix_pages: int = 0
    outage: int = -1  #: chunk while whose transfer is posted the sender has lost its peer
    pages: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    launched: int = 0  #: tokens whose stores are on the stream
    chunks: list[Chunk] = field(default_factory=list)
    destination: I64 | None = None  #: of all pages; -1 for those that decode has already
    peer_slot: int = -1  #: metadata slot of the receiver, -1 without metadata
    parked: list[Chunk] = field(default_factory=list)
    in_hand: int = 0  #: chunks that a sender has taken up and not finished
    on_wire: int = 0  #: chunks that were posted and are not over
    sent: int = 0  #: chunks whose transfer is over
    component_sent: bool = False
    told: bool = False  #: decode knows that all pages are there
    aborted: bool = False
    acknowledged: bool = False
    failed: bool = False
    leaving: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """(room, attempt)."""
        return self.room, self.attempt


@dataclass(eq=False, slots=True)
class Chunk:
    """A piece of a prompt: whole pages, except at the prompt's end."""

    sequence: Sequence
    index: int
    first_token: int
    tokens: int
    last: bool
    event: Event | None = None
    component: bool = False  #: all pages of the prompt in the layers that go apart

    @property
    def written(self) -> Event:
        """The event behind the chunk's stores, once it is launched."""
        assert self.event is not None
        return self.event

    @property
    def final(self) -> bool:
        """Whether nothing of the request is sent behind it."""
        return self.last and self is self.sequence.chunks[-1]

    @property
    def logical(self) -> int:
        """First logical page."""
        return self.first_token // PAGE_TOKENS

    @property
    def pages(self) -> I64:
        """Source pages."""
        return self.sequence.pages[self.logical : self.logical + pages_for(self.tokens)]

    @property
    def rows(self) -> int:
        """Complete rows of the chunk."""
        return rows_for(self.tokens)
