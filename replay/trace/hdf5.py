"""Guarded access to HDF5: nothing that a file claims is believed before it is checked.

Reading refuses links out of the file, virtual and external datasets, filters other than the format's own, types
and shapes that the format does not have, and sizes that the stored bytes cannot hold. Writing goes to a
temporary name and appears under its own name only when it is whole.
"""

from __future__ import annotations

import math
import os
import resource
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from replay.trace.errors import DAMAGED, TraceError, reading
from replay.trace.schema import CHUNK_ROWS, MAX_CHUNK_BYTES, MAX_COLUMN_BYTES, ZSTD_FILTER
from replay.words import counted, verb
from replay.writing import WriteError, writing

Array = npt.NDArray[Any]

#: shuffle, deflate, fletcher32
_PLAIN_FILTERS = {1, 2, 3}
#: Deflate makes at most 1032 bytes of one.
_MAX_RATIO = 1040
#: How an HDF5 file begins.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: Superblock of versions 2 and 3 (HDF5 File Format Specification 3.0, II.A): signature, version, and, behind sizes,
#: flags and two addresses, the end of the file; after that the root group's address and a checksum.
_SUPERBLOCK = struct.Struct("<8sB19xQ12x")


def open_file(path: Path) -> Any:
    """Open ``path`` for reading; without locks, so that read-only and network folders work."""
    if not path.exists():
        raise TraceError("there is no such file", str(path), "Check the path")
    place = str(path)
    with reading(place):
        try:
            return h5py.File(path, "r", locking=False)
        except OSError as error:
            if error.errno:
                what = f"it cannot be opened: {os.strerror(error.errno).lower()}"
                raise TraceError(what, place, "Check its rights, and the disk that it is on") from error
            what, todo = _why_not_opened(path)
            if not what:
                raise
            raise TraceError(what, place, todo) from error


