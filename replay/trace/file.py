"""One trace file, opened for reading and checked column by column as it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.trace.blobs import BlobReader
from replay.trace.contents import ContentPart, read_part
from replay.trace.errors import DAMAGED, TraceError, reading
from replay.trace.hdf5 import checked_dataset, open_file, read, subgroup
from replay.trace.ragged import Ragged
from replay.trace.schema import (
    CHUNK_ROWS,
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

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]

TRACE_SUFFIX = ".h5"

_STAMP_TYPES = dict(STAMPS)
_DEFAULTS = {
    column.default for found in TABLES.values() for column in found if isinstance(column.default, str)
}
_MAX_JSON = 1 << 20
#: Rows are read as one slab where it holds at most so many times what is wanted, or is small anyway.
_SPREAD, _SMALL = 4, 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One recorded process.

    Attributes:
        role: "prefill", "decode" or "server".
        rank: rank within its role.
        run: random id of the run, "" in traces made by hand.
        host: equal iff clocks are comparable.
        engine: engine and version.
        mode: capture mode: "digest", "pages" or "full".
        transport: what carried the pages.
        options: effective capture options.
        environment: versions, device, architecture.
        ended: the process recorded its end.
        cut: what of its journal could not be read, "" where nothing is missing.
        journal_bytes: size of the journal when it was sealed, -1 where there was none.
    """

    role: str
    rank: int = 0
    run: str = ""
    host: str = ""
    engine: str = ""
    mode: str = ""
    transport: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    cut: str = ""
    journal_bytes: int = -1


def process_place(role: str, rank: int, run: str) -> tuple[int, str, int, str]:
    """Sort key of a process: prefill, decode, others; then by rank and run."""
    return {"prefill": 0, "decode": 1}.get(role, 2), role, rank, run


