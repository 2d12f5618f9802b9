"""The journal: the append log of one process, and its reader.

A journal is a sequence of frames (``frames.py``) of records (``codec.py``)::

    frame 0            the schema as JSON
    frame 1            Process, Clock("start")
    frame 2 ..         records; each ends with what was lost meanwhile (Loss) and Clock("alive")
    last frame         ...; Clock("end"), only if the process ended normally

It is only appended to, and a frame is handed to the kernel in one piece, so a process that is killed at any moment
leaves whole frames and at most one unfinished one behind them.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal
from zlib import crc32

from capture_hooks import frames
from capture_hooks.codec import PREFIX, CodecError, Decoder, Encoded, StampTuple, encode, schema_json
from capture_hooks.events import BY_KIND, Clock, Content, Event, Hook, Loss, Process, Stamp
from capture_hooks.frames import Cut
from capture_hooks.options import Options

Level = Literal["bytes", "digests", "counters", "closed"]

_log = logging.getLogger("kv_replay")

#: Bytes kept back for the last counters when the disk limit is reached.
_RESERVE = 64 * 1024
#: Bulk is given up from this part of the disk limit on.
_BULK_PART = 3 / 4
_MAX_FLUSH = 8 * 2**20
_FIRST_WAIT_NS = 10**9
_MAX_CUTS = 10_000
_ALWAYS = frozenset((Loss.KIND, Hook.KIND, Clock.KIND))


class JournalError(Exception):
    """A journal that cannot be opened, created or read at all: what is wrong, where, and what to do."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what, self.where, self.remedy = what, where, remedy


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
                f"the journal cannot be created ({_name(error)})",
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
                _log.warning("kv-replay: closing the journal failed: %s", _name(error))

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
            reason = f"writing failed ({_name(error)})"
            if self.level == "counters":
                self._reason = reason
            else:
                self._degrade("digests" if self.level == "bytes" else "counters", reason)
            try:
                os.ftruncate(self._file, self.written)
            except OSError as again:
                _log.warning("kv-replay: the unfinished frame stays in the journal: %s", _name(again))
            return False
        self.written += len(frame)
        return True

    def _count(self) -> int:
        self._own_seq += 1
        return self._own_seq


