"""The frames of a journal: how records are packed so that a torn or damaged file can still be read.

::

    magic 8 | version u8 | kind u8 | 0 u16 | index u32 | before u64 | records u32 | raw u32 | length u32
            | schema CRC u32 | payload CRC u32 | header CRC u32 || payload

The payload is one zstd frame of ``raw`` bytes that states its content size. ``index`` counts frames and ``before`` the
records in all frames before, so a reader knows what is missing when it finds its way again after damage. The header
has a CRC of its own: a damaged payload behind a good header is skipped by its length, and only a damaged header
makes the reader search for the next magic. Everything is little-endian; CRCs are CRC-32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO
from zlib import crc32

import zstandard

# Bytes that no text and hardly any number contains; the line ends betray a transfer in text mode.
MAGIC = b"\x93KVR\r\n\x1a\n"
MAJOR = 1
SCHEMA, RECORDS = 0, 1

MAX_RAW = 64 * 2**20  #: bytes of one frame before compression; also what one record can be, nearly
MAX_RECORD = 48 * 2**20
_MAX_LENGTH = MAX_RAW + MAX_RAW // 128 + 4096  # what zstd makes of MAX_RAW bytes that do not compress

_HEADER = struct.Struct("<8sBBHIQIIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_SEARCH = 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one frame."""

    version: int
    kind: int
    index: int
    before: int
    records: int
    raw: int
    length: int
    schema: int
    payload: int


def pack(kind: int, index: int, before: int, records: int, schema: int, raw: bytes, level: int = 1) -> bytes:
    """One frame holding ``raw``."""
    payload = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)
    head = _HEADER.pack(
        MAGIC,
        MAJOR,
        kind,
        0,
        index & 0xFFFFFFFF,
        before,
        records,
        len(raw),
        len(payload),
        schema,
        crc32(payload),
    )
    return b"".join((head, _CRC.pack(crc32(head)), payload))


def unpack_header(data: bytes) -> Header | None:
    """The header in the first ``HEADER_BYTES`` of ``data``; ``None`` if they are not one."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    if _CRC.unpack_from(data, _HEADER.size)[0] != crc32(data[: _HEADER.size]):
        return None
    _, version, kind, _, index, before, records, raw, length, schema, payload = _HEADER.unpack_from(data)
    if raw > MAX_RAW or length > _MAX_LENGTH:
        return None
    return Header(version, kind, index, before, records, raw, length, schema, payload)


def unpack_payload(header: Header, payload: bytes) -> bytes | None:
    """The content of a frame; ``None`` if it is damaged. Never allocates more than ``MAX_RAW`` bytes."""
    if len(payload) != header.length or crc32(payload) != header.payload:
        return None
    try:
        if zstandard.get_frame_parameters(payload).content_size != header.raw:
            return None
        raw = zstandard.ZstdDecompressor().decompress(
            payload, max_output_size=header.raw, allow_extra_data=False
        )
    except zstandard.ZstdError:
        return None
    return raw if len(raw) == header.raw else None


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a journal that could not be read.

    ``offset`` and ``size`` are bytes of the file. ``records`` is how many records are missing, -1 where nothing tells
    (the end of the file).
    """

    offset: int
    size: int
    records: int
    what: str

    def __str__(self) -> str:
        noun = "record" if self.records == 1 else "records"
        missing = f", {self.records:,} {noun} missing" if self.records >= 0 else ""
        return f"{self.what} at byte {self.offset:,} ({self.size:,} byte{'s' if self.size != 1 else ''}{missing})"


class Scanner:
    """Walks over the frames of an open file, skipping what is damaged."""

    def __init__(self, file: BinaryIO, size: int, report: Callable[[Cut], None]) -> None:
        self._file, self._size, self._report = file, size, report
        self._window, self._window_at = b"", 0
        self.at = 0

    def __iter__(self) -> Scanner:
        return self

    def __next__(self) -> tuple[int, Header, bytes]:
        """Offset, header and content of the next good frame."""
        bad, what = self.at, ""
        while self.at < self._size:
            offset = self.at
            header = self._header(offset)
            if header is None:
                what = what or "a damaged frame"
                self.at = self._find_magic(offset + 1)
            elif offset + HEADER_BYTES + header.length > self._size:
                # An unfinished frame, or one whose middle is gone: there may be good frames behind.
                what = what or "an unfinished frame"
                self.at = self._find_magic(offset + HEADER_BYTES)
            else:
                self.at = offset + HEADER_BYTES + header.length
                content = unpack_payload(header, self._read(offset + HEADER_BYTES, header.length))
                if content is not None:
                    if offset > bad:
                        self._report(Cut(bad, offset - bad, -1, what))
                    return offset, header, content
                what = what or "a damaged frame"
        if self._size > bad:
            if self._size - bad < HEADER_BYTES and MAGIC.startswith(
                self._read(bad, min(8, self._size - bad))
            ):
                what = "an unfinished frame"
            self._report(Cut(bad, self._size - bad, -1, what))
        raise StopIteration

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(min(length, self._size - offset))

    def _header(self, offset: int) -> Header | None:
        # From the window of the search if it is there: a hostile file may hold a magic at every other byte.
        start = offset - self._window_at
        if 0 <= start <= len(self._window) - HEADER_BYTES:
            return unpack_header(self._window[start : start + HEADER_BYTES])
        return unpack_header(self._read(offset, HEADER_BYTES))

    def _find_magic(self, start: int) -> int:
        """Offset of the next magic from ``start`` on; the size of the file if there is none."""
        while start < self._size:
            if not 0 <= start - self._window_at <= len(self._window) - len(MAGIC):
                self._window, self._window_at = self._read(start, _SEARCH), start
            found = self._window.find(MAGIC, start - self._window_at)
            if found >= 0:
                return self._window_at + found
            end = self._window_at + len(self._window)
            if end >= self._size or len(self._window) < len(MAGIC):  # the file may have shrunk meanwhile
                break
            start = end - len(MAGIC) + 1
        return self._size
