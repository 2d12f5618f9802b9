"""Tables with a bound, for what a library's handles and messages are known by over weeks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Things by number: at most ``most``, and at most ``most_bytes`` by their ``size`` beside the newest one.

    Where there would be more, the one that was put or asked for longest ago is forgotten. Threads may share it.
    """

    def __init__(self, most: int, most_bytes: int = 0, size: Callable[[T], int] = lambda _: 0) -> None:
        self._most, self._most_bytes, self._size = most, most_bytes, size
        self._items: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.forgotten = 0  #: how many have been forgotten so far

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: int) -> T | None:
        """What ``key`` stands for; ``None`` where that is not known, or not any more."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: int, item: T) -> None:
        """``key`` stands for ``item`` from now on."""
        with self._lock:
            self._remove(key)
            size = self._size(item)
            self._items[key] = item, size
            self._bytes += size
            while len(self._items) > self._most or (self._bytes > self._most_bytes and len(self._items) > 1):
                self._bytes -= self._items.popitem(last=False)[1][1]
                self.forgotten += 1

    def pop(self, key: int, only: T | None = None) -> T | None:
        """Take out what ``key`` stands for, or nothing where that is not ``only``."""
        with self._lock:
            if only is not None and self._items.get(key, (None, 0))[0] is not only:
                return None
            return self._remove(key)

    def _remove(self, key: int) -> T | None:
        found = self._items.pop(key, None)
        if found is None:
            return None
        self._bytes -= found[1]
        return found[0]
