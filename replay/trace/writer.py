"""Writing a trace file: events in, columns out, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages, page_digests
from capture_hooks.events import EVENTS, Buffer, Content, Process, Snapshot
from capture_hooks.layouts import LAYOUTS, Layout
from capture_hooks.records import Event, Stamp, schema
from replay.trace.blobs import BlobWriter, blob_key
from replay.trace.content_writer import ContentWriter, Pages
from replay.trace.hdf5 import Appender, NewFile
from replay.trace.schema import (
    FORMAT,
    MAJOR,
    MINOR,
    PAGE_BLOBS,
    PROCESS_COLUMNS,
    STAMPS,
    TABLES,
    Column,
    file_dtype,
)
from replay.writing import write_error, writing

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

#: Events of one table, or bytes of their arrays, that wait in memory before they are turned into columns.
_WAITING_EVENTS = 4096
_WAITING_BYTES = 8 * 1024 * 1024
#: The same over all tables, with what an event takes besides its arrays. Arrays may be views of whole frames of a
#: journal, which stay in memory as long as one event of theirs does.
_ALL_WAITING_BYTES = 32 * 1024 * 1024
_EVENT_BYTES = 256


class Strings:
    """The string table: each distinct string once, known by its code. Code 0 is the empty string."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {"": 0}

    def code(self, text: str) -> int:
        """Code of ``text``, entered where it is new."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: Iterable[str]) -> npt.NDArray[np.int32]:
        """Codes of several strings."""
        return np.array([self._codes.setdefault(text, len(self._codes)) for text in texts], np.int32)

    def write(self, root: Any) -> None:
        """Write ``/strings``: all UTF-8 bytes in a row, and where each string ends."""
        encoded = [text.encode("utf-8", "replace") for text in self._codes]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        group = root.create_group("strings")
        for name, values in (("bytes", np.frombuffer(b"".join(encoded), np.uint8)), ("offsets", offsets)):
            appender = Appender(group, name, values.dtype)
            appender.append(values)
            appender.close()


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Arrays of several rows: all values in a row, and how many belong to each."""

    values: Array
    lengths: I64


#: Codes, numbers or blob indices of a plain column; values and lengths of a ragged one.
ColumnRows = Array | RaggedRows


class TableWriter:
    """Columns of one table."""

    def __init__(self, group: Any, columns: Iterable[Column], stamps: bool = True) -> None:
        self._columns: dict[str, Appender] = {}
        self._offsets: dict[str, Appender] = {}
        if stamps:
            for name, dtype in STAMPS:
                self._columns[name] = Appender(group, name, np.dtype(dtype))
        for column in columns:
            width = column.width if column.kind == "ragged" else None
            self._columns[column.name] = Appender(group, column.name, file_dtype(column), width)
            if column.kind in ("ragged", "content"):
                offsets = Appender(group, f"{column.name}.offsets", np.dtype("<i8"))
                offsets.append(np.zeros(1, np.int64))
                self._offsets[column.name] = offsets
        self._ends = dict.fromkeys(self._offsets, 0)

    def append(self, rows: Mapping[str, ColumnRows]) -> None:
        """Add rows; ``rows`` has every column of the table."""
        for name, appender in self._columns.items():
            values = rows[name]
            if isinstance(values, RaggedRows):
                appender.append(values.values)
                ends = self._ends[name] + np.cumsum(values.lengths, dtype=np.int64)
                self._offsets[name].append(ends)
                self._ends[name] = int(ends[-1]) if len(ends) else self._ends[name]
            else:
                appender.append(values)

    def close(self) -> None:
        """Write what is left."""
        for appender in (*self._columns.values(), *self._offsets.values()):
            appender.close()


