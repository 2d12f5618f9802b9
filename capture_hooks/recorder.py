"""The recorder: takes records from the server's threads and hands them to the journal.

The calling thread pays for encoding one record and nothing else: it never waits, never touches the disk and never
raises. A daemon thread digests page bytes, keeps the ring and writes the journal. What cannot be kept is dropped, the
newest first, and counted with the sequence numbers that bound it (Loss).

Bytes of pages, by mode: *digest* never keeps any; *pages* holds them in a ring and writes them as Content when a
trigger fires, and on for some seconds; *full* writes each distinct content once, as Content.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capture_hooks.codec import ENCODERS, Encoded, StampTuple
from capture_hooks.control import Control
from capture_hooks.events import Content, Order, Process, StoreParams, Trigger
from capture_hooks.hooktable import About, Guard, HookTable, Scope
from capture_hooks.identity import describe, file_name
from capture_hooks.inventory import Inventory
from capture_hooks.journal import JournalError, JournalWriter
from capture_hooks.keeper import Keeper
from capture_hooks.options import Options
from capture_hooks.records import Event
from capture_hooks.seal_child import start_seal

_log = logging.getLogger("kv_replay")

_SMALL = 4096  #: records up to this size are bounded by their number alone
_LARGE = 2**18  #: records from this size on wake the writer
_POLL_NS = 500_000_000
_ALIVE_NS = 10**9
_HOOKS_NS = 10**9
_CLOSE_SECONDS = 15.0
_MAX_FAILURES = 20


class Mark(NamedTuple):
    """Begin of an interval."""

    seq: int
    ns: int


class Recorder:
    """One per process. All public methods may be called from any thread; none of them raises or waits.

    The exceptions are ``close`` (waits for the journal, at most 15 s) and the constructor, which raises
    ``JournalError`` or ``OSError`` if the journal cannot be created in ``options.capture``.
    """

    def __init__(self, options: Options, process: Process) -> None:
        if options.capture is None:
            raise JournalError("no capture folder is set", "KV_REPLAY_CAPTURE", "set it to a folder")
        self.options = options
        self.process = describe(process, options)
        options.capture.mkdir(parents=True, exist_ok=True)
        self._seq = itertools.count()
        self._journal = JournalWriter(
            options.capture / file_name(self.process), self.process, options, next_seq=self._seq.__next__
        )
        self.path = self._journal.path  #: the journal
        self.inventory = Inventory(self.emit)
        self._bare = options.mode == "digest"
        self._threads = itertools.count(1)  # 0 is the writer
        self._local = threading.local()
        # (bytes reserved, the record or what makes it, its table, its sequence number)
        self._queue: deque[tuple[int, Encoded | Callable[[], Encoded], str, int]] = deque()
        self._queued = 0  # bytes reserved
        self._queue_limit = max(1, options.host_limit // 4)
        self._wake_at = max(1, options.queue // 4)
        # Reentrant: a signal handler or a destructor may emit while its thread holds it.
        self._lock = threading.RLock()
        self._losses: dict[tuple[str, str, str], list[int]] = {}
        self._hooks = HookTable(options.hook_errors, lambda reason: self.lose("hook", "", reason))
        self._keeper = Keeper(
            options,
            max(1, options.host_limit - self._queue_limit),
            self._own,
            lambda reason, count: self.lose("ring", Content.TABLE, reason, count=count),
        )
        self._fire = False
        self._control = Control(options.capture)
        self._flushed = self._alive = self._polled = self._hooked = time.monotonic_ns()
        self._failures = 0
        self._closed = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._run, name="kv-replay-writer", daemon=True)
        _forget_in_children(self)
        self._writer.start()
        atexit.register(self.close, "exit")
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:  # its children leave without atexit
            multiprocessing.Finalize(None, self.close, args=("exit",), exitpriority=0)

    # -- records ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more: after ``close``, in a forked child, or after repeated failures."""
        return self._closed

    def emit(self, event: Event, mark: Mark | None = None, stream: int = -1) -> int:
        """Record ``event``, an instant or the interval since ``mark``. Arrays are copied before it returns.

        Returns its sequence number, -1 if it was dropped.
        """
        return -1 if self._closed else self.emit_at(event, self.stamp(mark, stream))

    def emit_at(self, event: Event, stamp: StampTuple) -> int:
        """Record ``event`` with a stamp made before (:meth:`stamp`), for what is known later than it happened."""
        if self._closed:
            return -1
        seq = stamp[0]
        try:
            if len(self._queue) >= self.options.queue:
                self.lose("queue", event.TABLE, "the queue is full", seq)
                return -1
            record = ENCODERS[event.KIND].encode(event, stamp)
        except Exception as error:
            self.lose(
                "journal", getattr(event, "TABLE", ""), f"a record cannot be made: {type(error).__name__}"
            )
            return -1
        if self._bare and record.has_bulk() and record.kind != StoreParams.KIND:
            record = record._replace(bulk=record.bare)
        size = record.size
        if size <= _SMALL:
            size = 0
        elif not self.reserve(size, event.TABLE, seq):
            return -1
        return self._enqueue(size, record, event.TABLE, seq)

    def tail(self, what: str, key: str) -> int:
        """The tail of an order edge (``events.Order``): what this thread did so far comes before the head."""
        return self.emit(Order(what, key, "tail"))

    def head(self, what: str, key: str) -> int:
        """The head of an order edge: what this thread does from here on comes after the tail of the same key."""
        return self.emit(Order(what, key, "head"))

    def mark(self) -> Mark:
        """Begin of an interval, for ``emit``."""
        return Mark(next(self._seq), time.monotonic_ns())

    def stamp(self, mark: Mark | None = None, stream: int = -1) -> StampTuple:
        """The stamp of a record made now by this thread, in the order of ``records.Stamp``."""
        try:
            thread = self._local.number
        except AttributeError:
            thread = self._local.number = next(self._threads)
        seq, now = next(self._seq), time.monotonic_ns()
        if mark is None:
            return seq, seq, thread, stream, now, now
        return seq, mark.seq, thread, stream, mark.ns, now

    def reserve(self, size: int, table: str, seq: int) -> bool:
        """Set aside ``size`` bytes of the queue. False if there is no room; the record is counted as lost then."""
        with self._lock:
            if self._queued + size <= self._queue_limit:
                self._queued += size
                return True
        self.lose("queue", table, "the queue's bytes are used up", seq)
        return False

    def defer(self, size: int, finish: Callable[[], Encoded], table: str, seq: int) -> int:
        """Queue a record that ``finish`` makes on the writer's thread; ``size`` bytes were reserved for it.

        Returns ``seq``, -1 if it was dropped.
        """
        if len(self._queue) >= self.options.queue or self._closed:
            self._release(size)
            self.lose("queue", table, "the queue is full", seq)
            return -1
        return self._enqueue(size, finish, table, seq)

    def lose(self, stage: str, what: str, reason: str, seq: int = -1, count: int = 1) -> None:
        """Count something that was not kept; it becomes a Loss record with the next flush."""
        if seq < 0:
            seq = next(self._seq)
        with self._lock:
            found = self._losses.get((stage, what, reason))
            if found is None:
                self._losses[stage, what, reason] = [count, seq, seq]
            else:
                found[0] += count
                found[1], found[2] = min(found[1], seq), max(found[2], seq)

    def _enqueue(self, reserved: int, record: Encoded | Callable[[], Encoded], table: str, seq: int) -> int:
        self._queue.append((reserved, record, table, seq))
        if (reserved > _LARGE or len(self._queue) >= self._wake_at) and not self._wake.is_set():
            self._wake.set()
        return seq

    def _release(self, reserved: int) -> None:
        with self._lock:
            self._queued -= reserved

    # -- hooks --------------------------------------------------------------------------------------------------------

    def guard(self, name: str) -> Guard:
        """Context manager for the body of hook ``name``: any ``Exception`` ends the body, is counted and swallowed."""
        return self._hooks.guard(name)

    def detached(self, name: str) -> bool:
        """Whether hook ``name`` has failed so often (``hook_errors``) that it must not run any more."""
        return self._hooks.detached(name)

    def hook(
        self, name: str, covers: str, state: str = "attached", complete: bool = True, note: str = ""
    ) -> None:
        """State of a hook, as in ``events.Hook``. Calling it again replaces the state and keeps the count."""
        self._hooks.set(name, covers, state, complete, note)

    def incomplete(self, name: str, why: str) -> None:
        """Hook ``name`` does not see every call any more. One that is missing, refused or detached stays so."""
        self._hooks.incomplete(name, why)

    def fired(self, name: str) -> None:
        """Count one call of a hook that was told with ``hook``."""
        self._hooks.fired(name)

    def about(self, room: int, attempt: int = 0, chunk: int = -1, last: bool = False, **more: Any) -> Scope:
        """Context manager: tell hooks further down, on this thread, which request is worked on."""
        return Scope(self._local, About(room, attempt, chunk, last, more))

    def current(self) -> About | None:
        """What the innermost ``about`` of this thread said."""
        return getattr(self._local, "about", None)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def trigger(self, reason: str, room: int = -1, attempt: int = 0, rid: str = "") -> int:
        """Write out the ring, and the page bytes of the next seconds (``after_seconds``)."""
        seq = self.emit(Trigger(reason, room, attempt, rid))
        self._fire = True
        self._wake.set()
        return seq

    def keep(
        self, format_: str, digests: npt.NDArray[np.uint64], pages: npt.NDArray[np.uint8], now_ns: int
    ) -> None:
        """Keep page bytes as the mode says (see ``Keeper.keep``). For records being finished on the writer's thread."""
        if self._journal.level == "bytes":
            self._keeper.keep(format_, digests, pages, now_ns)

    # -- the writer's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._local.number = 0
        period = min(0.05, max(0.001, self.options.flush_ms / 4000))
        stopping = False
        while not stopping and self._failures < _MAX_FAILURES:
            self._wake.wait(period)
            self._wake.clear()
            stopping = self._stop.is_set()
            try:
                self._turn(stopping)
                self._failures = 0
            except Exception as error:
                self._failures += 1
                self.lose("journal", "", f"the writer failed: {type(error).__name__}")
                if self._failures == 1:
                    _log.warning("kv-replay: the writer failed", exc_info=error)
        if self._failures >= _MAX_FAILURES:
            self._closed = True
            _log.error(
                "kv-replay: the writer failed %d times in a row; nothing is recorded any more", self._failures
            )
            self._journal.abandon()
        elif stopping:
            self._journal.close()

    def _turn(self, last: bool) -> None:
        self._drain()
        now = time.monotonic_ns()
        if now - self._polled >= _POLL_NS:
            self._polled = now
            for found in self._control.poll():
                self.trigger(found.reason, found.room, found.attempt, found.rid)
        if self._fire:
            self._fire = False
            self._keeper.fire(now)
        self._keeper.expire(now)
        self._keeper.write_some()
        while last and (self._keeper.due or self._queue):
            self._drain()
            self._keeper.write_some()
        self._write_hooks(now, last)
        self._flush(alive=now - self._alive >= _ALIVE_NS)
        if self._keeper.due:
            self._wake.set()

    def _drain(self) -> None:
        late = self.options.flush_ms * 500_000  # half of the flush bound
        done = 0
        for _ in range(len(self._queue)):
            reserved, record, table, seq = self._queue.popleft()
            try:
                self._journal.add(record if isinstance(record, Encoded) else record())
            except Exception as error:
                self.lose("journal", table, f"a record cannot be made: {type(error).__name__}", seq)
            done += reserved
            if done > self._queue_limit // 8:
                self._release(done)
                done = 0
            if time.monotonic_ns() - self._flushed > late:
                self._flush()
        if done:
            self._release(done)

    def _flush(self, alive: bool = False) -> None:
        with self._lock:
            losses, self._losses = self._losses, {}
        for (stage, what, reason), (count, first, last) in losses.items():
            self._journal.lose(stage, what, reason, first, last, count)
        self._flushed = time.monotonic_ns()
        if alive or self._journal.pending:
            self._journal.flush(alive)
            self._alive = self._flushed

    def _own(self, event: Event) -> None:
        """A record of the writer itself."""
        seq, now = next(self._seq), time.monotonic_ns()
        self._journal.add(ENCODERS[event.KIND].encode(event, (seq, seq, 0, -1, now, now)))

    def _write_hooks(self, now: int, last: bool) -> None:
        if self._journal.level == "counters" and not last:
            return  # they would use up the reserve
        timely = last or now - self._hooked >= _HOOKS_NS
        for record in self._hooks.changes(timely):
            self._own(record)
        if timely:
            self._hooked = now

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, reason: str = "stop") -> None:
        """Write what is queued and Clock("end"), close the journal, and seal it in a child if so asked."""
        if self._closed or threading.current_thread() is self._writer:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._stop.set()
        self._wake.set()
        self._writer.join(_CLOSE_SECONDS)
        if self._writer.is_alive():
            _log.warning(
                "kv-replay: the journal is not written after %g s; leaving it (%s)", _CLOSE_SECONDS, reason
            )
        elif self.options.seal:
            start_seal(self.path)

    def _forget(self) -> None:
        """In a forked child: the journal is the parent's. No lock is taken; its holder may not exist here."""
        self._closed = True
        self._queue.clear()
        self._journal.abandon()


_live: weakref.WeakSet[Recorder] = weakref.WeakSet()
_registered = False


def _forget_in_children(recorder: Recorder) -> None:
    global _registered
    _live.add(recorder)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for recorder in list(_live):
        recorder._forget()
