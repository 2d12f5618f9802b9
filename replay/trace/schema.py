"""What the columns of a trace are, derived from the event records.

Two records change on their way into a trace: a snapshot's digests, row digests and bytes become one ragged
column ``content`` (index into ``/contents``, parallel to ``pages``), and so do those of a content record.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from capture_hooks.events import EVENTS, Content, Snapshot
from capture_hooks.records import ArraySpec, Event, schema

FORMAT = "kv-replay-trace"
#: A minor version may only add groups, datasets and attributes; anything else needs a new major version.
MAJOR, MINOR = 1, 2

#: Rows of a chunk of an event column or of row digests; bytes of a chunk of blobs.
CHUNK_ROWS = 16_384
CHUNK_BYTES = 256 * 1024
#: What a reader accepts. A chunk is decoded whole, and a column is read whole.
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_COLUMN_BYTES = 2 * 1024 * 1024 * 1024

#: HDF5 filter id registered for Zstandard.
ZSTD_FILTER = 32015

#: Columns that every event table has, from the record's stamp.
STAMPS: tuple[tuple[str, str], ...] = (
    ("process", "<i4"),
    ("seq", "<i8"),
    ("begin_seq", "<i8"),
    ("thread", "<i8"),
    ("stream", "<i8"),
    ("begin_ns", "<i8"),
    ("end_ns", "<i8"),
)

Kind = Literal["int", "float", "bool", "str", "ragged", "bulk", "content"]
_SCALARS: dict[str, str] = {"int": "<i8", "float": "<f8", "bool": "|u1", "str": "<i4"}
_CONTENT_FIELDS = {"digests", "row_values", "row_scales", "data"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of an event table.

    Attributes:
        name: name of the record's field.
        kind: how it is kept. ``str`` as codes into ``/strings``; ``ragged`` as flat values and
            ``<name>.offsets``; ``bulk`` as an index into the blob store ``<table>.<name>``; ``content`` as
            a ragged index into ``/contents``.
        dtype: type in the file; for ``bulk`` the type of the payload, which is indexed by int64.
        width: elements of one value of a ragged or bulk column, ``None`` for plain ones.
        default: value for files of an older minor version that lack the column; ``None`` if there is none.
    """

    name: str
    kind: Kind
    dtype: str
    width: int | None = None
    default: int | float | bool | str | None = None


def _array_column(name: str, spec: ArraySpec) -> Column:
    width = spec.shape[1] if len(spec.shape) > 1 else None
    return Column(name, "bulk" if spec.bulk else "ragged", spec.dtype, width)


def columns(event: type[Event]) -> tuple[Column, ...]:
    """The columns of the table of ``event``, without the stamp columns."""
    defaults: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(event)}  # type: ignore[arg-type]
    found: list[Column] = []
    folds = event in (Snapshot, Content)
    for item in schema(event):
        if folds and item.name in _CONTENT_FIELDS:
            continue
        if item.array is not None:
            found.append(_array_column(item.name, item.array))
            continue
        default = defaults[item.name]
        missing = default is dataclasses.MISSING
        kind: Kind = item.type  # type: ignore[assignment]  # int, float, bool or str
        found.append(Column(item.name, kind, _SCALARS[item.type], None, None if missing else default))
    if folds:
        found.append(Column("content", "content", "<i8"))
    return tuple(found)


TABLES: dict[str, tuple[Column, ...]] = {event.TABLE: columns(event) for event in EVENTS}

#: ``/processes``: the fields of the process record, and how its recording ended.
PROCESS_COLUMNS: tuple[Column, ...] = (
    *columns(EVENTS[0]),
    Column("ended", "bool", "|u1", None, False),
    Column("cut", "str", "<i4", None, ""),
    Column("journal_bytes", "int", "<i8", None, -1),
)

#: ``/contents``: columns with one value a content.
CONTENT_COLUMNS: tuple[Column, ...] = (
    Column("digests", "ragged", "<u8", 2),
    Column("format", "str", "<i4"),
    Column("rows", "int", "<i4"),
    Column("row_start", "int", "<i8"),
    Column("row_check", "int", "<u8"),
    Column("blob", "int", "<i8"),
)

#: Blob store of page bytes.
PAGE_BLOBS = "contents.data"


def blob_stores() -> tuple[str, ...]:
    """Names of all blob stores: one for page bytes, one for each bulk column."""
    bulk = [
        (table, column.name) for table, found in TABLES.items() for column in found if column.kind == "bulk"
    ]
    return (PAGE_BLOBS, *(f"{table}.{name}" for table, name in bulk))


def file_dtype(column: Column) -> np.dtype[Any]:
    """Type of the column's own dataset (of the flat values for ragged columns)."""
    return np.dtype("<i8" if column.kind == "bulk" else column.dtype)


def spec_tables() -> str:
    """The event tables as Markdown, for SPEC.md (a test compares the two)."""
    lines: list[str] = []
    for table, found in TABLES.items():
        lines += [f"### `/events/{table}`", "", "| column | kept as | type |", "|---|---|---|"]
        for column in found:
            shape = f"[n, {column.width}]" if column.width else "[n]"
            kept = column.dtype if column.kind in _SCALARS else f"{column.dtype}{shape}"
            lines.append(f"| `{column.name}` | {column.kind} | `{kept}` |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(spec_tables())
