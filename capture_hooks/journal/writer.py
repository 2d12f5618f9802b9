"""Writes the journal of one process, within its disk budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from zlib import crc32

from capture_hooks import frames
from capture_hooks.codec import PREFIX, Encoded, StampTuple, encode, schema_json
from capture_hooks.events import BY_KIND, Clock, Content, Hook, Loss, Process
from capture_hooks.journal.error import JournalError, error_name
from capture_hooks.options import Options
from capture_hooks.records import Event, Stamp

Level = Literal["bytes", "digests", "counters", "closed"]

_log = logging.getLogger("kv_replay")

#: Bytes kept back for the last counters when the disk limit is reached.
_RESERVE = 64 * 1024
#: Bulk is given up from this part of the disk limit on.
_BULK_PART = 3 / 4
_MAX_FLUSH = 8 * 2**20
_FIRST_WAIT_NS = 10**9
_ALWAYS = frozenset((Loss.KIND, Hook.KIND, Clock.KIND))


class _Tally:
    """How many records of a kind, and the bounds of their sequence numbers."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count, self.first, self.last = 0, -1, -1

    def add(self, count: int, first: int, last: int) -> None:
        self.count += count
        if first >= 0:
            self.first = first if self.first < 0 else min(self.first, first)
        self.last = max(self.last, last)


