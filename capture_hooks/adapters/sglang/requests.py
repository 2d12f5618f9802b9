"""Who is who: rooms and their attempts, and the owners of pages."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from capture_hooks.events import Request
from capture_hooks.rid import rid_hash

#: Ends of a transfer, of ``KVPoll``.
SUCCESS, FAILED = 4, 0

#: Rooms whose number of attempts is remembered.
_MAX_ROOMS = 200_000
#: Requests that are found by ``last_of``.
_MAX_LAST = 10_000


@dataclass(eq=False, slots=True)
class Held:
    """One attempt of one request, as this process knows it.

    ``rid`` is the one-way hash of the client's id; ``tokens`` the prompt's length and ``rows`` its valid rows, -1 while
    unknown; ``pages`` logical page -> physical page; ``mark`` "warmup", "health", "fake" or ""; ``req_pool_idx`` its
    row in ``req_to_token`` and ``generation`` that row's, -1 while unknown.
    """

    room: int
    attempt: int = 0
    rid: str = ""
    tokens: int = -1
    rows: int = -1
    mark: str = ""
    req_pool_idx: int = -1
    generation: int = -1
    agreed: bool = False  #: its number counts announcements of its pages: both sides give it the same one
    fixed: bool = False  #: its number changes no more
    over: bool = False  #: its pages are (being) given back: nobody looks at them any more
    pages: dict[int, int] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)  #: logical pages that were announced to prefill
    arrived: bool = False  #: its transfer was seen complete by the scheduler
    ranks: list[int] = field(default_factory=list)  #: prefill ranks that told success
    admitted: bool = False
    acknowledged: bool = False  #: prefill told that no write of it is in flight
    ending: str = ""  #: why its pages will be given back, where that is known before
    #: Held while somebody looks at the pages, and for a moment when they are given back.
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        """``room.attempt``, as in the keys of order edges."""
        return f"{self.room}.{self.attempt}"

    def record(self, phase: str) -> Request:
        """All that is known of it, as a record of ``phase``."""
        return Request(
            self.room, self.attempt, phase, self.rid, self.tokens, self.rows, self.mark, self.req_pool_idx,
            self.generation,
        )  # fmt: skip


def room_of(req: Any) -> int:
    """Room of a scheduler's request; without one, a number made from its id, the same on every rank."""
    room = getattr(req, "bootstrap_room", None)
    if room is not None:
        return int(room)
    return int(rid_hash(str(getattr(req, "rid", "")))[:15], 16)


def row_of(req: Any) -> int:
    """Row of a scheduler's request in ``req_to_token``, -1 while it has none."""
    kv = getattr(req, "kv", None)
    row = getattr(kv, "req_pool_idx", None)
    row = getattr(req, "req_pool_idx", None) if row is None else row
    return -1 if row is None else int(row)


class Requests:
    """The requests of one process. Every method may be called from any thread.

    A room that comes again is another attempt of it. Either side may make an endpoint for a room that the other never
    hears of (given up early, timed out), so endpoints are not what is counted: the number of an attempt is the number
    of times that decode announced destination pages for the room before, which decode sends and prefill reads in one
    order. An attempt whose pages were not announced yet has the number that it would get.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next: OrderedDict[int, int] = OrderedDict()  # room -> number of its next attempt
        self._heard: OrderedDict[int, dict[str, int]] = (
            OrderedDict()
        )  # room -> announcements read of each peer
        self._early: OrderedDict[int, int] = (
            OrderedDict()
        )  # room -> number announced before it was opened here
        self._rooms: dict[int, Held] = {}
        self._pages: dict[int, Held] = {}
        self._last: OrderedDict[int, Held] = OrderedDict()

    def open(self, room: int, *, local: bool = False) -> Held:
        """A new attempt of ``room``. ``local``: no other process takes part in it, so it counts here."""
        with self._lock:
            early = self._early.pop(room, None)
            held = self._rooms[room] = Held(room, self._next.get(room, 0) if early is None else early)
            held.agreed = early is not None
            if local:
                held.fixed = True
                self._count(held)
            self._last.pop(room, None)
            self._last[room] = held
            if len(self._last) > _MAX_LAST:
                self._last.popitem(last=False)
            return held

    def announce(self, held: Held) -> None:
        """Destination pages of ``held`` are being announced: its number is settled."""
        with self._lock:
            held.attempt = self._next.get(held.room, 0)
            held.agreed = held.fixed = True
            self._count(held)

    def announced(self, room: int, peer: str) -> Held | None:
        """An announcement of ``room`` by ``peer`` was read: it is for the endpoint that is there, or for the next.

        Returns the attempt that has another number now.
        """
        with self._lock:
            peers = self._heard.pop(room, {})
            number = peers[peer] = peers.get(peer, -1) + 1
            _put(self._heard, room, peers)
            _put(self._next, room, max(self._next.get(room, 0), number + 1))
            held = self._rooms.get(room)
            if held is None or held.fixed:
                _put(self._early, room, number)
                return None
            before, held.attempt, held.agreed = held.attempt, number, True
            return held if before != number else None

    def _count(self, held: Held) -> None:
        _put(self._next, held.room, held.attempt + 1)

    def of_room(self, room: int) -> Held | None:
        """The latest attempt of ``room``."""
        return self._rooms.get(room)

    def last_of(self, room: int) -> Held | None:
        """The latest attempt of ``room``, even if it is over (as long as it is remembered)."""
        return self._last.get(room)

    def give(self, held: Held, logical: int, pages: Iterable[int]) -> bool:
        """``pages[i]`` is logical page ``logical + i`` of ``held`` from now on.

        False if all of it was known already.
        """
        news = False
        with self._lock:
            for place, page in enumerate(pages, logical):
                if held.pages.get(place) != page or self._pages.get(page) is not held:
                    held.pages[place] = page
                    self._pages[page] = held
                    news = True
        return news

    def holds(self, held: Held) -> bool:
        """Whether ``held`` is not over and every page it was given is still its own."""
        with self._lock:
            return not held.over and all(self._pages.get(page) is held for page in held.pages.values())

    def close(self, held: Held) -> None:
        """``held`` is over: the pages that are still its own are nobody's."""
        with self._lock:
            held.over = True
            for page in held.pages.values():
                if self._pages.get(page) is held:
                    del self._pages[page]
            if self._rooms.get(held.room) is held:
                del self._rooms[held.room]


def _put(table: OrderedDict[int, Any], room: int, value: Any) -> None:
    """Set the entry of ``room`` as the newest one, and forget the oldest where there are too many."""
    table.pop(room, None)
    table[room] = value
    if len(table) > _MAX_ROOMS:
        table.popitem(last=False)
