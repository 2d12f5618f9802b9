"""The ring: page bytes of the recent past, each content once, bounded in seconds and in bytes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_OVERHEAD = 250  #: bytes of bookkeeping an entry, about


class Kept(NamedTuple):
    """One page content."""

    format: str
    digest: bytes  #: the page digest, 16 bytes
    data: bytes
    seen_ns: int  #: when it was seen last

    @property
    def size(self) -> int:
        """Bytes of host memory."""
        return len(self.data) + _OVERHEAD


class Ring:
    """Contents by digest, the longest unseen first. For one thread."""

    def __init__(self, seconds: float, limit: int) -> None:
        self._span_ns = int(seconds * 1e9)
        self._limit = limit
        self._kept: dict[bytes, Kept] = {}
        self._evicted: deque[list[int]] = deque()  # [second, count] of what the limit pushed out too early
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def see(self, digest: bytes, now_ns: int) -> bool:
        """Whether the content is held; if so it counts as seen now."""
        kept = self._kept.pop(digest, None)
        if kept is None:
            return False
        self._kept[digest] = kept._replace(seen_ns=now_ns)
        return True

    def add(self, kept: Kept, elsewhere: int = 0) -> None:
        """Hold a content that is not held yet. ``elsewhere`` bytes of the limit are in use by others."""
        if kept.size + elsewhere > self._limit:
            self._count_evicted(kept.seen_ns)
            return
        self._kept[kept.digest] = kept
        self.size += kept.size
        while self.size + elsewhere > self._limit:
            self._count_evicted(self._drop_first().seen_ns)

    def expire(self, now_ns: int) -> None:
        """Let go of what was not seen for the ring's seconds."""
        oldest = now_ns - self._span_ns
        while self._kept and next(iter(self._kept.values())).seen_ns < oldest:
            self._drop_first()
        while self._evicted and (self._evicted[0][0] + 1) * 10**9 < oldest:
            self._evicted.popleft()

    def take(self, now_ns: int) -> tuple[list[Kept], int]:
        """Everything held (the ring is empty then), and how many contents of its seconds the limit pushed out."""
        self.expire(now_ns)
        held, lost = list(self._kept.values()), sum(count for _, count in self._evicted)
        self._kept.clear()
        self._evicted.clear()
        self.size = 0
        return held, lost

    def _drop_first(self) -> Kept:
        kept = self._kept.pop(next(iter(self._kept)))
        self.size -= kept.size
        return kept

    def _count_evicted(self, seen_ns: int) -> None:
        second = seen_ns // 10**9
        if self._evicted and self._evicted[-1][0] >= second:
            self._evicted[-1][1] += 1
        else:
            self._evicted.append([second, 1])
