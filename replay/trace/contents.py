"""Page contents: each distinct content of a page is kept once and known by its index.

A content is known by its page digest, the digests of its rows, and its bytes where they were kept. Contents with one
page digest but different rows or bytes stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.trace.blobs import BlobReader
from replay.trace.errors import DAMAGED, TraceError
from replay.trace.hdf5 import checked_dataset, read, subgroup
from replay.trace.schema import CONTENT_COLUMNS, file_dtype

Bool = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

#: Rows of digests read at once: 1,048,576 rows = 8 MiB.
_SLAB_ROWS = 1 << 20
_MAX_ROWS = 1 << 20
_TOP = np.uint64(2**64 - 1)


def row_check(row_values: U64, row_scales: U32) -> U64:
    """One word a page over its row digests and scales, ``uint64[n]``: tells contents apart that share a digest.

    A plain weighted sum, odd weights: it only has to differ where rows differ, by accident or by hand.
    """
    rows = row_values.shape[1]
    with np.errstate(over="ignore"):
        weights = (np.arange(2 * rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
        total = np.einsum("ij,j->i", row_values, weights[:rows])
        total += np.einsum("ij,j->i", row_scales.astype(np.uint64), weights[rows:])
    return np.asarray(total, np.uint64)


@dataclass(frozen=True, slots=True)
class ContentPart:
    """The contents of one file. Columns are parallel; -1 marks what is not there."""

    place: str
    digests: U64
    format: I32
    rows: I32
    row_start: I64
    row_check: U64
    blob: I64
    row_values: Any
    row_scales: Any
    blobs: BlobReader | None

    def __len__(self) -> int:
        return len(self.digests)

    def read_rows(self, dataset: Any, name: str, starts: I64, width: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out[i] = dataset[starts[i] : starts[i] + width]``, reading only the chunks that are touched.

        ``starts`` must be sorted.
        """
        chunk = int(dataset.chunks[0]) if dataset.chunks else _SLAB_ROWS
        first, last = starts // chunk, (starts + width - 1) // chunk
        # A slab ends where a gap of whole chunks begins, and where it would grow too large.
        gap = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
        for low, high in zip([0, *gap], [*gap, len(starts)], strict=True):
            at = low
            while at < high:
                begin = int(starts[at])
                stop = int(np.searchsorted(starts[at:high], begin + _SLAB_ROWS)) + at
                end = int(starts[stop - 1]) + width
                slab = read(dataset, f"{self.place}/{name}", begin, end)
                out[at:stop] = slab[(starts[at:stop] - begin)[:, None] + np.arange(width)]
                at = stop


def read_part(root: Any, where: str, strings: int, blobs: BlobReader | None) -> ContentPart | None:
    """The contents of an open trace file, checked; None where the file has none."""
    group = subgroup(root, "contents", where)
    if group is None:
        return None
    place = f"{where}/contents"
    found: dict[str, npt.NDArray[Any]] = {}
    for column in CONTENT_COLUMNS:
        dataset = checked_dataset(group, column.name, place, file_dtype(column), column.width)
        if dataset is None:
            raise TraceError(f"its column {column.name} is missing", place, DAMAGED)
        found[column.name] = read(dataset, f"{place}/{column.name}")
    values = checked_dataset(group, "row_values", place, np.dtype("<u8"))
    scales = checked_dataset(group, "row_scales", place, np.dtype("<u4"))
    if values is None or scales is None or values.shape != scales.shape:
        raise TraceError("row digests and scales are missing or differ in number", place, DAMAGED)
    part = ContentPart(place, **found, row_values=values, row_scales=scales, blobs=blobs)
    _check_part(part, int(values.shape[0]), strings)
    return part


