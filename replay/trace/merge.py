"""Merging: several traces become one file, and equal page contents one content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Process
from capture_hooks.records import schema
from replay.trace.content_writer import Pages
from replay.trace.errors import TraceError
from replay.trace.reader import ProcessInfo, Ragged, Table, Trace, open_trace
from replay.trace.schema import STAMPS, TABLES, Column
from replay.trace.writer import ColumnRows, RaggedRows, TraceWriter

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]

#: Contents copied at once: 4,096 pages of 16 KiB = 64 MiB.
_BATCH = 4096


def merge(
    paths: Sequence[Path], out: Path, *, replace: bool = False, progress: Progress | None = None
) -> tuple[str, ...]:
    """Write everything in ``paths`` (files, journals, folders) into the one trace file ``out``.

    The order of ``paths`` does not matter. Returns what could not be used, in words.
    """
    with open_trace(*paths) as trace:
        if any(out.exists() and out.samefile(path) for path in trace.paths):
            raise TraceError("it is one of the traces to be merged", str(out), "Choose another name")
        with TraceWriter(out, replace) as writer:
            copy(trace, writer, progress)
        return trace.problems


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a trace is copied.

    Attributes:
        rows: for each table that loses records, the rows that stay.
        payload: keep page bytes, keys, queries and logits.
        looks: which page looks of all snapshots stay, ``bool[page looks]``; all where None.
        payload_of: for each table that keeps its payload for some records only, ``bool[rows]``.
    """

    rows: Mapping[str, I64]
    payload: bool = True
    looks: Bool | None = None
    payload_of: Mapping[str, Bool] = field(default_factory=dict)

    def of(self, table: Table) -> I64:
        """The rows of ``table`` that stay."""
        return self.rows.get(table.name, np.arange(len(table)))

    def arrays(self, table: Table, name: str) -> Ragged:
        """The arrays of a column that stay; those of snapshots have one value a page."""
        stay, column = self.of(table), table.ragged(name)
        found = column.take(stay)
        if self.looks is None or table.name != "snapshot":
            return found
        looks = Ragged(self.looks, column.offsets).take(stay)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(looks.values)])
        return Ragged(found.values[looks.values], ends[looks.offsets])