class TraceFile:
    """An open trace file. Everything is read when it is asked for, and only then.

    Raises :class:`TraceError` for a file that is no trace, is damaged, or is of another major version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)
        self._root = open_file(path)
        self._rows: dict[str, int] = {}
        self._groups: dict[str, Any] = {}
        self._stores: dict[str, BlobReader | None] = {}
        self._arrays: dict[tuple[str, str], tuple[Any | None, I64]] = {}
        self._slabs: dict[tuple[str, str], tuple[int, Array]] = {}
        try:
            self.version = self._check_version()
            self._events = subgroup(self._root, "events", self.place)
            self._strings = self._read_strings()
            self.processes = self._read_processes()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with reading(self.place):
            self._root.close()

    def _check_version(self) -> str:
        with reading(self.place, "Is it a file of another program?"):
            found, version = self._root.attrs.get("format"), self._root.attrs.get("version")
            if found != FORMAT or not isinstance(version, str):
                raise TraceError("it is an HDF5 file but no kv-replay trace", self.place, "Check the path")
            major, _, minor = version.partition(".")
            if not (major.isdigit() and minor.isdigit()):
                raise TraceError(f"its version is {version[:40]!r}", self.place, DAMAGED)
            if int(major) != MAJOR:
                raise TraceError(
                    f"it is a trace of version {version[:40]}, and this program reads {MAJOR}.x",
                    self.place,
                    "Install the kv-replay that wrote it, or seal its journal with this one",
                )
            return version

    @property
    def newer(self) -> bool:
        """Whether a later minor version wrote it: it may hold more than is read here."""
        return int(self.version.partition(".")[2]) > MINOR

    def _read_strings(self) -> npt.NDArray[Any]:
        place = f"{self.place}/strings"
        group = subgroup(self._root, "strings", self.place)
        if group is None:
            raise TraceError("its strings are missing", place, DAMAGED)
        data = checked_dataset(group, "bytes", place, np.dtype("|u1"))
        ends = checked_dataset(group, "offsets", place, np.dtype("<i8"))
        if data is None or ends is None:
            raise TraceError("its strings are missing", place, DAMAGED)
        text = read(data, f"{place}/bytes").tobytes()
        offsets = read(ends, f"{place}/offsets")
        check_offsets(offsets, len(text), len(offsets) - 1, f"{place}/offsets")
        bounds = offsets.tolist()
        with reading(f"{place}/bytes"):
            found = [text[a:b].decode("utf-8") for a, b in pairwise(bounds)]
        # Defaults stand in for columns that a file of an older minor version lacks.
        found += sorted(_DEFAULTS - set(found))
        out = np.empty(len(found), object)
        out[:] = found
        return out

    @property
    def strings(self) -> npt.NDArray[Any]:
        """The string table: object array of ``str``."""
        return self._strings

    def _read_processes(self) -> list[ProcessInfo]:
        place = f"{self.place}/processes"
        group = subgroup(self._root, "processes", self.place)
        if group is None:
            raise TraceError("it says nothing about its processes", place, DAMAGED)
        found: dict[str, list[Any]] = {}
        length = None
        for column in PROCESS_COLUMNS:
            dataset = checked_dataset(group, column.name, place, file_dtype(column))
            if dataset is None:
                if column.default is None:
                    raise TraceError(f"its column {column.name} is missing", place, DAMAGED)
                found[column.name] = [column.default] * (length or 0)
                continue
            values = read(dataset, f"{place}/{column.name}")
            length = len(values) if length is None else length
            if len(values) != length:
                raise TraceError("its columns have different lengths", place, DAMAGED)
            if column.kind == "str":
                values = self._strings[self._checked_codes(values, f"{place}/{column.name}")]
            found[column.name] = values.astype(bool).tolist() if column.kind == "bool" else values.tolist()
        processes = []
        for row in range(length or 0):
            fields = {name: values[row] for name, values in found.items()}
            for name in ("options", "environment"):
                fields[name] = _json_object(fields[name])
            processes.append(ProcessInfo(**fields))
        return processes

    def _checked_codes(self, codes: Array, place: str) -> Array:
        return check_range(codes, 0, len(self._strings), "a string", place)

    def extra(self) -> list[str]:
        """Groups and columns that this version does not know: they are ignored."""
        known = {"events", "strings", "processes", "contents", "blobs"}
        with reading(self.place):
            found = [f"/{name}" for name in self._root if name not in known]
            events = {} if self._events is None else self._events
            for table in events:
                if table not in TABLES:
                    found.append(f"/events/{table}")
                    continue
                columns = {name for name, _ in STAMPS} | {column.name for column in TABLES[table]}
                more = [name for name in events[table] if name.removesuffix(".offsets") not in columns]
                found += [f"/events/{table}/{name}" for name in more]
        return found

    def _group(self, table: str) -> Any | None:
        if table not in self._groups:
            inside = f"{self.place}/events"
            self._groups[table] = None if self._events is None else subgroup(self._events, table, inside)
        return self._groups[table]

    def rows(self, table: str) -> int:
        """Number of rows of ``table``; 0 where the file has no such table."""
        if table not in self._rows:
            group = self._group(table)
            place = f"{self.place}/events/{table}"
            dtype = np.dtype(_STAMP_TYPES["seq"])
            dataset = None if group is None else checked_dataset(group, "seq", place, dtype)
            if group is not None and dataset is None:
                raise TraceError("its column seq is missing", place, DAMAGED)
            self._rows[table] = 0 if dataset is None else int(dataset.shape[0])
        return self._rows[table]

    def stamp(self, table: str, name: str) -> Array:
        """A stamp column of ``table``."""
        place = f"{self.place}/events/{table}"
        values = self._values(table, name, np.dtype(_STAMP_TYPES[name]), None, None)
        if name == "process":
            check_range(values, 0, len(self.processes), "a process", f"{place}/{name}")
        return values

    def plain(self, table: str, column: Column) -> Array:
        """A plain column: numbers, string codes, or blob indices of a bulk column."""
        default: Any = column.default
        if column.kind == "str" and isinstance(default, str):
            default = int(np.flatnonzero(self._strings == default)[0])
        elif column.kind == "bulk":
            default = -1
        values = self._values(table, column.name, file_dtype(column), None, default)
        place = f"{self.place}/events/{table}/{column.name}"
        if column.kind == "str":
            self._checked_codes(values, place)
        elif column.kind == "bulk":
            store = self.blobs(f"{table}.{column.name}")
            check_range(values, -1, 0 if store is None else len(store), "a blob", place)
        return values

    def ragged(self, table: str, column: Column) -> tuple[Array, I64]:
        """A ragged column: flat values and offsets, ``int64[rows + 1]``."""
        dataset, offsets = self._ragged(table, column)
        place = f"{self.place}/events/{table}/{column.name}"
        values = self._empty(column) if dataset is None else read(dataset, place)
        if column.kind == "content":
            check_range(values, -1, 0 if self.contents is None else len(self.contents), "a content", place)
        return values, offsets

    def ragged_lengths(self, table: str, column: Column) -> I64:
        """How many values each row of a ragged column has."""
        return np.diff(self._ragged(table, column)[1])

    def ragged_row(self, table: str, column: Column, row: int) -> Array:
        """The array of one row of a ragged column that is no content column; only the chunks that hold it are read."""
        dataset, offsets = self._ragged(table, column)
        if dataset is None:
            return self._empty(column)
        start, stop = int(offsets[row]), int(offsets[row + 1])
        low, slab = self._slabs.get((table, column.name), (0, None))
        if slab is None or start < low or stop > low + len(slab):
            # HDF5 decodes whole chunks: the rows beside this one, which are mostly asked for next, cost nothing.
            low = start - start % CHUNK_ROWS
            high = min(stop + -stop % CHUNK_ROWS, int(offsets[-1]))
            slab = read(dataset, f"{self.place}/events/{table}/{column.name}", low, high)
            self._slabs[table, column.name] = low, slab
        return slab[start - low : stop - low]

    def ragged_rows(self, table: str, column: Column, rows: I64) -> Ragged:
        """The arrays of some rows of a ragged column that is no content column, in their order."""
        dataset, offsets = self._ragged(table, column)
        if dataset is None:
            return Ragged(self._empty(column), np.zeros(len(rows) + 1, np.int64))
        place = f"{self.place}/events/{table}/{column.name}"
        first, last = int(rows.min()), int(rows.max()) + 1
        low, high = int(offsets[first]), int(offsets[last])
        wanted = int((offsets[rows + 1] - offsets[rows]).sum())
        if high - low <= _SPREAD * wanted + _SMALL:
            slab = Ragged(read(dataset, place, low, high), offsets[first : last + 1] - low)
            return slab.take(rows - first)
        parts = [read(dataset, place, int(offsets[row]), int(offsets[row + 1])) for row in rows.tolist()]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return Ragged(np.concatenate(parts), ends)

    def _empty(self, column: Column) -> Array:
        width = column.width if column.kind == "ragged" else None
        return np.zeros((0,) if width is None else (0, width), file_dtype(column).newbyteorder("="))

    def _ragged(self, table: str, column: Column) -> tuple[Any | None, I64]:
        """Dataset of the flat values, None where the file lacks the column, and the checked offsets."""
        key = (table, column.name)
        if key not in self._arrays:
            rows, inside = self.rows(table), f"{self.place}/events/{table}"
            group = self._group(table)
            width = column.width if column.kind == "ragged" else None
            dataset = None
            if group is not None:
                dataset = checked_dataset(group, column.name, inside, file_dtype(column), width)
            offsets = np.zeros(rows + 1, np.int64)
            if dataset is not None:
                place = f"{inside}/{column.name}.offsets"
                ends = checked_dataset(group, f"{column.name}.offsets", inside, np.dtype("<i8"))
                if ends is None:
                    raise TraceError("its offsets are missing", f"{inside}/{column.name}", DAMAGED)
                offsets = read(ends, place)
                check_offsets(offsets, int(dataset.shape[0]), rows, place)
            self._arrays[key] = dataset, offsets
        return self._arrays[key]

    def _values(self, table: str, name: str, dtype: np.dtype[Any], width: int | None, default: Any) -> Array:
        place = f"{self.place}/events/{table}"
        rows = self.rows(table)
        group = self._group(table)
        dataset = None if group is None else checked_dataset(group, name, place, dtype, width)
        if dataset is None:
            if rows and default is None:
                raise TraceError(f"its column {name} is missing", place, DAMAGED)
            return np.full(rows, 0 if default is None else default, dtype.newbyteorder("="))
        if dataset.shape[0] != rows:
            what = f"it has {dataset.shape[0]} rows, the table has {rows}"
            raise TraceError(what, f"{place}/{name}", DAMAGED)
        return read(dataset, f"{place}/{name}")

    def blobs(self, store: str) -> BlobReader | None:
        """The blob store ``store``, None where the file has none."""
        if store not in self._stores:
            group = subgroup(self._root, "blobs", self.place)
            inside = None if group is None else subgroup(group, store, f"{self.place}/blobs")
            self._stores[store] = None if inside is None else BlobReader(group, store, f"{self.place}/blobs")
        return self._stores[store]

    @cached_property
    def contents(self) -> ContentPart | None:
        """The page contents, None where the file has none."""
        return read_part(self._root, self.place, len(self._strings), self.blobs(PAGE_BLOBS))


def check_offsets(offsets: Array, values: int, rows: int, place: str) -> None:
    """``offsets`` cut ``values`` values into ``rows`` rows."""
    if len(offsets) != rows + 1 or len(offsets) == 0:
        raise TraceError(f"{len(offsets)} offsets do not fit {rows} rows", place, DAMAGED)
    if offsets[0] != 0 or offsets[-1] != values or (offsets[1:] < offsets[:-1]).any():
        raise TraceError(f"the offsets do not cut {values} values into rows", place, DAMAGED)


def check_range(values: Array, low: int, high: int, what: str, place: str) -> Array:
    """Every value lies in ``low..high`` (half-open)."""
    if len(values) and (int(values.min()) < low or int(values.max()) >= high):
        bad = int(np.argmax((values < low) | (values >= high)))
        raise TraceError(f"row {bad} refers to {what} {values[bad]} of {high}", place, DAMAGED)
    return values


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object in ``text``; anything else is nothing known."""
    try:
        found = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
