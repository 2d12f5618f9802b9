"""What both engines have: a pool with its allocator, a transport, a stream, and a scheduler thread with an inbox."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from replay.lab.audit import Audit
from replay.lab.barriers import Barriers
from replay.lab.config import LabConfig
from replay.lab.control import Channel
from replay.lab.faults import policy
from replay.lab.metadata import MetadataSlots
from replay.lab.pool import PageAllocator, PagedPool
from replay.lab.stream import Stream
from replay.lab.transport import Wire
from replay.lab.transports import create


class Engine(ABC):
    """One side of the pair in one round.

    The first error of any of its threads ends the round: :meth:`fail` tells the router and stops the scheduler.
    """

    role: ClassVar[str]
    #: Seconds that a scheduler with nothing to do waits for a message, at the longest.
    turn: ClassVar[float]

    def __init__(self, config: LabConfig, transport: str, router: Channel, pages: int) -> None:
        self.config = config
        self.layout = config.layout
        self.policy = policy(config.fault, self.layout)
        self.barriers = Barriers(config.flags, config.rules)
        self.audit = Audit(config.audit, self.role)
        self.pool = PagedPool(self.layout, config.layers, pages, self.policy, config.triton_pages)
        self.allocator = PageAllocator(pages, config.free_list, keep_shared=self.policy.keep_shared)
        self.metadata = MetadataSlots(config.metadata_slots)
        self.error = ""
        self._router = router
        # No ``SimpleQueue``: it is waited for with a timeout (see ``Sender``).
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        wire = Wire(config.bandwidth, config.window)
        self.transport = create(
            transport, self.role, self.pool.memory, self.metadata.memory, wire, self.barriers
        )
        self.transport.on_error = self.fail

    def fail(self, error: BaseException) -> None:
        """Remember the first error of any thread; the round ends with it."""
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            self._router.send("error", error=self.error)
        self._stop.set()

    def _start_threads(self) -> None:
        """The stream and the scheduler begin."""
        self.stream = Stream(f"{self.role}-stream", self.fail)
        self._thread = threading.Thread(target=self._guarded, name=f"{self.role}-scheduler", daemon=True)
        self._thread.start()

    def _end_scheduler(self) -> None:
        self._stop.set()
        self._inbox.put(("stop", None))
        self._thread.join(timeout=10)

    def _guarded(self) -> None:
        try:
            self._schedule()
        except Exception as error:
            self.fail(error)

    def _messages(self, block: bool) -> list[tuple[str, Any]]:
        """All messages in the inbox; with ``block`` it waits a turn for the first."""
        found = []
        try:
            found.append(self._inbox.get(block=block, timeout=self.turn if block else None))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    @abstractmethod
    def _schedule(self) -> None:
        """What the scheduler's thread does until ``_stop`` is set."""