class JournalReader:
    """Reads a journal, live, dead or damaged.

    Iterating gives ``(Stamp, Event)`` in the order of the file, which is the order of ``seq`` within each thread only.
    Arrays are read-only views of their frame. A damaged part is skipped and told in :attr:`cuts`; kinds of other
    versions are skipped and counted in :attr:`unknown`. These and :attr:`ended` are complete once an iteration is over.
    A journal may be read while it is written: an iteration ends where the file ended when it began.

    Raises ``JournalError`` for a file that is no journal, or one of another major version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.cuts: list[Cut] = []  #: what could not be read
        self.ended = False  #: the last record is Clock("end")
        self.unknown: dict[str, int] = {}  #: records skipped by table name
        self.clock: Clock | None = None  #: newest proof of life
        self.process: Process | None = None  #: who wrote it; None if the file ends before that
        try:
            self._file = self.path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise JournalError(
                f"cannot be opened ({_name(error)})", str(self.path), "check its name and rights"
            ) from error
        try:
            self._decoder = self._open()
            for _, event in self:
                self.process = event if isinstance(event, Process) else None
                break
        except BaseException:
            self._file.close()
            raise
        self._reset()

    @property
    def truncated(self) -> bool:
        """Whether anything could not be read."""
        return bool(self.cuts)

    @property
    def cut(self) -> str:
        """What could not be read and where, "" if everything could."""
        shown = "; ".join(str(cut) for cut in self.cuts[:5])
        more = len(self.cuts) - 5
        return f"{shown}; and {more:,} more" if more > 0 else shown

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[tuple[Stamp, Event]]:
        self._reset()
        if self._decoder is None:
            if self._size:
                self._note(Cut(0, self._size, -1, "an unfinished frame"))
            return
        index, before = 0, 0
        for offset, header, content in frames.Scanner(self._file, self._size, self._note):
            if header.kind == frames.SCHEMA and header.index == 0 and offset == 0:
                index = 1
                continue
            if header.kind != frames.RECORDS or header.index < index or header.before < before:
                size = frames.HEADER_BYTES + header.length
                self._note(Cut(offset, size, -1, "a frame out of order"))
                continue
            self._note_missing(offset, header, index, before)
            index, before = header.index + 1, header.before + header.records
            yield from self._records(offset, header, content)

    def _open(self) -> Decoder | None:
        """The decoder by the journal's schema; None if the file ends before anything was recorded."""
        mine = schema_json()
        for offset, header, content in frames.Scanner(self._file, self._size, lambda _: None):
            if header.version != frames.MAJOR:
                raise JournalError(
                    f"format version {header.version} is not {frames.MAJOR}",
                    str(self.path),
                    "use the kv-replay that wrote it",
                )
            if header.kind == frames.SCHEMA:
                if offset or crc32(content) != header.schema:
                    break
                try:
                    return Decoder(content)
                except CodecError as error:
                    raise JournalError(
                        f"the schema in its first frame is damaged or foreign: {error}",
                        str(self.path),
                        "use the kv-replay that wrote it, or leave this file out",
                    ) from error
            if header.schema == crc32(mine):
                return Decoder(mine)  # the first frame is damaged, but it is known what it said
            raise JournalError(
                "the first frame, which holds the schema, is damaged, and another version wrote it",
                str(self.path),
                "use the kv-replay that wrote it, or leave this file out",
            )
        self._file.seek(0)
        start = self._file.read(len(frames.MAGIC))
        if frames.MAGIC.startswith(start) and not self._is_whole_first_frame():
            return None
        raise JournalError("not a journal, or no frame of it is whole", str(self.path), "leave this file out")

    def _is_whole_first_frame(self) -> bool:
        """Whether the first frame should lie wholly within the file (so that it is damaged, not unfinished)."""
        self._file.seek(0)
        header = frames.unpack_header(self._file.read(frames.HEADER_BYTES))
        if header is None:
            return self._size >= frames.HEADER_BYTES
        return self._size >= frames.HEADER_BYTES + header.length

    def _reset(self) -> None:
        self.cuts.clear()
        self.unknown.clear()
        self.ended, self.clock = False, None
        self._size = os.fstat(self._file.fileno()).st_size

    def _note(self, cut: Cut) -> None:
        if len(self.cuts) < _MAX_CUTS:
            self.cuts.append(cut)
        else:
            last = self.cuts[-1]
            size = max(last.offset + last.size, cut.offset + cut.size) - last.offset
            self.cuts[-1] = Cut(last.offset, size, -1, "many damaged parts")

    def _note_missing(self, offset: int, header: frames.Header, index: int, before: int) -> None:
        """Tell how many records the damage before this frame has cost."""
        missing = header.before - before
        if self.cuts and self.cuts[-1].records < 0 and self.cuts[-1].offset + self.cuts[-1].size == offset:
            cut = self.cuts.pop()
            self._note(Cut(cut.offset, cut.size, missing, cut.what))
        elif header.index > index or missing:
            self._note(Cut(offset, 0, missing, f"{header.index - index} missing frames"))

    def _records(self, offset: int, header: frames.Header, content: bytes) -> Iterator[tuple[Stamp, Event]]:
        assert self._decoder is not None
        view, at, count = memoryview(content), 0, 0
        while at + PREFIX.size <= len(view):
            kind, length = PREFIX.unpack_from(view, at)
            at += PREFIX.size
            if at + length > len(view):
                break
            count += 1
            try:
                found = self._decoder.decode(kind, view[at : at + length])
            except CodecError as error:
                self._note(Cut(offset, 0, 1, f"a damaged record ({error}) in the frame"))
                found = None
            else:
                if found is None:
                    table = self._decoder.unknown[kind]
                    self.unknown[table] = self.unknown.get(table, 0) + 1
            at += length
            if found is not None:
                event = found[1]
                self.ended = False
                if isinstance(event, Clock):
                    self.clock, self.ended = event, event.moment == "end"
                yield found
        if count != header.records or at != len(view):
            self.cuts.append(
                Cut(offset, 0, max(0, header.records - count), "a frame with fewer records than it states")
            )


def _clock(moment: str) -> Clock:
    return Clock(moment, time.monotonic_ns(), time.time_ns())


def _name(error: OSError) -> str:
    """The symbolic name of an error ("ENOSPC"): its text would hold paths."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
