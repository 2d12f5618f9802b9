"""Tables of a trace: columns over all of its files, read when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.trace.errors import DAMAGED, TraceError
from replay.trace.file import TraceFile
from replay.trace.ragged import Ragged
from replay.trace.schema import STAMPS, TABLES, Column
from replay.words import counted

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_STAMPS = {name for name, _ in STAMPS}


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a trace and how its numbers translate."""

    file: TraceFile
    process_offset: int  #: added to the file's process numbers
    codes: I32  #: from the file's string codes to the trace's
    index: int  #: its place among the trace's files


class Table:
    """One table of a trace. Rows are ordered by (process, seq).

    ``table["name"]`` is a plain column or a stamp column ("process", "seq", "begin_seq", "thread", "stream",
    "begin_ns", "end_ns"); ``KeyError`` names the columns there are. Columns are read once and kept.
    """

    def __init__(self, name: str, sources: list[Source], strings: Array, maps: Any) -> None:
        """``maps`` is called for the translation of content indices when a content column is read."""
        self.name = name
        self._columns = {column.name: column for column in TABLES[name]}
        self._sources = sources
        self._strings = strings
        self._maps = maps
        self._counts = [source.file.rows(name) for source in sources]
        self._kept: dict[str, Any] = {}

    def __len__(self) -> int:
        return sum(self._counts)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, stamp columns first."""
        return (*(name for name, _ in STAMPS), *self._columns)

    def _column(self, name: str, *kinds: str) -> Column:
        column = self._columns.get(name)
        if column is None or column.kind not in kinds:
            fits = [item.name for item in self._columns.values() if item.kind in kinds]
            raise KeyError(f"table {self.name} has no {' or '.join(kinds)} column {name!r}; it has {fits}")
        return column

    @cached_property
    def _order(self) -> I64 | None:
        """Where each row is in the files; None where they have the right order already."""
        process = self._stamp("process")
        seq = self._stamp("seq")
        if len(seq) < 2:
            return None
        later = (process[1:] > process[:-1]) | ((process[1:] == process[:-1]) & (seq[1:] >= seq[:-1]))
        return None if later.all() else np.lexsort((seq, process))

    def _stamp(self, name: str) -> Array:
        """A stamp column in the order of the files."""
        parts = []
        for source in self._sources:
            part = source.file.stamp(self.name, name)
            parts.append(part + np.int32(source.process_offset) if name == "process" else part)
        return _joined(parts, np.dtype(dict(STAMPS)[name]).newbyteorder("="))

    def _ordered(self, values: Array) -> Array:
        return values if self._order is None else values[self._order]

    def __getitem__(self, name: str) -> Array:
        if name in self._kept:
            found: Array = self._kept[name]
            return found
        if name in _STAMPS:
            found = self._ordered(self._stamp(name))
        elif self._column(name, "int", "float", "bool", "str").kind == "str":
            found = self._strings[self.codes(name)]
        else:
            column = self._columns[name]
            dtype = {"int": np.int64, "float": np.float64, "bool": np.bool_}[column.kind]
            parts: list[Array] = [source.file.plain(self.name, column) for source in self._sources]
            found = self._ordered(_joined(parts, np.dtype(dtype))).astype(dtype, copy=False)
        self._kept[name] = found
        return found

    def codes(self, name: str) -> I32:
        """Codes of a string column into ``Trace.strings``, ``int32[rows]``; compare these, not strings."""
        column = self._column(name, "str")
        key = f"{name}.codes"
        if key not in self._kept:
            parts = [source.codes[source.file.plain(self.name, column)] for source in self._sources]
            self._kept[key] = self._ordered(_joined(parts, np.dtype(np.int32)))
        found: I32 = self._kept[key]
        return found

    def ragged(self, name: str) -> Ragged:
        """A column of arrays that is not bulk; ``content`` of snapshots holds indices into ``Trace.contents``."""
        column = self._column(name, "ragged", "content")
        if name not in self._kept:
            self._kept[name] = self._read_ragged(column)
            if column.kind == "content" and "pages" in self._columns:
                self._check_parallel(self._kept[name])
        found: Ragged = self._kept[name]
        return found

    def lengths(self, name: str) -> I64:
        """Number of values of each row of a ragged column, ``int64[rows]``; the values are not read."""
        column = self._column(name, "ragged")
        if name in self._kept:
            whole: Ragged = self._kept[name]
            return whole.lengths
        parts: list[Array] = [source.file.ragged_lengths(self.name, column) for source in self._sources]
        return self._ordered(_joined(parts, np.dtype(np.int64)))

    def array(self, name: str, row: int) -> Array:
        """The array of one row of a ragged column, read alone where the column as a whole was not asked for."""
        column = self._column(name, "ragged")
        if name in self._kept:
            whole: Ragged = self._kept[name]
            return whole[row]
        source, at = self._place(row)
        return source.file.ragged_row(self.name, column, at)

    def arrays(self, name: str, low: int, high: int) -> Ragged:
        """The arrays of rows ``low..high`` (half-open) of a ragged column; of the rest as little as can be is read."""
        column = self._column(name, "ragged")
        if name in self._kept:
            whole: Ragged = self._kept[name]
            return whole.take(np.arange(low, high))
        empty = np.zeros((0,) if column.width is None else (0, column.width), column.dtype)
        parts: list[tuple[I64, Ragged]] = []
        places = np.arange(low, high) if self._order is None else self._order[low:high]
        for source, count in zip(self._sources, self._counts, strict=True):
            mine = np.flatnonzero((places >= 0) & (places < count))
            if len(mine):
                parts.append((mine, source.file.ragged_rows(self.name, column, places[mine])))
            places = places - count
        numbers = np.concatenate([np.zeros(0, np.int64), *(mine for mine, _ in parts)])
        values = np.concatenate([empty, *(part.values for _, part in parts)])
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(part.lengths for _, part in parts)]))
        found = Ragged(values.astype(empty.dtype.newbyteorder("="), copy=False), ends)
        return found.take(np.argsort(numbers, kind="stable"))

    def _read_ragged(self, column: Column) -> Ragged:
        values, ends, base = [], [np.zeros(1, np.int64)], 0
        for source in self._sources:
            part, offsets = source.file.ragged(self.name, column)
            if column.kind == "content":
                mapped = self._maps()[source.index]
                # One entry more for -1, which is the last.
                part = np.append(mapped, -1)[part]
            values.append(part)
            ends.append(offsets[1:] + base)
            base += len(part)
        width = column.width if column.kind == "ragged" else None
        dtype = np.dtype(column.dtype).newbyteorder("=")
        empty = np.zeros((0,) if width is None else (0, width), dtype)
        joined = values[0] if len(values) == 1 else np.concatenate([empty, *values])
        del values
        found = Ragged(joined, np.concatenate(ends))
        return found if self._order is None else found.take(self._order)

    def _check_parallel(self, content: Ragged) -> None:
        """A snapshot has one content and one logical index a page."""
        for name in ("pages", "logical"):
            if not np.array_equal(self.ragged(name).offsets, content.offsets):
                raise TraceError(
                    f"pages, logical pages and contents of snapshots differ in number ({name})",
                    ", ".join(source.file.place for source in self._sources),
                    DAMAGED,
                )

    def _place(self, row: int) -> tuple[Source, int]:
        """The file that holds ``row``, and its row there."""
        if not 0 <= row < len(self):
            raise IndexError(f"table {self.name} has {counted(len(self), 'row')}, not row {row}")
        at = row if self._order is None else int(self._order[row])
        for source, count in zip(self._sources, self._counts, strict=True):
            if at < count:
                return source, at
            at -= count
        raise IndexError(row)

    def bulk(self, name: str, row: int) -> Array:
        """Payload of one row, in the shape of its field; empty where it was not recorded."""
        column = self._column(name, "bulk")
        source, at = self._place(row)
        blob = int(self._blobs(source, column)[at])
        dtype = np.dtype(column.dtype)
        store = source.file.blobs(f"{self.name}.{name}")
        payload = b"" if blob < 0 or store is None else store.get(blob)
        width = column.width or 1
        if len(payload) % (dtype.itemsize * width):
            raise TraceError(
                f"blob {blob} has {len(payload)} bytes, which are no whole number of values of {self.name}.{name}",
                source.file.place,
                DAMAGED,
            )
        found = np.frombuffer(payload, dtype).astype(dtype.newbyteorder("="), copy=False)
        return found if column.width is None else found.reshape(-1, column.width)

    def bulk_size(self, name: str) -> I64:
        """Number of elements recorded in each row, ``int64[rows]``; 0 where it was not. Reads no payload."""
        column = self._column(name, "bulk")
        itemsize = np.dtype(column.dtype).itemsize
        parts = []
        for source in self._sources:
            blob = self._blobs(source, column)
            size = np.zeros(len(blob), np.int64)
            store = source.file.blobs(f"{self.name}.{name}")
            if store is not None:
                there = np.flatnonzero(blob >= 0)
                size[there] = store.lengths[blob[there]] // itemsize
            parts.append(size)
        return self._ordered(_joined(parts, np.dtype(np.int64)))

    def _blobs(self, source: Source, column: Column) -> I64:
        key = f"{column.name}.{source.index}"
        if key not in self._kept:
            self._kept[key] = source.file.plain(self.name, column)
        found: I64 = self._kept[key]
        return found


def _joined(parts: list[Array], dtype: np.dtype[Any]) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