def _check_part(part: ContentPart, stored_rows: int, strings: int) -> None:
    count = len(part)
    parallel = (part.format, part.rows, part.row_start, part.row_check, part.blob)
    if any(len(column) != count for column in parallel):
        raise TraceError("its columns have different lengths", part.place, DAMAGED)
    rows = part.rows.astype(np.int64)
    outside = (rows > 0) & ((part.row_start < 0) | (part.row_start > stored_rows - rows))
    blobs = 0 if part.blobs is None else len(part.blobs)
    for wrong, what in (
        ((rows < 0) | (rows > _MAX_ROWS), "number of rows"),
        (outside, "row digests outside the file"),
        ((part.blob < -1) | (part.blob >= blobs), "bytes outside the blob store"),
        ((part.format < 0) | (part.format >= strings), "format that is no string of the file"),
    ):
        if wrong.any():
            raise TraceError(f"content {int(np.argmax(wrong))} has a {what}", part.place, DAMAGED)
    if int(rows.sum()) > stored_rows:
        raise TraceError("contents share row digests, so they could ask for any amount", part.place, DAMAGED)


class Contents:
    """The distinct page contents of a trace, over all of its files.

    Attributes:
        digests: page digests, ``uint64[C, 2]``.
        rows: rows a page, ``int32[C]``; 0 where row digests were not recorded.
        has_data: whether the bytes were kept, ``bool[C]``.
        maps: for each file the index of each of its contents.
    """

    def __init__(self, parts: list[ContentPart | None]) -> None:
        """Join the contents of several files; equal contents get one index."""
        self._parts = parts
        there = [part for part in parts if part is not None]
        sizes = [0 if part is None else len(part) for part in parts]
        digests = _joined([part.digests for part in there], (0, 2), np.uint64)
        rows = _joined([part.rows for part in there], (0,), np.int32)
        blob = _joined([part.blob for part in there], (0,), np.int64)
        owner = np.repeat(np.arange(len(parts), dtype=np.int32), sizes)
        local = np.concatenate([np.arange(n, dtype=np.int64) for n in sizes] or [np.zeros(0, np.int64)])
        if len(there) > 1:
            check = _joined([part.row_check for part in there], (0,), np.uint64)
            number = _number(digests, rows, check, _blob_keys(there, blob), blob >= 0, owner)
        else:
            number = np.arange(len(digests))
        starts = np.cumsum([0, *sizes])
        self.maps: list[I64] = [number[a:b] for a, b in pairwise(starts)]
        count = int(number.max()) + 1 if len(number) else 0
        # Written backwards, so that the first member of each group wins; then members that know more.
        back = np.arange(len(number))[::-1]
        chosen = np.zeros(count, np.int64)
        chosen[number[back]] = back
        self.digests: U64 = digests[chosen]
        with_rows, with_data = chosen.copy(), chosen.copy()
        known = back[rows[back] > 0]
        with_rows[number[known]] = known
        kept = back[blob[back] >= 0]
        with_data[number[kept]] = kept
        self.rows: I32 = rows[with_rows]
        self.has_data: Bool = blob[with_data] >= 0
        self._row_owner, self._row_local = owner[with_rows], local[with_rows]
        self._data_owner, self._data_local = owner[with_data], local[with_data]

    def __len__(self) -> int:
        return len(self.digests)

    def _ids(self, ids: npt.ArrayLike) -> I64:
        found = np.asarray(ids, np.int64).reshape(-1)
        if len(found) and (int(found.min()) < 0 or int(found.max()) >= len(self)):
            raise ValueError(f"content ids must lie in 0..{len(self) - 1}")
        return found

    def row_values(self, ids: npt.ArrayLike) -> U64:
        """Row digests ``uint64[k, R]`` of ``ids``, which must all have R rows (``ValueError`` otherwise)."""
        return self._rows_of(ids, "row_values", np.dtype(np.uint64))

    def row_scales(self, ids: npt.ArrayLike) -> U32:
        """Scale words ``uint32[k, R]`` of ``ids``, which must all have R rows (``ValueError`` otherwise)."""
        return self._rows_of(ids, "row_scales", np.dtype(np.uint32))

    def _rows_of(self, ids: npt.ArrayLike, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        wanted = self._ids(ids)
        unique, inverse = np.unique(wanted, return_inverse=True)
        widths = np.unique(self.rows[unique])
        if len(widths) > 1:
            raise ValueError(f"contents with {widths.tolist()} rows cannot be read together")
        width = int(widths[0]) if len(widths) else 0
        out = np.empty((len(unique), width), dtype)
        if width == 0:
            return out[inverse]
        owner = self._row_owner[unique]
        for index in np.unique(owner):
            part = self._parts[index]
            assert part is not None
            mine = np.flatnonzero(owner == index)
            starts = part.row_start[self._row_local[unique[mine]]]
            by_place = np.argsort(starts, kind="stable")
            found = np.empty((len(mine), width), dtype)
            part.read_rows(getattr(part, name), name, starts[by_place], width, found)
            out[mine[by_place]] = found
        return out if np.array_equal(unique, wanted) else out[inverse]

    def data(self, ids: npt.ArrayLike) -> U8:
        """Page bytes ``uint8[k, page_bytes]`` of ``ids``; all must have been kept, in pages of one size."""
        pages = [np.frombuffer(self._page(int(index)), np.uint8) for index in self._ids(ids)]
        if len({len(page) for page in pages}) > 1:
            raise ValueError("contents of different page sizes cannot be read together")
        return np.stack(pages) if pages else np.zeros((0, 0), np.uint8)

    def _page(self, index: int) -> bytes:
        part = self._parts[int(self._data_owner[index])]
        blobs = None if part is None else part.blobs
        if not self.has_data[index] or part is None or blobs is None:
            raise ValueError(f"the bytes of content {index} were not kept (see has_data)")
        return blobs.get(int(part.blob[self._data_local[index]]))

    def data_sizes(self) -> I64:
        """Bytes of each content that were kept, ``int64[C]``; -1 where they were not."""
        out = np.full(len(self), -1, np.int64)
        for index in np.flatnonzero(self.has_data):
            part = self._parts[int(self._data_owner[index])]
            if part is not None and part.blobs is not None:
                out[index] = part.blobs.lengths[part.blob[self._data_local[index]]]
        return out

    def formats(self, translate: list[I32]) -> I32:
        """Format code ``int32[C]`` of each content; ``translate`` maps each file's codes."""
        out = np.zeros(len(self), np.int32)
        for part, codes, mapped in zip(self._parts, translate, self.maps, strict=True):
            if part is not None:
                out[mapped] = codes[part.format]
        return out


def _joined(columns: list[Any], empty: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(empty, dtype)


def _blob_keys(parts: list[ContentPart], blob: I64) -> U64:
    """First half of the key of each content's bytes; 0 where they were not kept."""
    keys = np.zeros(len(blob), np.uint64)
    at = 0
    for part in parts:
        if part.blobs is not None:
            kept = np.flatnonzero(part.blob >= 0)
            keys[at + kept] = part.blobs.keys[part.blob[kept], 0]
        at += len(part)
    return keys


def _number(digests: U64, rows: I32, check: U64, key: U64, has_key: Bool, owner: I32) -> I64:
    """A number for each content, the same for equal ones; numbers follow the order of first appearance.

    Contents are equal if their digests are, and whatever else both know: rows, row digests, bytes. Two contents
    of one file are different by construction.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    sorted_digests = digests[order]
    new = np.ones(len(order), bool)
    new[1:] = (sorted_digests[1:] != sorted_digests[:-1]).any(axis=1)
    group = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    clash = np.zeros(len(starts), bool)
    for value, known in ((check, rows > 0), (rows.astype(np.uint64), rows > 0), (key, has_key)):
        low = np.minimum.reduceat(np.where(known, value, _TOP)[order], starts)
        high = np.maximum.reduceat(np.where(known, value, np.uint64(0))[order], starts)
        clash |= (low != high) & np.logical_or.reduceat(known[order], starts)
    same_file = np.zeros(len(order), bool)
    same_file[1:] = ~new[1:] & (owner[order][1:] == owner[order][:-1])
    clash[group[same_file]] = True
    leader = np.empty(len(order), np.int64)
    leader[order] = np.minimum.reduceat(order, starts)[group]
    apart: dict[tuple[Any, ...], int] = {}
    for index in order[clash[group]]:
        exact = (*digests[index], rows[index], check[index], key[index], has_key[index])
        leader[index] = apart.setdefault(exact, int(index))
    _, number = np.unique(leader, return_inverse=True)
    return np.asarray(number, np.int64)
