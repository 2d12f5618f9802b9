"""Which page bytes are kept, and when they are written: the ring, triggers, and what is in the journal already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Content
from capture_hooks.options import Options
from capture_hooks.ring import Kept, Ring

_SLICE = 4 * 2**20  #: bytes of the ring written at a time, so that the queue is served in between
_MAX_WRITTEN = 1_000_000


class Keeper:
    """Page contents of one process. For the writer's thread only.

    Each distinct content (by its page digest) is written once, as Content: in mode *full* when it is first seen, in
    mode *pages* once a trigger has fired. ``write`` takes the record, ``lose`` (reason, count) what the ring lost.
    """

    def __init__(
        self, options: Options, limit: int, write: Callable[[Content], None], lose: Callable[[str, int], None]
    ) -> None:
        self._mode = options.mode
        self._seconds, self._after_ns = options.ring_seconds, int(options.after_seconds * 1e9)
        self._write, self._lose = write, lose
        self._ring = Ring(options.ring_seconds, limit)
        self._due: deque[Kept] = deque()  # taken from the ring, still to be written
        self._due_size = 0
        self._written: set[bytes] = set()  # digests of contents that are in the journal, or due
        self._keep_until = 0

    @property
    def due(self) -> bool:
        """Whether contents wait for ``write_some``."""
        return bool(self._due)

    def keep(
        self, format_: str, digests: npt.NDArray[np.uint64], pages: npt.NDArray[np.uint8], now_ns: int
    ) -> None:
        """Keep the bytes of ``pages`` (``uint8[n, page_bytes]``, digests ``uint64[n, 2]``) as the mode says."""
        if self._mode == "digest":
            return
        write = self._mode == "full" or now_ns < self._keep_until
        fresh: list[int] = []
        raw = np.ascontiguousarray(digests).tobytes()
        for index in range(len(pages)):
            digest = raw[16 * index : 16 * index + 16]
            if digest in self._written:
                continue
            if write:
                self._written.add(digest)
                fresh.append(index)
            elif not self._ring.see(digest, now_ns):
                self._ring.add(Kept(format_, digest, pages[index].tobytes(), now_ns), self._due_size)
        if fresh:
            self._write(Content(format_, digests[fresh], pages[fresh]))
        if len(self._written) > _MAX_WRITTEN and not self._due:
            self._written.clear()  # contents may be written again; that costs disk, not truth

    def fire(self, now_ns: int) -> None:
        """A trigger: everything in the ring becomes due, and what comes in the next seconds is written at once."""
        self._keep_until = now_ns + self._after_ns
        held, lost = self._ring.take(now_ns)
        if lost:
            self._lose(
                f"the memory limit pushed bytes out of the ring before {self._seconds:g} s were over", lost
            )
        for kept in held:
            self._due.append(kept)
            self._due_size += kept.size
            self._written.add(kept.digest)

    def expire(self, now_ns: int) -> None:
        """Let go of what the ring need not hold any more."""
        self._ring.expire(now_ns)

    def write_some(self) -> None:
        """Write a slice of what is due."""
        if not self._due:
            return
        format_, size, batch = self._due[0].format, 0, []
        while self._due and self._due[0].format == format_ and size < _SLICE:
            kept = self._due.popleft()
            size += kept.size
            batch.append(kept)
        self._due_size -= size
        digests = np.frombuffer(b"".join(kept.digest for kept in batch), np.uint64).reshape(-1, 2)
        data = np.frombuffer(b"".join(kept.data for kept in batch), np.uint8).reshape(len(batch), -1)
        self._write(Content(format_, digests, data))
