"""Who is who: rooms and their attempts, and the owners of pages."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
    unknown; ``pages`` logical page -> physical page; ``mark`` "warmup", "health", "fake" or "".
    """

    room: int
    attempt: int = 0
    rid: str = ""
    tokens: int = -1
    rows: int = -1
    mark: str = ""
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
    """The requests of one process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._rooms: dict[int, Held] = {}
        self._pages: dict[int, Held] = {}
        self._last: OrderedDict[int, Held] = OrderedDict()

    def open(self, room: int) -> Held:
        """A new attempt of ``room``: 0 the first time it is seen, one more each time."""
        with self._lock:
            attempt = self._attempts.pop(room, -1) + 1
            self._attempts[room] = attempt
            if len(self._attempts) > _MAX_ROOMS:
                self._attempts.popitem(last=False)
            held = self._rooms[room] = Held(room, attempt)
            self._last.pop(room, None)
            self._last[room] = held
            if len(self._last) > _MAX_LAST:
                self._last.popitem(last=False)
            return held

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
