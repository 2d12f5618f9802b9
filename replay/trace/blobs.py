"""Bulk payload: a content-addressed store of byte strings.

A store ``/blobs/<name>`` is one long run of bytes cut into equal chunks, and an index of (start, length, key).
Equal byte strings are kept once: the key is xxh3_128, and equal keys are compared byte by byte. Each chunk is a
Zstandard frame (HDF5 filter 32015), or raw where that gains nothing. Our reader decodes chunks itself, so no
HDF5 plug-in is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from replay.trace.errors import DAMAGED, TraceError, reading
from replay.trace.hdf5 import Appender, checked_dataset, read, subgroup
from replay.trace.schema import CHUNK_BYTES, ZSTD_FILTER

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_LEVEL = 1
#: A chunk is kept compressed if that saves at least this share of it.
_WORTHWHILE = 0.97
_CACHED_CHUNKS = 64
_I8 = np.dtype("<i8")
_U8 = np.dtype("<u8")
_BYTE = np.dtype("|u1")


def blob_key(payload: bytes | memoryview) -> bytes:
    """The 16-byte key of a byte string."""
    return xxhash.xxh3_128_digest(payload)


class _Chunks:
    """The most recently used chunks, decoded."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def get(self, index: int) -> bytes | None:
        found = self._kept.get(index)
        if found is not None:
            self._kept.move_to_end(index)
        return found

    def put(self, index: int, chunk: bytes) -> None:
        self._kept[index] = chunk
        if len(self._kept) > _CACHED_CHUNKS:
            self._kept.popitem(last=False)


def _decode(dataset: Any, index: int, size: int, place: str) -> bytes:
    """Chunk ``index`` of ``size`` bytes; a frame that claims another size is refused before it is decoded."""
    where = f"{place}, chunk {index}"
    with reading(where):
        mask, stored = dataset.id.read_direct_chunk((index * size,))
        if mask & 1:
            if len(stored) != size:
                raise TraceError(f"it has {len(stored)} bytes, not {size}", where, DAMAGED)
            return bytes(stored)
        try:
            if zstandard.frame_content_size(stored) != size:
                raise TraceError("its frame has another size", where, DAMAGED)
            return zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
        except zstandard.ZstdError as error:
            raise TraceError(f"its frame cannot be decoded ({error})", where, DAMAGED) from error