# The state of the file:
#
#                 3/4 of the limit,                 the limit,
#                 or a write fails                  or a write fails
#     [bytes] ------------------------> [digests] ----------------> [counters]
#        |    every record, whole          | bulk fields are           | only Loss, Hook and Clock, in the
#        |                                 | left out                  | reserve; tries 1, 2, 4 ... s apart
#        +---------------------------------+---------------------------+
#                                          | close(): Loss, Clock("end")
#                                          v
#                                       [closed]
#
# There is no way back to an earlier state: a journal never has holes of bytes that look like choice. What is
# given up is counted and written as Loss. A frame whose write failed is cut off again, so that the next one begins
# where the last good one ended; if even that fails, the reader finds the next magic.
class JournalWriter:
    """Writes the journal of one process. For one thread; never raises after construction.

    ``next_seq`` gives sequence numbers to the records that the writer makes itself (Loss, Clock).
    """

    def __init__(
        self,
        path: Path | str,
        process: Process,
        options: Options | None = None,
        *,
        next_seq: Callable[[], int] | None = None,
    ) -> None:
        """Create the file, which must not exist, and write schema, ``process`` and Clock("start").

        Raises ``JournalError`` if that fails.
        """
        options = options or Options()
        self.path = Path(path)
        self.level: Level = "bytes"
        self.written = 0  #: bytes handed to the kernel
        self._own_seq = -1
        self._next_seq = next_seq or self._count
        self._flush_bytes = _MAX_FLUSH
        self._limit = options.disk_limit
        self._records_limit = self._limit - min(_RESERVE, self._limit // 4)
        self._parts: list[bytes] = []
        self._size = self._records = self._before = self._index = 0
        self._kinds: dict[int, _Tally] = {}
        self._losses: dict[tuple[str, str, str], _Tally] = {}
        self._reason = ""
        self._next_try, self._wait_ns = 0, _FIRST_WAIT_NS
        schema = schema_json()
        self._schema = crc32(schema)
        try:
            self._file = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o640
            )
        except OSError as error:
            raise JournalError(
                f"the journal cannot be created ({error_name(error)})",
                str(self.path),
                "choose another capture folder",
            ) from error
        self._index = 1
        whole = self._put(frames.pack(frames.SCHEMA, 0, 0, 0, self._schema, schema))
        self.write(process)
        self.write(_clock("start"))
        if not (whole and self._write_frame()):
            self.abandon()
            self.path.unlink(missing_ok=True)
            raise JournalError(
                f"the journal cannot be written ({self._reason})",
                str(self.path),
                "choose another capture folder",
            )
        self._flush_bytes = min(options.flush_bytes, _MAX_FLUSH)

    def write(self, event: Event, stamp: Stamp | None = None) -> None:
        """Add ``event``. Without ``stamp`` it is an instant of now, on thread 0."""
        now = time.monotonic_ns()
        seq = self._next_seq() if stamp is None else stamp.seq
        order: StampTuple = (seq, seq, 0, -1, now, now)
        if stamp is not None:
            order = (stamp.seq, stamp.begin_seq, stamp.thread, stamp.stream, stamp.begin_ns, stamp.end_ns)
        try:
            record = encode(event, order)
        except Exception as error:
            self.lose("journal", event.TABLE, f"a field cannot be written: {type(error).__name__}", seq, seq)
            return
        self.add(record)

    def add(self, record: Encoded) -> None:
        """Add an encoded record; writes a frame when enough has gathered."""
        kind, seq, tail = record.kind, record.seq, record.bulk
        table = BY_KIND[kind].TABLE
        if self.level in ("counters", "closed") and kind not in _ALWAYS:
            self.lose("disk", table, self._reason, seq, seq)
            return
        if self.level != "bytes" and record.has_bulk():
            self.lose("disk", Content.TABLE, f"bytes given up: {self._reason}", seq, seq)
            if kind == Content.KIND:
                return
            tail = record.bare
        length = len(record.head) + len(tail)
        if length > frames.MAX_RECORD:
            self.lose("journal", table, f"a record is larger than {frames.MAX_RECORD} bytes", seq, seq)
            return
        self._parts += (PREFIX.pack(kind, length), record.head, tail)
        self._size += PREFIX.size + length
        self._records += 1
        tally = self._kinds.get(kind)
        if tally is None:
            tally = self._kinds[kind] = _Tally()
        tally.add(1, seq, seq)
        if self._size >= self._flush_bytes:
            self.flush()

    def lose(self, stage: str, what: str, reason: str, first_seq: int, last_seq: int, count: int = 1) -> None:
        """Count something that was not kept; written as Loss with the next flush."""
        self._losses.setdefault((stage, what, reason), _Tally()).add(count, first_seq, last_seq)

    @property
    def pending(self) -> bool:
        """Whether a flush has anything to write."""
        return bool(self._records or self._losses)

    def flush(self, alive: bool = False) -> bool:
        """Hand everything to the kernel, with Clock("alive"). False if it was lost (and counted).

        Without ``alive`` nothing is written when there is nothing to write.
        """
        if self.level == "closed" or not (alive or self.pending):
            return self.level != "closed"
        if self.level == "counters" and time.monotonic_ns() < self._next_try:
            return False
        return self._write_frame("alive")

    def close(self) -> None:
        """Write what is left and Clock("end"), and close the file."""
        if self.level == "closed":
            return
        self.flush()
        self._write_frame("end")
        self.abandon()

    def abandon(self) -> None:
        """Close the file without writing anything (after a fork, the file is the parent's)."""
        if self.level != "closed":
            self.level = "closed"
            self._parts.clear()
            try:
                os.close(self._file)
            except OSError as error:
                _log.warning("kv-replay: closing the journal failed: %s", error_name(error))

    def _write_frame(self, moment: str = "") -> bool:
        losses, self._losses = self._losses, {}
        for (stage, what, reason), tally in losses.items():
            self._parts_of(Loss(stage, what, tally.count, tally.first, tally.last, reason))
        if moment:
            self._parts_of(_clock(moment))
        kinds, records = self._kinds, self._records
        raw = b"".join(self._parts)
        self._parts, self._size, self._records, self._kinds = [], 0, 0, {}
        frame = frames.pack(frames.RECORDS, self._index, self._before, records, self._schema, raw)
        kept = self._has_room(len(frame)) and self._put(frame)
        if self.level == "counters":
            # Ever rarer: the reserve must last to the end, however long the process runs on.
            self._next_try = time.monotonic_ns() + self._wait_ns
            self._wait_ns *= 2
        if kept:
            self._index += 1
            self._before += records
            return True
        for (stage, what, reason), tally in losses.items():
            self.lose(stage, what, reason, tally.first, tally.last, tally.count)
        for kind, tally in kinds.items():
            if kind not in (Loss.KIND, Clock.KIND):
                self.lose("disk", BY_KIND[kind].TABLE, self._reason, tally.first, tally.last, tally.count)
        return False

    def _parts_of(self, event: Event) -> None:
        """Add a record of the writer's own, in any state and without a further flush."""
        seq, now = self._next_seq(), time.monotonic_ns()
        record = encode(event, (seq, seq, 0, -1, now, now))
        self._parts += (
            PREFIX.pack(record.kind, len(record.head) + len(record.bulk)),
            record.head,
            record.bulk,
        )
        self._records += 1

    def _has_room(self, size: int) -> bool:
        """Whether a frame of ``size`` bytes fits; goes to the next state where the limit says so."""
        after = self.written + size
        if self.level == "counters":
            return after <= self._limit
        if after > self._records_limit:
            self._degrade("counters", f"the disk limit of {self._limit} bytes is reached")
            return False
        if self.level == "bytes" and after > self._records_limit * _BULK_PART:
            self._degrade("digests", f"3/4 of the disk limit of {self._limit} bytes is reached")
        return True

    def _degrade(self, level: Level, reason: str) -> None:
        self.level, self._reason = level, reason
        _log.warning("kv-replay: %s; from here on the journal keeps %s only", reason, level)

    def _put(self, frame: bytes) -> bool:
        """Write ``frame`` at the end of the file; on failure cut off what was written of it."""
        left = memoryview(frame)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            reason = f"writing failed ({error_name(error)})"
            if self.level == "counters":
                self._reason = reason
            else:
                self._degrade("digests" if self.level == "bytes" else "counters", reason)
            try:
                os.ftruncate(self._file, self.written)
            except OSError as again:
                _log.warning("kv-replay: the unfinished frame stays in the journal: %s", error_name(again))
            return False
        self.written += len(frame)
        return True

    def _count(self) -> int:
        self._own_seq += 1
        return self._own_seq


def _clock(moment: str) -> Clock:
    return Clock(moment, time.monotonic_ns(), time.time_ns())
