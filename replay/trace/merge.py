"""Merging: several traces become one file, and equal page contents one content."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Process, schema
from replay.trace.content_writer import Pages
from replay.trace.errors import TraceError
from replay.trace.reader import Table, Trace, open_trace
from replay.trace.schema import STAMPS, TABLES, Column
from replay.trace.writer import ColumnRows, RaggedRows, TraceWriter

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


def copy(trace: Trace, writer: TraceWriter, progress: Progress | None = None) -> None:
    """Copy all of ``trace``. Memory: the plain columns of one table, and some pages at a time."""
    names = [item.name for item in schema(Process)]
    for info in trace.processes:
        fields: dict[str, Any] = {name: getattr(info, name) for name in names}
        for name in ("options", "environment"):
            fields[name] = json.dumps(fields[name]) if fields[name] else ""
        number = writer.add_process(Process(**fields))
        writer.end_process(number, info.ended, info.cut, info.journal_bytes)
    codes = writer.strings.codes(trace.strings)
    contents = _copy_contents(trace, writer, codes, progress)
    for name in TABLES:
        # A table of its own, so that its columns do not stay in memory.
        table = trace.fresh_table(name)
        if len(table):
            _copy_table(table, writer, codes, contents, progress)


def _copy_contents(
    trace: Trace, writer: TraceWriter, codes: npt.NDArray[np.int32], progress: Progress | None
) -> I64:
    """Copy the page contents; returns the new index of each."""
    contents = trace.contents
    new = np.full(len(contents), -1, np.int64)
    formats = codes[trace.content_formats()]
    sizes = contents.data_sizes()
    for start in range(0, len(contents), _BATCH):
        if progress is not None:
            progress("copying page contents", start, len(contents))
        ids = np.arange(start, min(start + _BATCH, len(contents)))
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


def _copy_table(
    table: Table,
    writer: TraceWriter,
    codes: npt.NDArray[np.int32],
    contents: I64,
    progress: Progress | None,
) -> None:
    if progress is not None:
        progress(f"copying {table.name}, records", 0, len(table))
    rows: dict[str, ColumnRows] = {name: table[name] for name, _ in STAMPS}
    for column in TABLES[table.name]:
        if column.kind == "str":
            rows[column.name] = codes[table.codes(column.name)]
        elif column.kind in ("ragged", "content"):
            ragged = table.ragged(column.name)
            values = ragged.values if column.kind == "ragged" else np.append(contents, -1)[ragged.values]
            rows[column.name] = RaggedRows(values, ragged.lengths)
        elif column.kind == "bulk":
            rows[column.name] = _copy_bulk(table, column, writer)
        else:
            rows[column.name] = table[column.name]
    writer.table(table.name).append(rows)
    writer.events += len(table)


def _copy_bulk(table: Table, column: Column, writer: TraceWriter) -> I64:
    found = np.full(len(table), -1, np.int64)
    store = writer.blobs(f"{table.name}.{column.name}") if table.bulk_size(column.name).any() else None
    for row in np.flatnonzero(table.bulk_size(column.name)):
        if store is not None:
            payload = np.ascontiguousarray(table.bulk(column.name, int(row)), column.dtype)
            found[row] = store.add(payload.reshape(-1).view(np.uint8).data)
    return found
