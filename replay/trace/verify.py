"""Checking a trace file: every chunk, every digest, every reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages, page_digests
from capture_hooks.layouts import LAYOUTS
from replay.trace.contents import Contents, row_check
from replay.trace.errors import TraceError
from replay.trace.file import TraceFile
from replay.trace.schema import STAMPS, TABLES, blob_stores
from replay.trace.table import Source, Table

Progress = Callable[[str, int, int], None]
I64 = npt.NDArray[np.int64]

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a trace file, and where."""

    where: str
    what: str


@dataclass(slots=True)
class Checked:
    """What :func:`verify` found, and how much it looked at."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
    todo: str = (
        "Seal its journal again, or copy it once more from where it is whole"  #: what to do about them
    )
    records: int = 0
    contents: int = 0
    contents_with_bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    ignored: list[str] = field(default_factory=list)  #: groups and columns of a later version


def verify(path: Path, progress: Progress | None = None) -> Checked:
    """Check the trace file ``path`` whole. What is wrong is told, not raised."""
    checked = Checked(path)
    try:
        file = TraceFile(path)
    except TraceError as error:
        checked.problems.append(_problem(error))
        checked.todo = error.todo or checked.todo
        return checked
    try:
        for step in (_check_tables, _check_blobs, _check_contents):
            for problem in step(file, checked, progress or _silent):
                checked.problems.append(problem)
        checked.ignored = file.extra()
    except TraceError as error:
        checked.problems.append(_problem(error))
    finally:
        file.close()
    return checked


def _silent(what: str, done: int, total: int) -> None:
    pass


def _problem(error: TraceError) -> Problem:
    return Problem(error.where, error.what)


def _check_tables(file: TraceFile, checked: Checked, progress: Progress) -> Iterator[Problem]:
    """Read every column; its checksums, lengths, offsets and references are checked on the way."""
    codes = np.arange(len(file.strings), dtype=np.int32)
    for done, (name, columns) in enumerate(TABLES.items()):
        progress("tables", done, len(TABLES))
        try:
            rows = file.rows(name)
        except TraceError as error:
            yield _problem(error)
            continue
        checked.records += rows
        for stamp, _ in STAMPS:
            try:
                file.stamp(name, stamp)
            except TraceError as error:
                yield _problem(error)
        for column in columns:
            try:
                if column.kind in ("ragged", "content"):
                    file.ragged(name, column)
                else:
                    file.plain(name, column)
                if column.kind == "bulk":
                    yield from _check_payloads(
                        Table(name, [Source(file, 0, codes, 0)], file.strings, list), column.name
                    )
            except TraceError as error:
                yield _problem(error)
        if "content" in {column.name for column in columns}:
            try:
                contents = Contents([file.contents])
                table = Table(
                    name, [Source(file, 0, codes, 0)], file.strings, lambda maps=contents.maps: maps
                )
                table.ragged("content")
            except TraceError as error:
                yield _problem(error)


def _check_payloads(table: Table, name: str) -> Iterator[Problem]:
    for row in np.flatnonzero(table.bulk_size(name)):
        try:
            table.bulk(name, int(row))
        except TraceError as error:
            yield Problem(error.where, f"{table.name} row {row}, {name}: {error.what}")


def _check_blobs(file: TraceFile, checked: Checked, progress: Progress) -> Iterator[Problem]:
    names = blob_stores()
    for done, name in enumerate(names):
        progress("blob stores", done, len(names))
        try:
            store = file.blobs(name)
            if store is None:
                continue
            checked.blobs += len(store)
            checked.blob_bytes += store.total
            for what in store.damage():
                yield Problem(store.place, what)
        except TraceError as error:
            yield _problem(error)


def _check_contents(file: TraceFile, checked: Checked, progress: Progress) -> Iterator[Problem]:
    """Every page digest is that of its rows, and every row digest that of its bytes."""
    part = file.contents
    if part is None:
        return
    contents = Contents([part])
    checked.contents = len(contents)
    for start in range(0, len(contents), _BATCH):
        progress("page contents", start, len(contents))
        ids = np.arange(start, min(start + _BATCH, len(contents)))
        for rows in np.unique(contents.rows[ids]):
            chosen = ids[contents.rows[ids] == rows]
            if rows:
                try:
                    values, scales = contents.row_values(chosen), contents.row_scales(chosen)
                except TraceError as error:
                    yield _problem(error)
                    continue
                wrong = (page_digests(values, scales) != contents.digests[chosen]).any(axis=1)
                for index in chosen[wrong]:
                    yield Problem(part.place, f"content {index}: its page digest is not that of its rows")
                for index in chosen[row_check(values, scales) != part.row_check[chosen]]:
                    yield Problem(part.place, f"content {index}: its row check is not that of its rows")
    yield from _check_page_bytes(file, contents, checked, progress)


def _check_page_bytes(
    file: TraceFile, contents: Contents, checked: Checked, progress: Progress
) -> Iterator[Problem]:
    part = file.contents
    if part is None:
        return
    kept = np.flatnonzero(contents.has_data)
    for done, index in enumerate(kept):
        if done % _BATCH == 0:
            progress("page bytes", done, len(kept))
        layout = LAYOUTS.get(file.strings[part.format[index]])
        try:
            data = contents.data([index])
        except TraceError as error:
            yield _problem(error)
            continue
        checked.contents_with_bytes += 1
        if layout is None:
            continue
        if data.shape[1] != layout.page_bytes:
            what = f"content {index} has {data.shape[1]} bytes, a page of format {layout.name} has {layout.page_bytes}"
            yield Problem(part.place, what)
            continue
        found = digest_pages(layout, data)
        try:
            same = (found.digests == contents.digests[index]).all()
            if contents.rows[index] == layout.rows:
                same &= (found.row_values == contents.row_values([index])).all()
                same &= (found.row_scales == contents.row_scales([index])).all()
        except TraceError as error:
            yield _problem(error)
            continue
        if not same:
            yield Problem(part.place, f"content {index}: its digests are not those of its bytes")