def _why_not_opened(path: Path) -> tuple[str, str]:
    """What is wrong with a file that HDF5 refuses, as far as its length and its beginning tell, and what to do."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size)
    size = path.stat().st_size
    again = "Seal its journal again, or copy it once more from where it is whole"
    if not size:
        return "it is empty", again
    if not head.startswith(_SIGNATURE[:size]):
        return "it is no HDF5 file", "Give a trace (.h5), a journal (.journal) or a folder of them"
    if size < _SUPERBLOCK.size:
        return f"it was cut: only its first {counted(size, 'byte')} {verb(size, 'is', 'are')} there", again
    _, version, whole = _SUPERBLOCK.unpack(head)
    if version in (2, 3) and size < whole:
        return f"it was cut: {size:,} of its {whole:,} bytes are there", again
    return "", ""


def child(group: Any, name: str, where: str) -> Any | None:
    """The object ``name`` of ``group``, or None. Soft and external links are refused."""
    with reading(f"{where}/{name}"):
        key = name.encode()
        if key not in group.id:
            return None
        if group.id.links.get_info(key).type != h5py.h5l.TYPE_HARD:
            what = "it is a link to somewhere else, which a trace never has"
            raise TraceError(what, f"{where}/{name}", DAMAGED)
        found = h5py.h5o.open(group.id, key)
        if isinstance(found, h5py.h5d.DatasetID):
            return h5py.Dataset(found)
        return h5py.Group(found) if isinstance(found, h5py.h5g.GroupID) else found


def subgroup(group: Any, name: str, where: str) -> Any | None:
    """The group ``name`` of ``group``, or None."""
    found = child(group, name, where)
    if found is not None and not isinstance(found, h5py.Group):
        raise TraceError("it should be a group", f"{where}/{name}", DAMAGED)
    return found


def checked_dataset(
    group: Any, name: str, where: str, dtype: np.dtype[Any], width: int | None = None, zstd: bool = False
) -> Any | None:
    """The dataset ``name`` of ``group``, or None where there is none.

    Args:
        group: HDF5 group.
        name: name in the group.
        where: file and group, for messages.
        dtype: the element type it must have.
        width: second dimension; None for one dimension.
        zstd: blob dataset, whose only filter is Zstandard and whose chunks our own code decodes.
    """
    found = child(group, name, where)
    if found is None:
        return None
    place = f"{where}/{name}"
    with reading(place):
        if not isinstance(found, h5py.Dataset):
            raise TraceError("it should be a dataset", place, DAMAGED)
        if found.dtype != dtype:
            raise TraceError(f"its type is {found.dtype}, not {dtype}", place, DAMAGED)
        shape = found.shape
        if (
            shape is None
            or len(shape) != (1 if width is None else 2)
            or (width is not None and shape[1] != width)
        ):
            raise TraceError(f"its shape is {shape}", place, DAMAGED)
        _check_storage(found, place, dtype.itemsize, zstd)
        return found


def _check_storage(dataset: Any, place: str, itemsize: int, zstd: bool) -> None:
    """Every byte of ``dataset`` lies in this file, and its size is possible for what is stored."""
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    filters = {plist.get_filter(i)[0] for i in range(plist.get_nfilters())}
    if dataset.is_virtual or layout == h5py.h5d.VIRTUAL or plist.get_external_count() > 0:
        raise TraceError("its data lies in another file, which a trace never has", place, DAMAGED)
    if filters - ({ZSTD_FILTER} if zstd else _PLAIN_FILTERS):
        raise TraceError(f"it has filters {sorted(filters)}", place, DAMAGED)
    size = math.prod(dataset.shape) * itemsize
    stored = dataset.id.get_storage_size()
    if stored > h5py.h5i.get_file_id(dataset.id).get_filesize():
        raise TraceError(f"it claims {stored} stored bytes, more than the file has", place, DAMAGED)
    if layout == h5py.h5d.CHUNKED:
        chunks = dataset.chunks
        if math.prod(chunks) * itemsize > MAX_CHUNK_BYTES:
            raise TraceError(f"its chunks have {math.prod(chunks) * itemsize} bytes", place, DAMAGED)
        wanted = math.prod(-(-n // c) for n, c in zip(dataset.shape, chunks, strict=True))
        if dataset.id.get_num_chunks() != wanted:
            raise TraceError(
                f"{dataset.id.get_num_chunks()} of its {wanted} chunks are there", place, DAMAGED
            )
    elif zstd:
        raise TraceError("it is not chunked", place, DAMAGED)
    elif stored < size:
        raise TraceError(f"{stored} of its {size} bytes are there", place, DAMAGED)
    if zstd:
        return  # its chunks are decoded one by one, each within its own bound
    if size > MAX_COLUMN_BYTES:
        raise TraceError(
            f"it has {size} bytes", place, "That is more than one column may have: trim the trace"
        )
    if layout == h5py.h5d.CHUNKED and size > stored * _MAX_RATIO:
        raise TraceError(f"{stored} stored bytes cannot hold its {size}", place, DAMAGED)


def read(dataset: Any, where: str, start: int = 0, stop: int | None = None) -> Array:
    """Rows ``start..stop`` (half-open) of a checked dataset, in native byte order."""
    with reading(where):
        dtype, (length, *tail) = dataset.dtype, dataset.shape
        end = length if stop is None else stop
        out = np.empty((end - start, *tail), dtype)
        if start == 0 and 0 < end == length:
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out)  # the same without the cost of a selection
        elif end > start:
            dataset.read_direct(out, np.s_[start:end])
        return out.astype(dtype.newbyteorder("="), copy=False)


class Appender:
    """A growing dataset, written in whole chunks only.

    The dataset is created with its first write; where everything fits one chunk, the chunk is no larger than
    that, so that small traces stay small.
    """

    def __init__(
        self, group: Any, name: str, dtype: np.dtype[Any], width: int | None = None, compress: bool = True
    ) -> None:
        self._group = group
        self._name = name
        self._dtype = dtype
        self._tail = () if width is None else (width,)
        self._compress = compress
        self._dataset: Any = None
        self._waiting: list[Array] = []
        self._waiting_rows = 0
        self.rows = 0

    def append(self, values: Array) -> None:
        """Add rows; they are converted to the dataset's type, which must be able to hold them."""
        if len(values):
            self._waiting.append(np.ascontiguousarray(values, self._dtype))
            self._waiting_rows += len(values)
            self.rows += len(values)
            if self._waiting_rows >= CHUNK_ROWS:
                self._write(self._waiting_rows - self._waiting_rows % CHUNK_ROWS)

    def close(self) -> None:
        """Write what is left; a dataset without rows is created too."""
        self._write(self._waiting_rows)
        # Else its cache is written when the object goes, where nobody would hear of an error.
        self._dataset.flush()

    def _write(self, rows: int) -> None:
        joined = np.concatenate(self._waiting) if self._waiting else np.empty((0, *self._tail), self._dtype)
        if self._dataset is None:
            chunk = CHUNK_ROWS if rows >= CHUNK_ROWS else max(1, rows)
            self._dataset = self._group.create_dataset(
                self._name,
                shape=(0, *self._tail),
                maxshape=(None, *self._tail),
                chunks=(chunk, *self._tail),
                dtype=self._dtype,
                shuffle=self._compress and self._dtype.itemsize > 1,
                compression="gzip" if self._compress else None,
                compression_opts=1 if self._compress else None,
                fletcher32=True,
            )
        if rows:
            start = self._dataset.shape[0]
            self._dataset.resize(start + rows, axis=0)
            self._dataset[start:] = joined[:rows]
        self._waiting = [joined[rows:].copy()] if rows < len(joined) else []
        self._waiting_rows = len(joined) - rows


