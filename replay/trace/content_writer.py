"""Writing page contents: each distinct one once, found again by its digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.trace.blobs import BlobWriter
from replay.trace.contents import I64, U8, U32, U64, row_check
from replay.trace.hdf5 import Appender

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one format to be added: n digests, and rows and bytes where they were recorded."""

    format: int  #: string code
    digests: U64  #: ``uint64[n, 2]``
    row_values: U64 | None = None  #: ``uint64[n, R]``
    row_scales: U32 | None = None  #: ``uint32[n, R]``
    data: U8 | None = None  #: ``uint8[n, page_bytes]``


class _Growing:
    """A numpy column that grows."""

    def __init__(self, dtype: str) -> None:
        self._store = np.zeros(1024, dtype)
        self.size = 0

    def append(self, values: npt.NDArray[Any]) -> None:
        end = self.size + len(values)
        if end > len(self._store):
            self._store = np.resize(self._store, max(end, 2 * len(self._store)))
        self._store[self.size : end] = values
        self.size = end

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._store[: self.size]


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted slice of the index."""

    key: U64
    id: I64


class _Index:
    """From digest to content: sorted runs of doubling size, searched with whole batches (16 bytes a content).

    A dictionary would do the same with ten times the memory and a Python object for each page.
    """

    def __init__(self, digests: _Growing, rows: _Growing, check: _Growing) -> None:
        self._digests = digests
        self._rows = rows
        self._check = check
        self._runs: list[_Run] = []

    @staticmethod
    def _keys(digests: U64) -> U64:
        return np.asarray(digests[:, 0] ^ (digests[:, 1] * _ODD), np.uint64)

    def find(self, digests: U64, rows: int, check: U64) -> I64:
        """Content of each digest, -1 where there is none. What both sides know of the rows must agree."""
        keys = self._keys(digests)
        found = np.full(len(keys), -1, np.int64)
        known = self._digests.values.reshape(-1, 2)
        for run in self._runs:
            place = np.searchsorted(run.key, keys)
            active = np.flatnonzero(found < 0)
            while len(active):
                active = active[place[active] < len(run.key)]
                active = active[run.key[place[active]] == keys[active]]
                content = run.id[place[active]]
                fits = (known[content] == digests[active]).all(axis=1)
                if rows:
                    other = self._rows.values[content]
                    fits &= (other == 0) | ((other == rows) & (self._check.values[content] == check[active]))
                found[active[fits]] = content[fits]
                active = active[~fits]
                place[active] += 1
        return found

    def add(self, digests: U64, ids: I64) -> None:
        """Enter new contents."""
        keys = self._keys(digests)
        order = np.argsort(keys, kind="stable")
        run = _Run(keys[order], ids[order])
        while self._runs and len(self._runs[-1].key) < 2 * len(run.key):
            other = self._runs.pop()
            keys, ids = np.concatenate([other.key, run.key]), np.concatenate([other.id, run.id])
            order = np.argsort(keys, kind="stable")
            run = _Run(keys[order], ids[order])
        self._runs.append(run)


class ContentWriter:
    """Writes ``/contents``. Keeps about 60 bytes a distinct content in memory; rows and bytes go to the file."""

    def __init__(self, root: Any, blobs: BlobWriter) -> None:
        """Start ``/contents`` in ``root``; page bytes go to ``blobs``."""
        self._group = root.create_group("contents")
        self._blobs = blobs
        self._digests = _Growing("<u8")
        self._format, self._rows = _Growing("<i4"), _Growing("<i4")
        self._row_start, self._check, self._blob = _Growing("<i8"), _Growing("<u8"), _Growing("<i8")
        # Digests do not shrink; scales, often powers of two, do.
        self._row_values = Appender(self._group, "row_values", np.dtype("<u8"), compress=False)
        self._row_scales = Appender(self._group, "row_scales", np.dtype("<u4"))
        self._index = _Index(self._digests, self._rows, self._check)
        self._apart: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return self._rows.size

    def add(self, pages: Pages) -> I64:
        """Index of each page's content, entered where it is new."""
        rows = 0 if pages.row_values is None else pages.row_values.shape[1]
        if pages.row_values is not None and pages.row_scales is not None and rows:
            check = row_check(pages.row_values, pages.row_scales)
        else:
            check = np.zeros(len(pages.digests), np.uint64)
        ids = self._index.find(pages.digests, rows, check)
        new = np.flatnonzero(ids < 0)
        if len(new):
            digests = pages.digests[new]
            order = np.lexsort((check[new], digests[:, 1], digests[:, 0]))
            full = np.column_stack([digests, check[new]])[order]
            first = np.ones(len(order), bool)
            first[1:] = (full[1:] != full[:-1]).any(axis=1)
            leader = np.empty(len(order), np.int64)
            leader[order] = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
            leaders, number = np.unique(leader, return_inverse=True)
            ids[new] = len(self) + number
            self._enter(pages, check, new[leaders], rows)
        if rows:
            self._learn_rows(pages, check, ids, rows)
        return ids if pages.data is None else self._add_data(pages, check, ids, rows)

    def _enter(self, pages: Pages, check: U64, chosen: I64, rows: int) -> None:
        """New contents from the pages ``chosen``."""
        count = len(chosen)
        ids = np.arange(len(self), len(self) + count)
        self._digests.append(pages.digests[chosen].reshape(-1))
        self._format.append(np.full(count, pages.format))
        self._rows.append(np.full(count, rows))
        self._check.append(check[chosen])
        self._blob.append(np.full(count, -1))
        self._row_start.append(self._write_rows(pages, chosen, rows))
        self._index.add(pages.digests[chosen], ids)

    def _write_rows(self, pages: Pages, chosen: I64, rows: int) -> I64:
        if not rows or pages.row_values is None or pages.row_scales is None:
            return np.full(len(chosen), -1, np.int64)
        start = self._row_values.rows
        self._row_values.append(pages.row_values[chosen].reshape(-1))
        self._row_scales.append(pages.row_scales[chosen].reshape(-1))
        return start + rows * np.arange(len(chosen), dtype=np.int64)

    def _learn_rows(self, pages: Pages, check: U64, ids: I64, rows: int) -> None:
        """Row digests for contents that were known by their page digest only."""
        lacking = np.flatnonzero(self._rows.values[ids] == 0)
        if len(lacking):
            _, chosen = np.unique(ids[lacking], return_index=True)
            chosen = lacking[chosen]
            # Pages that share the digest but not these rows get a content of their own.
            content = ids[chosen]
            self._row_start.values[content] = self._write_rows(pages, chosen, rows)
            self._rows.values[content] = rows
            self._check.values[content] = check[chosen]
            other = lacking[self._check.values[ids[lacking]] != check[lacking]]
            for page in other:
                found = self._index.find(pages.digests[page : page + 1], rows, check[page : page + 1])
                if found[0] < 0:
                    found[0] = len(self)
                    self._enter(pages, check, np.array([page]), rows)
                ids[page] = found[0]

    def _add_data(self, pages: Pages, check: U64, ids: I64, rows: int) -> I64:
        """Keep the bytes; pages that share the digest but not the bytes get a content of their own."""
        assert pages.data is not None
        for page, row in enumerate(np.ascontiguousarray(pages.data)):
            blob = self._blobs.add(row.data)
            content = int(ids[page])
            held = int(self._blob.values[content])
            if held < 0:
                self._blob.values[content] = blob
            elif held != blob:
                known = self._apart.get((content, blob))
                if known is None:
                    known = self._apart[content, blob] = len(self)
                    self._enter(pages, check, np.array([page]), rows)
                    self._blob.values[known] = blob
                ids[page] = known
        return ids

    def close(self) -> None:
        """Write the columns."""
        self._row_values.close()
        self._row_scales.close()
        for name, column, width in (
            ("digests", self._digests, 2),
            ("format", self._format, None),
            ("rows", self._rows, None),
            ("row_start", self._row_start, None),
            ("row_check", self._check, None),
            ("blob", self._blob, None),
        ):
            values = column.values if width is None else column.values.reshape(-1, width)
            appender = Appender(self._group, name, values.dtype, width)
            appender.append(values)
            appender.close()