class BlobWriter:
    """Writes one store. Memory grows by some 150 bytes a byte string, whatever its length."""

    def __init__(self, root: Any, name: str) -> None:
        self._group = root.require_group("blobs").create_group(name)
        self._starts = array("q")
        self._lengths = array("q")
        self._keys = bytearray()
        self._known: dict[bytes, int | list[int]] = {}
        self._waiting = bytearray()
        self._written = 0  # bytes in the dataset, a multiple of the chunk size
        self._chunk = CHUNK_BYTES
        self._dataset: Any = None
        self._recent = _Chunks()
        self._compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True
        )

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, payload: memoryview | bytes) -> int:
        """Index of ``payload`` in the store; a byte string that is there already is not kept twice."""
        key = blob_key(payload)
        same_key = self._known.get(key)
        candidates = [] if same_key is None else [same_key] if isinstance(same_key, int) else same_key
        for index in candidates:
            if self._lengths[index] == len(payload) and self._bytes(index) == payload:
                return index
        index = len(self._starts)
        self._starts.append(self._written + len(self._waiting))
        self._lengths.append(len(payload))
        self._keys += key
        self._known[key] = index if same_key is None else [*candidates, index]
        self._waiting += payload
        if len(self._waiting) >= self._chunk:
            self._flush()
        return index

    def _bytes(self, index: int) -> bytes:
        start, length = self._starts[index], self._lengths[index]
        parts = []
        while length:
            if start >= self._written:
                at = start - self._written
                parts.append(bytes(self._waiting[at : at + length]))
                break
            number, at = divmod(start, self._chunk)
            chunk = self._recent.get(number)
            if chunk is None:
                chunk = _decode(self._dataset, number, self._chunk, self._group.name)
                self._recent.put(number, chunk)
            parts.append(chunk[at : at + length])
            start += len(parts[-1])
            length -= len(parts[-1])
        return b"".join(parts)

    def _flush(self) -> None:
        whole = len(self._waiting) // self._chunk * self._chunk
        for at in range(0, whole, self._chunk):
            self._put(bytes(self._waiting[at : at + self._chunk]), self._chunk)
        del self._waiting[:whole]

    def _put(self, chunk: bytes, used: int) -> None:
        """Write the next chunk, of which ``used`` bytes belong to byte strings."""
        if self._dataset is None:
            self._dataset = self._create()
        at = self._written
        # The extent only ever grows: shrinking would run the chunk at the edge through the filter.
        self._dataset.resize(at + used, axis=0)
        frame = self._compressor.compress(chunk)
        if len(frame) < _WORTHWHILE * len(chunk):
            self._dataset.id.write_direct_chunk((at,), frame, 0)
        else:
            self._dataset.id.write_direct_chunk((at,), chunk, 1)
        self._recent.put(at // self._chunk, chunk)
        self._written += used

    def _create(self) -> Any:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((self._chunk,))
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        plist.set_obj_track_times(False)
        # Optional, so that the dataset can be made where the filter is not installed.
        plist.set_filter(ZSTD_FILTER, h5py.h5z.FLAG_OPTIONAL, (_LEVEL,))
        space = h5py.h5s.create_simple((0,), (h5py.h5s.UNLIMITED,))
        low = h5py.h5d.create(self._group.id, b"bytes", h5py.h5t.STD_U8LE, space, plist)
        return h5py.Dataset(low)

    def close(self) -> None:
        """Write what is left."""
        if self._waiting:
            used = len(self._waiting)
            if self._dataset is None:  # a small store gets one small chunk
                self._chunk = 1 << max(6, (used - 1).bit_length())
            self._put(bytes(self._waiting).ljust(self._chunk, b"\0"), used)
            self._waiting.clear()
        if self._dataset is None:
            self._dataset = self._create()
        keys = np.frombuffer(bytes(self._keys), "<u8").reshape(-1, 2)
        for name, values, width in (
            ("start", np.array(self._starts, _I8), None),
            ("length", np.array(self._lengths, _I8), None),
            ("key", keys, 2),
        ):
            column = Appender(self._group, name, values.dtype, width)
            column.append(values)
            column.close()


class BlobReader:
    """Reads one store. ``len`` is the number of byte strings in it."""

    def __init__(self, root: Any, name: str, where: str) -> None:
        self.place = f"{where}/{name}"
        group = subgroup(root, name, where)
        if group is None:
            raise TraceError("it is missing", self.place, DAMAGED)
        parts = []
        for column, dtype, width in (("start", _I8, None), ("length", _I8, None), ("key", _U8, 2)):
            dataset = checked_dataset(group, column, self.place, dtype, width)
            if dataset is None:
                raise TraceError(f"its {column} column is missing", self.place, DAMAGED)
            parts.append(read(dataset, f"{self.place}/{column}"))
        self.starts: I64 = parts[0]
        self.lengths: I64 = parts[1]
        self.keys: U64 = parts[2]
        self._dataset = checked_dataset(group, "bytes", self.place, _BYTE, zstd=True)
        if self._dataset is None:
            raise TraceError("its bytes are missing", self.place, DAMAGED)
        total = int(self._dataset.shape[0])
        if not len(self.starts) == len(self.lengths) == len(self.keys):
            raise TraceError("its columns have different lengths", self.place, DAMAGED)
        wrong = (
            (self.starts < 0)
            | (self.lengths < 0)
            | (self.lengths > total)
            | (self.starts > total - self.lengths)
        )
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise TraceError(
                f"blob {bad} covers bytes {self.starts[bad]} to {self.starts[bad] + self.lengths[bad]} of {total}",
                self.place,
                DAMAGED,
            )
        if float(self.lengths.sum(dtype=np.float64)) > total:
            raise TraceError(
                "its byte strings overlap, so they could ask for any amount", self.place, DAMAGED
            )
        self.total = total
        self._chunk = int(self._dataset.chunks[0])
        self._recent = _Chunks()

    def __len__(self) -> int:
        return len(self.starts)

    def get(self, index: int) -> bytes:
        """The byte string ``index``."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        parts = []
        while length:
            chunk_index, at = divmod(start, self._chunk)
            chunk = self._recent.get(chunk_index)
            if chunk is None:
                chunk = _decode(self._dataset, chunk_index, self._chunk, self.place)
                self._recent.put(chunk_index, chunk)
            parts.append(chunk[at : at + length])
            start += len(parts[-1])
            length -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def damage(self) -> Iterator[str]:
        """Every chunk that cannot be decoded and every byte string whose key is not that of its bytes."""
        bad_chunks = set()
        for index in range(-(-self.total // self._chunk)):
            try:
                _decode(self._dataset, index, self._chunk, self.place)
            except TraceError as error:
                bad_chunks.add(index)
                yield str(error.what) + f" (chunk {index})"
        for index in range(len(self)):
            start, length = int(self.starts[index]), int(self.lengths[index])
            touched = range(start // self._chunk, -(-(start + length) // self._chunk))
            if bad_chunks.isdisjoint(touched) and blob_key(self.get(index)) != self.keys[index].tobytes():
                yield f"blob {index}: its bytes do not have its key"