class Rewrite:
    """How records change on their way into the copy; this one changes nothing."""

    def process(self, number: int, info: ProcessInfo) -> ProcessInfo:
        """What the copy says of process ``number``."""
        return info

    def text(self, place: str, text: str) -> str:
        """A text of the column ``place``, which is ``table.column``."""
        return text

    def numbers(self, table: Table, column: str, rows: I64, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers of ``rows`` of a column; of a ragged one all values in a row."""
        return values


_ALL = Selection({})
_AS_IS = Rewrite()


@dataclass(frozen=True, slots=True)
class _Copy:
    """What all parts of one copy need."""

    trace: Trace
    writer: TraceWriter
    selection: Selection
    rewrite: Rewrite
    progress: Progress | None

    def strings(self, place: str, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Codes in the new file. Only strings that are used go there: those of records left out may say anything."""
        used, inverse = np.unique(codes, return_inverse=True)
        texts = [self.rewrite.text(place, str(self.trace.strings[code])) for code in used.tolist()]
        return self.writer.strings.codes(texts)[inverse.reshape(-1)]

    def tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


def copy(
    trace: Trace,
    writer: TraceWriter,
    progress: Progress | None = None,
    selection: Selection = _ALL,
    rewrite: Rewrite = _AS_IS,
) -> None:
    """Copy ``trace``, or what ``selection`` says. Memory: the plain columns of one table, and some pages at a time."""
    names = [item.name for item in schema(Process)]
    for index, told in enumerate(trace.processes):
        info = rewrite.process(index, told)
        fields: dict[str, Any] = {name: getattr(info, name) for name in names}
        for name in ("options", "environment"):
            fields[name] = json.dumps(fields[name]) if fields[name] else ""
        number = writer.add_process(Process(**fields))
        # A part of a journal must not pass for the sealed whole of it.
        writer.end_process(number, info.ended, info.cut, -1 if selection.rows else info.journal_bytes)
    whole = _Copy(trace, writer, selection, rewrite, progress)
    contents = _copy_contents(whole)
    for name in TABLES:
        # A table of its own, so that its columns do not stay in memory.
        table = trace.fresh_table(name)
        if len(table):
            _copy_table(whole, table, contents)


def _used_contents(trace: Trace, selection: Selection) -> I64:
    """Contents that the copied records refer to."""
    if not selection.rows:
        return np.arange(len(trace.contents))
    found = [np.zeros(0, np.int64)]
    for name, columns in TABLES.items():
        if any(column.kind == "content" for column in columns):
            table = trace.fresh_table(name)
            found.append(selection.arrays(table, "content").values)
    used = np.unique(np.concatenate(found))
    return used[used >= 0]


def _copy_contents(whole: _Copy) -> I64:
    """Copy the page contents; returns the new index of each, -1 where it was not copied."""
    trace, writer, selection = whole.trace, whole.writer, whole.selection
    contents = trace.contents
    new = np.full(len(contents), -1, np.int64)
    used = _used_contents(trace, selection)
    formats = np.zeros(len(contents), np.int32)
    formats[used] = whole.strings("content.format", trace.content_formats()[used])
    sizes = contents.data_sizes() if selection.payload else np.full(len(contents), -1, np.int64)
    for start in range(0, len(used), _BATCH):
        whole.tell("copying page contents", start, len(used))
        ids = used[start : start + _BATCH]
        shapes = np.column_stack([formats[ids], contents.rows[ids], sizes[ids]])
        kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
        for number, (code, rows, size) in enumerate(kinds):
            chosen = ids[kind.reshape(-1) == number]
            pages = Pages(
                int(code),
                contents.digests[chosen],
                contents.row_values(chosen) if rows else None,
                contents.row_scales(chosen) if rows else None,
                contents.data(chosen) if size >= 0 else None,
            )
            new[chosen] = writer.contents.add(pages)
    return new


def _copy_table(whole: _Copy, table: Table, contents: I64) -> None:
    writer, selection, rewrite = whole.writer, whole.selection, whole.rewrite
    whole.tell(f"copying {table.name}, records", 0, len(table))
    stay = selection.of(table)
    rows: dict[str, ColumnRows] = {
        name: rewrite.numbers(table, name, stay, table[name][stay]) for name, _ in STAMPS
    }
    for column in TABLES[table.name]:
        if column.kind == "str":
            rows[column.name] = whole.strings(f"{table.name}.{column.name}", table.codes(column.name)[stay])
        elif column.kind in ("ragged", "content"):
            ragged = selection.arrays(table, column.name)
            values = ragged.values if column.kind == "ragged" else np.append(contents, -1)[ragged.values]
            if column.kind == "ragged":
                values = rewrite.numbers(table, column.name, stay, values)
            rows[column.name] = RaggedRows(values, ragged.lengths)
        elif column.kind == "bulk":
            kept = selection.payload_of.get(table.name, np.ones(len(table), bool)) & selection.payload
            rows[column.name] = _copy_bulk(table, column, writer, stay, kept)
        else:
            rows[column.name] = rewrite.numbers(table, column.name, stay, table[column.name][stay])
    writer.table(table.name).append(rows)
    writer.events += len(stay)


def _copy_bulk(table: Table, column: Column, writer: TraceWriter, stay: I64, payload: Bool) -> I64:
    found = np.full(len(stay), -1, np.int64)
    sizes = np.where(payload, table.bulk_size(column.name), 0)[stay]
    for row in np.flatnonzero(sizes):
        values = np.ascontiguousarray(table.bulk(column.name, int(stay[row])), column.dtype)
        found[row] = writer.blobs(f"{table.name}.{column.name}").add(values.reshape(-1).view(np.uint8).data)
    return found