@dataclass(slots=True)
class _Waiting:
    """Events of one table that are not columns yet."""

    stamps: list[tuple[int, ...]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    formats: list[int] = field(default_factory=list)  # of the pages, for snapshots and contents
    size: int = 0


class TraceWriter:
    """Writes one trace file.

    Use as a context manager: the file appears under its name when the block ends, and not at all where it
    ends with an error or Ctrl-C.

    Args:
        path: the file; its folder must exist.
        replace: replace a file of that name instead of raising :class:`WriteError`.
        mode: access rights of the file; those of any new file if left out.
    """

    def __init__(self, path: Path, replace: bool = False, mode: int | None = None) -> None:
        self.path = path
        self._new = NewFile(path, replace, mode)
        self._root = self._new.file
        try:
            with writing(path):
                self._begin()
        except BaseException:
            # No block has begun that could end with this error.
            self.discard()
            raise

    def _begin(self) -> None:
        self._root.attrs["format"] = FORMAT
        self._root.attrs["version"] = f"{MAJOR}.{MINOR}"
        self.strings = Strings()
        self._events = self._root.create_group("events")
        self._tables: dict[str, TableWriter] = {}
        self._blobs: dict[str, BlobWriter] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_bytes = 0
        self._processes: list[dict[str, Any]] = []
        self._formats: list[dict[int, int]] = []  # of each process: buffer -> string code
        self._layouts = {self.strings.code(name): layout for name, layout in LAYOUTS.items()}
        self.contents = ContentWriter(self._root, self.blobs(PAGE_BLOBS))
        self.events = 0

    def blobs(self, name: str) -> BlobWriter:
        """The blob store ``name``."""
        if name not in self._blobs:
            self._blobs[name] = BlobWriter(self._root, name)
        return self._blobs[name]

    def table(self, name: str) -> TableWriter:
        """The table ``name``; a table without rows is not written."""
        if name not in self._tables:
            self._tables[name] = TableWriter(self._events.create_group(name), TABLES[name])
        return self._tables[name]

    def add_process(self, process: Process) -> int:
        """Enter a process and return its number. Its record itself is added with :meth:`add`."""
        row = {column.name: getattr(process, column.name, column.default) for column in PROCESS_COLUMNS}
        self._processes.append(row)
        self._formats.append({})
        return len(self._processes) - 1

    def end_process(self, number: int, ended: bool, cut: str = "", journal_bytes: int = -1) -> None:
        """Say how the recording of a process ended.

        Args:
            number: from :meth:`add_process`.
            ended: it recorded its end.
            cut: what of its journal could not be read, "" where nothing is missing.
            journal_bytes: size of the journal when it was read; tells a stale file from a fresh one.
        """
        self._processes[number].update(ended=ended, cut=cut, journal_bytes=journal_bytes)

    def add(self, process: int, stamp: Stamp, event: Event) -> None:
        """Add one event. Its arrays must not change afterwards."""
        waiting = self._waiting.get(event.TABLE)
        if waiting is None:
            waiting = self._waiting[event.TABLE] = _Waiting()
        waiting.stamps.append(
            (process, stamp.seq, stamp.begin_seq, stamp.thread, stamp.stream, stamp.begin_ns, stamp.end_ns)
        )
        waiting.events.append(event)
        self.events += 1
        size = sum(getattr(event, name).nbytes for name in _ARRAYS[event.TABLE])
        waiting.size += size
        self._waiting_bytes += size + _EVENT_BYTES
        if isinstance(event, Snapshot):
            waiting.formats.append(self._formats[process].get(event.buffer, 0))
        elif isinstance(event, Content):
            waiting.formats.append(self.strings.code(event.format))
        elif isinstance(event, Buffer):
            self._formats[process][event.buffer] = self.strings.code(event.format)
        if len(waiting.events) >= _WAITING_EVENTS or waiting.size >= _WAITING_BYTES:
            self.flush(event.TABLE)
        elif self._waiting_bytes >= _ALL_WAITING_BYTES:
            for table in list(self._waiting):
                self.flush(table)

    def flush(self, table: str) -> None:
        """Turn the waiting events of ``table`` into columns; :class:`WriteError` where the disk takes them no more."""
        waiting = self._waiting.pop(table, None)
        if waiting is not None:
            with writing(self.path):
                self._write(table, waiting)

    def _write(self, table: str, waiting: _Waiting) -> None:
        self._waiting_bytes -= waiting.size + _EVENT_BYTES * len(waiting.events)
        stamps = np.array(waiting.stamps, np.int64)
        rows: dict[str, ColumnRows] = {name: stamps[:, i] for i, (name, _) in enumerate(STAMPS)}
        events = waiting.events
        for column in TABLES[table]:
            if column.kind == "content":
                rows[column.name] = self._content_rows(events, waiting.formats)
                continue
            values = [getattr(event, column.name) for event in events]
            if column.kind == "str":
                rows[column.name] = self.strings.codes(values)
            elif column.kind == "ragged":
                if column.name == "logical" and table == Snapshot.TABLE:
                    values = [_parallel(event.logical, len(event.pages)) for event in events]
                lengths = np.array([len(value) for value in values], np.int64)
                rows[column.name] = RaggedRows(np.concatenate(values), lengths)
            elif column.kind == "bulk":
                rows[column.name] = self._blob_rows(f"{table}.{column.name}", column, values)
            else:
                rows[column.name] = np.array(values, file_dtype(column))
        self.table(table).append(rows)

    def _blob_rows(self, store: str, column: Column, values: list[Array]) -> I64:
        found = np.full(len(values), -1, np.int64)
        for row, value in enumerate(values):
            if value.size:
                little = np.ascontiguousarray(value, column.dtype)
                found[row] = self.blobs(store).add(little.reshape(-1).view(np.uint8).data)
        return found

    def _content_rows(self, events: list[Any], formats: list[int]) -> RaggedRows:
        """Contents of the events' pages; runs of events of one shape are added in one go."""
        groups: list[tuple[Any, list[Pages]]] = []
        lengths = np.empty(len(events), np.int64)
        parts: list[I64] = []
        for row, (event, code) in enumerate(zip(events, formats, strict=True)):
            snapshot = isinstance(event, Snapshot)
            pages = _pages_of(event, code, self._layouts.get(code))
            lengths[row] = len(event.pages) if snapshot else len(pages.digests)
            shape = (
                code,
                None if pages.row_values is None else pages.row_values.shape[1],
                None if pages.data is None else pages.data.shape[1],
            )
            if not groups or groups[-1][0] != shape:
                groups.append((shape, []))
            groups[-1][1].append(pages)
        for _, members in groups:
            ids = self.contents.add(_join(members))
            parts.extend(np.split(ids, np.cumsum([len(member.digests) for member in members])[:-1]))
        values = [_parallel(part, int(length)) for part, length in zip(parts, lengths, strict=True)]
        return RaggedRows(np.concatenate(values), lengths)

    def close(self) -> None:
        """Write what is left and give the file its name."""
        with writing(self.path):
            for table in list(self._waiting):
                self.flush(table)
            for writer in self._tables.values():
                writer.close()
            self.contents.close()
            for store in self._blobs.values():
                store.close()
            self._write_processes()
            self.strings.write(self._root)
        self._new.publish()

    def _write_processes(self) -> None:
        writer = TableWriter(self._root.create_group("processes"), PROCESS_COLUMNS, stamps=False)
        rows: dict[str, ColumnRows] = {}
        for column in PROCESS_COLUMNS:
            values = [row[column.name] for row in self._processes]
            coded = column.kind == "str"
            rows[column.name] = self.strings.codes(values) if coded else np.array(values, file_dtype(column))
        writer.append(rows)
        writer.close()

    def discard(self) -> None:
        """Give up: nothing of the file is left."""
        self._new.discard()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            # What reads the sources tells its own errors: what is left is of this file.
            if isinstance(error, OSError):
                raise write_error(self.path, error) from error
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


_ARRAYS: dict[str, tuple[str, ...]] = {
    event.TABLE: tuple(item.name for item in schema(event) if item.array is not None) for event in EVENTS
}


def _parallel(values: Array, length: int) -> Array:
    """``values`` cut or filled with -1 to ``length``: records may be inconsistent, columns may not."""
    if len(values) == length:
        return values
    return np.concatenate([values[:length], np.full(max(0, length - len(values)), -1, values.dtype)])


def _pages_of(event: Any, code: int, layout: Layout | None) -> Pages:
    """What a snapshot or content record says about its pages; digests that it lacks are computed."""
    digests: U64 = event.digests
    values: U64 | None = getattr(event, "row_values", None)
    scales: U32 | None = getattr(event, "row_scales", None)
    count = len(digests) or len(event.data) or (0 if values is None else len(values))
    data: U8 | None = event.data if len(event.data) == count and event.data.size else None
    if values is None or len(values) != count or not values.size:
        values = None
    if values is None and data is not None and layout is not None and data.shape[1] == layout.page_bytes:
        found = digest_pages(layout, data)
        values, scales = found.row_values, found.row_scales
    if values is not None and (scales is None or scales.shape != values.shape):
        scales = np.zeros(values.shape, np.uint32)
    if not len(digests) and values is not None and scales is not None:
        digests = page_digests(values, scales)
    elif not len(digests) and data is not None:  # pages of a format that nobody told
        digests = np.frombuffer(b"".join(blob_key(page.tobytes()) for page in data), "<u8").reshape(-1, 2)
    scales = None if values is None else scales
    return Pages(code, digests, values, scales, data)


def _join(members: list[Pages]) -> Pages:
    """Pages of one shape as one batch."""
    if len(members) == 1:
        return members[0]
    values = [member.row_values for member in members if member.row_values is not None]
    scales = [member.row_scales for member in members if member.row_scales is not None]
    data = [member.data for member in members if member.data is not None]
    return Pages(
        members[0].format,
        np.concatenate([member.digests for member in members]),
        np.concatenate(values) if values else None,
        np.concatenate(scales) if scales else None,
        np.concatenate(data) if data else None,
    )
