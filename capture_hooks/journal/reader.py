"""Reads a journal, live, dead or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from zlib import crc32

from capture_hooks import frames
from capture_hooks.codec import PREFIX, CodecError, Decoder, schema_json
from capture_hooks.events import Clock, Process
from capture_hooks.frames import Cut
from capture_hooks.journal.error import JournalError, error_name
from capture_hooks.records import Event, Stamp

_MAX_CUTS = 10_000


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
                f"cannot be opened ({error_name(error)})", str(self.path), "check its name and rights"
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
