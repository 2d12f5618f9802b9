"""How pages get from one process into the other's memory: the common part of both transports.

A transport is one-sided, as RDMA is: the sender names addresses on both sides, the receiver only registers its
memory and lets the library work. One thread owns the library; senders hand it transfers and wait for them. It
keeps a bounded number of bytes in flight, so under load a transfer that was handed over may not be on the wire
yet.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capture_hooks.events import I64, U8, U64
from replay.lab.barriers import Barriers
from replay.lab.stream import Event

#: Pause between polls while something is in flight, and while nothing is.
BUSY_NAP = 0.0004
IDLE_NAP = 0.005


class TransportError(Exception):
    """The transport cannot be used, or the peer broke its protocol."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One post: the pages of one chunk in one layer. All descriptors have the same length."""

    index: int
    layer: int  #: -1: a metadata slot
    source: U64  #: uint64[n] addresses
    destination: U64  #: uint64[n] addresses in the peer
    length: int

    @property
    def size(self) -> int:
        """Bytes to move."""
        return len(self.source) * self.length


@dataclass(eq=False, slots=True)
class Transfer:
    """One chunk on its way."""

    room: int
    attempt: int
    chunk: int
    last: bool
    logical: int  #: first logical page
    pages: I64  #: source pages
    destination_pages: I64
    item_length: int
    written: Event  #: behind the stores of these pages
    slices: tuple[Slice, ...]
    priority: int  #: what is smaller goes first
    outage: bool = False  #: the sender loses its peer while this is posted
    slots: tuple[int, int] = (-1, -1)  #: metadata slot here and at the receiver
    on_over: Callable[[], None] = lambda: None
    error: str = ""
    posted: int = 0  #: slices on the wire
    left: int = 0  #: slices not yet done


@dataclass(frozen=True, slots=True)
class Wire:
    """What the network between the two machines would give: loopback is far faster than the lab's caches are
    large.
    """

    bandwidth: float  #: bytes a second
    window: int  #: bytes in flight at most


class Transport(ABC):
    """One end of the connection between the pools. ``memory`` is ``uint8[layers, pages, pitch]`` and ``metadata``
    ``uint8[slots, size]``; each is registered as a whole.
    """

    #: As it is told to people and to the trace.
    name = ""

    def __init__(self, role: str, memory: U8, metadata: U8, wire: Wire, barriers: Barriers) -> None:
        self.role = role
        self.memory = memory
        self.metadata = metadata
        self._wire = wire
        self._barriers = barriers
        self._inbox: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        #: Is told what ends the transport's thread before its time; without that thread nothing arrives any more.
        self.on_error: Callable[[BaseException], None] = lambda error: None
        #: Whether the receiver waits for data at the moment (it polls faster then).
        self.expecting: Callable[[], bool] = lambda: False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the peer needs in order to connect, as JSON types."""

    @abstractmethod
    def connect(self, peer: dict[str, Any]) -> None:
        """Connect the sender to the receiver described by ``peer``."""

    @abstractmethod
    def begin(self, transfer: Transfer, part: Slice) -> Any:
        """Post one slice and return a handle."""

    @abstractmethod
    def poll(self, handle: Any) -> str:
        """State of a post: "active", "done", or an error."""

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Give a handle back once its post is over."""

    @abstractmethod
    def progress(self) -> None:
        """Let the library of the receiver do its work."""

    def close(self) -> None:
        """End the transport's thread."""
        self._stop.set()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def start_sender(self) -> None:
        """Start the thread that posts."""
        self._start(self._send_loop)

    def start_receiver(self) -> None:
        """Start the thread that lets the library receive."""
        self._start(self._receive_loop)

    def _start(self, loop: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                loop()
            except Exception as error:  # whatever the library raises
                self.on_error(error)

        self._thread = threading.Thread(target=guarded, name=f"{self.role}-wire", daemon=True)
        self._thread.start()

    def post(self, transfer: Transfer) -> None:
        """Hand ``transfer`` over; returns at once."""
        transfer.left = len(transfer.slices)
        self._inbox.put(transfer)

    def take(self, block: bool) -> Transfer | None:
        """The next transfer that was handed over (runs on the transport's thread)."""
        try:
            return self._inbox.get(block=block)
        except queue.Empty:
            return None

    def finish(self, transfer: Transfer, part: Slice, state: str) -> None:
        """One slice is over (runs on the transport's thread)."""
        self._barriers.at("wire.done", transfer.room, transfer.chunk, part.index)
        transfer.left -= 1
        if state != "done":
            transfer.error = state
        if transfer.left == 0:
            self.complete(transfer)

    def complete(self, transfer: Transfer) -> None:
        """All slices are over: tell the sender."""
        self._barriers.at("wire.over", transfer.room, transfer.chunk)
        transfer.on_over()

    def _receive_loop(self) -> None:
        while not self._stop.is_set():
            self.progress()
            time.sleep(BUSY_NAP if self.expecting() else IDLE_NAP)

    def _send_loop(self) -> None:
        waiting: list[tuple[int, int, Transfer]] = []  # a heap: short prompts first, then in turn
        serial = 0
        flying: list[tuple[Transfer, Slice, Any]] = []
        pace = _Pace(self._wire)
        while not self._stop.is_set():
            while (new := self.take(block=not waiting and not flying)) is not None:
                serial += 1
                heapq.heappush(waiting, (new.priority, serial, new))
            moved = False
            while waiting and pace.may_send(sum(part.size for _, part, _ in flying)):
                transfer = waiting[0][2]
                part = transfer.slices[transfer.posted]
                if transfer.outage and flying:
                    break  # with its peer the library would forget what is on its way to it
                if not self._barriers.open("wire.slice", transfer.room, transfer.chunk, part.index):
                    break
                transfer.posted += 1
                if transfer.posted == len(transfer.slices):
                    heapq.heappop(waiting)
                try:
                    flying.append((transfer, part, self.begin(transfer, part)))
                    pace.sent(part.size)
                except Exception as error:  # whatever the library raises is this transfer's error
                    self.finish(transfer, part, f"{type(error).__name__}: {error}")
                moved = True
            still = []
            for entry in flying:
                state = self.poll(entry[2])
                if state == "active":
                    still.append(entry)
                    continue
                moved = True
                self.release(entry[2])
                self.finish(entry[0], entry[1], state)
            flying = still
            if not moved:
                time.sleep(BUSY_NAP)


class _Pace:
    """Keeps to the wire's bandwidth and to a bounded number of bytes in flight."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._credit = 0.0
        self._last = time.monotonic()

    def may_send(self, flying: int) -> bool:
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._last) * self._wire.bandwidth, self._wire.window)
        self._last = now
        return self._credit > 0 and (flying < self._wire.window or flying == 0)

    def sent(self, size: int) -> None:
        self._credit -= size