#: HDF5 has to end a flush that the disk broke off, which fails once more, before it can do another. It crashes where a
#: file is closed before that.
_FLUSHES = 3


class NewFile:
    """A file that appears under its name only when it is whole."""

    def __init__(self, path: Path, replace: bool, mode: int | None = None) -> None:
        self.path = path
        self._mode = mode
        self._replace = replace
        check_name(path, replace)
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        try:
            with writing(path):
                # Version 1.10 of the file format keeps a checksum over all of its own structures.
                self.file: Any = h5py.File(self._temporary, "x", libver=("v110", "v110"), locking=False)
        except BaseException:
            # A full disk, or Ctrl-C.
            self._temporary.unlink(missing_ok=True)
            raise

    def publish(self) -> None:
        """Close the file and give it its name."""
        try:
            with writing(self.path):
                # Closing may fail halfway, and then HDF5 fails again when the process ends; flushing may not.
                self.file.flush()
                self.file.close()
                if self._mode is not None:
                    self._temporary.chmod(self._mode)
                give_name(self._temporary, self.path, self._replace)
        finally:
            self._temporary.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written. Never raises for a disk on which nothing more can be written."""
        self._temporary.unlink(missing_ok=True)
        if self.file:
            with _writing_to_memory(self.file):
                for _ in range(_FLUSHES):
                    with suppress(OSError, RuntimeError):
                        self.file.flush()
                        break
                with suppress(OSError, RuntimeError):
                    self.file.close()


def check_name(path: Path, replace: bool) -> None:
    """Raise :class:`WriteError` where ``path`` is taken, unless ``replace``."""
    if not replace and path.exists():
        raise _exists(path)


def give_name(file: Path, path: Path, replace: bool) -> None:
    """Rename ``file`` to ``path``; :class:`WriteError` where that is taken, unless ``replace``."""
    if replace:
        file.replace(path)
        return
    # A rename would write over another file; but some file systems have no hard links.
    try:
        os.link(file, path)
    except OSError:
        if path.exists():
            raise _exists(path) from None
        file.replace(path)


def _exists(path: Path) -> WriteError:
    return WriteError(path, "it exists already", "Choose another name, or remove it first")


@contextmanager
def _writing_to_memory(file: Any) -> Iterator[None]:
    """Have HDF5 write what it still holds to memory that nobody reads.

    HDF5 writes its caches when a file is closed. Where that fails it keeps the file, tries again when the process ends,
    and crashes.
    """
    # Memory counts as a file: a limit on the size of files that was reached on disk holds here too.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        with suppress(OSError, RuntimeError, ValueError, AttributeError):
            taken = file.id.get_vfd_handle()
            memory = os.memfd_create("kv-replay")
            try:
                os.ftruncate(memory, os.fstat(taken).st_size)
                os.dup2(memory, taken)
            finally:
                os.close(memory)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
