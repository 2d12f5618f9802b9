"""From records to bytes and back. The journal's frames carry what this module makes.

One record::

    u16 kind | u32 length of the rest | 6 x i64 stamp | fixed part | strings | arrays | bulk part

The fixed part holds, in this order and without padding: all ``int`` (i64), ``float`` (f64) and ``bool`` (u8) fields
in the order of the schema, the byte length (u32) of each ``str`` field, and the dimensions (u32 each) of each array
field that is not bulk. The strings (UTF-8) and the array data follow. The bulk part comes last, so that it can be
cut off without touching the rest: the dimensions of each bulk field, then their data. Everything is little-endian.

The schema travels with the journal as JSON (:func:`schema_json`), so a reader of another minor version knows the
layout of every record: kinds and fields that it does not know are skipped, and fields that are missing take their
default. Nothing here runs code from a file.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capture_hooks.events import BY_TABLE, EVENTS
from capture_hooks.records import Event, Stamp, schema

FORMAT = "kv-replay/journal"
VERSION = (1, 0)  # a reader accepts every minor version of its major version

PREFIX = struct.Struct("<HI")

_SCALARS = {"int": "q", "float": "d", "bool": "?"}
_DTYPE = re.compile(r"\|[ui]1|<[uif][248]")
_MAX_FIELDS = 200
_MAX_KINDS = 1000
_MAX_DIMENSIONS = 4

StampTuple = tuple[int, int, int, int, int, int]


class CodecError(ValueError):
    """A record or a schema that cannot be what a writer wrote."""


class Encoded(NamedTuple):
    """One record without its prefix. ``bulk`` is its last part, ``bare`` what stands there when the bulk is given up.

    ``bulk`` and ``bare`` are empty for kinds without bulk fields.
    """

    kind: int
    seq: int
    head: bytes
    bulk: bytes
    bare: bytes

    @property
    def size(self) -> int:
        """Bytes in the journal, before compression."""
        return PREFIX.size + len(self.head) + len(self.bulk)

    def has_bulk(self) -> bool:
        """Whether any bulk field holds something."""
        return len(self.bulk) > len(self.bare)


def schema_json() -> bytes:
    """The schema of this version's events, canonical JSON."""
    kinds = [
        {
            "kind": event.KIND,
            "table": event.TABLE,
            "fields": [
                [item.name, item.type]
                if item.array is None
                else [item.name, item.type, item.array.dtype, list(item.array.shape), item.array.bulk]
                for item in schema(event)
            ],
        }
        for event in EVENTS
    ]
    body = {"format": FORMAT, "version": list(VERSION), "kinds": kinds}
    return json.dumps(body, separators=(",", ":")).encode()


# -- writing ----------------------------------------------------------------------------------------------------------


class _ArrayField:
    """How one array field is written."""

    __slots__ = ("_fixed", "_missing", "dimensions", "dtype", "name")

    def __init__(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
        self.name, self.dtype, self.dimensions = name, np.dtype(dtype), len(shape)
        self._fixed = [(axis, size) for axis, size in enumerate(shape) if size is not None]
        self._missing = (0,) * len(shape)

    def bytes_of(self, event: Event) -> tuple[tuple[int, ...], Any]:
        """Shape and contiguous data of the field; ``CodecError`` if it is not what was declared."""
        value = getattr(event, self.name)
        if value.__class__ is not np.ndarray or value.dtype != self.dtype:
            value = np.asarray(value, self.dtype)
        if not value.size and value.ndim == 1:
            return self._missing, b""
        if value.ndim != self.dimensions or any(value.shape[axis] != size for axis, size in self._fixed):
            raise CodecError(
                f"{event.TABLE}.{self.name} has shape {value.shape}, which is not what is declared"
            )
        # A copy of small arrays is cheaper than a memory view; large ones are copied once, by the join.
        if value.nbytes < 4096:
            return value.shape, value.tobytes()
        return value.shape, np.ascontiguousarray(value).data.cast("B")


class Encoder:
    """Encodes events of one kind."""

    def __init__(self, event: type[Event]) -> None:
        items = schema(event)
        self.kind, self.table = event.KIND, event.TABLE
        scalars = [item for item in items if item.type in _SCALARS]
        self._strings = [item.name for item in items if item.type == "str"]
        arrays = [item for item in items if item.array is not None]
        self._arrays = [_array_field(item) for item in arrays if item.array and not item.array.bulk]
        self._bulk = [_array_field(item) for item in arrays if item.array and item.array.bulk]
        self._pack = _fixed(items).pack
        self._pack_bulk = _bulk_dimensions(items).pack
        names = [item.name for item in scalars]
        if not names:
            self._values: Callable[[Event], tuple[Any, ...]] = lambda _: ()
        elif len(names) == 1:
            get = attrgetter(names[0])
            self._values = lambda event: (get(event),)
        else:
            self._values = attrgetter(*names)
        dimensions = sum(item.dimensions for item in self._bulk)
        self.bare = self._pack_bulk(*(0,) * dimensions)

    def encode(self, event: Event, stamp: StampTuple) -> Encoded:
        """``event`` as bytes; ``stamp`` in the order of :class:`Stamp`.

        Raises ``CodecError``, ``struct.error``, ``TypeError``, ``ValueError`` or ``OverflowError`` if a field holds
        something that was not declared.
        """
        dimensions: list[int] = []
        parts: list[Any] = []
        for name in self._strings:
            text = getattr(event, name).encode("utf-8", "backslashreplace")
            dimensions.append(len(text))
            parts.append(text)
        for item in self._arrays:
            shape, data = item.bytes_of(event)
            dimensions += shape
            parts.append(data)
        head = self._pack(*stamp, *self._values(event), *dimensions)
        if parts:
            head = b"".join((head, *parts))
        bulk = self.bare
        if self._bulk:
            sizes: list[int] = []
            data_parts: list[Any] = []
            for item in self._bulk:
                shape, data = item.bytes_of(event)
                sizes += shape
                data_parts.append(data)
            if any(sizes):
                bulk = b"".join((self._pack_bulk(*sizes), *data_parts))
        return Encoded(self.kind, stamp[0], head, bulk, self.bare)


def encode(event: Event, stamp: StampTuple) -> Encoded:
    """``event`` as bytes (:meth:`Encoder.encode`)."""
    return ENCODERS[event.KIND].encode(event, stamp)


def _array_field(item: Any) -> _ArrayField:
    return _ArrayField(item.name, item.array.dtype, item.array.shape)


def _fixed(items: Any) -> struct.Struct:
    scalars = "".join(_SCALARS[item.type] for item in items if item.type in _SCALARS)
    strings = "I" * sum(item.type == "str" for item in items)
    arrays = "I" * sum(
        len(item.array.shape) for item in items if item.array is not None and not item.array.bulk
    )
    return struct.Struct("<6q" + scalars + strings + arrays)


def _bulk_dimensions(items: Any) -> struct.Struct:
    return struct.Struct(
        "<" + "I" * sum(len(i.array.shape) for i in items if i.array is not None and i.array.bulk)
    )


ENCODERS: dict[int, Encoder] = {event.KIND: Encoder(event) for event in EVENTS}


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FileArray:
    dtype: str
    shape: tuple[int | None, ...]
    bulk: bool


@dataclass(frozen=True, slots=True)
class _FileField:
    name: str
    type: str
    array: _FileArray | None


class _KindDecoder:
    """Decodes the records of one kind as a journal's schema describes them."""

    def __init__(self, event: type[Event], items: list[_FileField]) -> None:
        self._event = event
        known = {item.name: item for item in schema(event)}

        def keeps(item: _FileField) -> bool:
            mine = known.get(item.name)
            if mine is None or mine.type != item.type:
                return False
            if item.array is None or mine.array is None:
                return item.array is None and mine.array is None
            return item.array.dtype == mine.array.dtype and len(item.array.shape) == len(mine.array.shape)

        self._fixed, self._bulk_dimensions = _fixed(items), _bulk_dimensions(items)
        self._scalars = [item.name if keeps(item) else None for item in items if item.type in _SCALARS]
        self._strings = [item.name if keeps(item) else None for item in items if item.type == "str"]
        arrays = [
            (item.name if keeps(item) else None, item.array) for item in items if item.array is not None
        ]
        self._arrays = [
            (name, np.dtype(array.dtype), array.shape) for name, array in arrays if not array.bulk
        ]
        self._bulk = [(name, np.dtype(array.dtype), array.shape) for name, array in arrays if array.bulk]
        present = {item.name for item in items if keeps(item)}
        self._defaults = {
            item.name: _ABSENT[str(item.type)]
            for item in fields(event)  # type: ignore[arg-type]  # every Event subclass is a dataclass
            if item.default is MISSING and item.default_factory is MISSING and item.name not in present
        }

    def decode(self, body: memoryview) -> tuple[Stamp, Event]:
        """The record in ``body`` (all of it). Arrays are read-only views of ``body``'s memory."""
        if len(body) < self._fixed.size:
            raise CodecError("a record is shorter than its fixed part")
        values = self._fixed.unpack_from(body)
        found: dict[str, Any] = dict(self._defaults)
        place = 6
        for name in self._scalars:
            if name is not None:
                found[name] = values[place]
            place += 1
        at = self._fixed.size
        for name in self._strings:
            stop = at + values[place]
            if stop > len(body):
                raise CodecError("a string ends past its record")
            if name is not None:
                found[name] = str(body[at:stop], "utf-8")
            at, place = stop, place + 1
        at = _take_arrays(self._arrays, values[place:], body, at, found)
        if self._bulk:
            if at + self._bulk_dimensions.size > len(body):
                raise CodecError("a record ends before its bulk part")
            sizes = self._bulk_dimensions.unpack_from(body, at)
            at = _take_arrays(self._bulk, sizes, body, at + self._bulk_dimensions.size, found)
        if at != len(body):
            raise CodecError("a record is longer than its fields")
        return Stamp(*values[:6]), self._event(**found)


_ABSENT: dict[str, Any] = {"int": -1, "float": 0.0, "bool": False, "str": ""}


def _take_arrays(
    declared: list[tuple[str | None, np.dtype[Any], tuple[int | None, ...]]],
    sizes: tuple[int, ...],
    body: memoryview,
    at: int,
    found: dict[str, Any],
) -> int:
    """Put the arrays at ``at`` of ``body`` into ``found``; returns where they end."""
    place = 0
    for name, dtype, declared_shape in declared:
        shape = sizes[place : place + len(declared_shape)]
        place += len(declared_shape)
        count = 1
        for size in shape:
            count *= size
        stop = at + count * dtype.itemsize
        if stop > len(body):
            raise CodecError("an array ends past its record")
        if name is not None and count:
            if any(
                want is not None and want != have for want, have in zip(declared_shape, shape, strict=True)
            ):
                raise CodecError(f"an array of shape {shape} is declared as {declared_shape}")
            found[name] = _view(body, dtype, count, at).reshape(shape)
        at = stop
    return at


def _view(body: memoryview, dtype: np.dtype[Any], count: int, at: int) -> npt.NDArray[Any]:
    return np.frombuffer(body, dtype, count, at)


class Decoder:
    """Decodes records of a journal by the schema that it carries."""

    def __init__(self, schema_bytes: bytes) -> None:
        self._kinds: dict[int, _KindDecoder] = {}
        self.unknown: dict[
            int, str
        ] = {}  #: kinds of the journal that this version does not know, with their table
        for kind, table, items in _checked_schema(schema_bytes):
            event = BY_TABLE.get(table)
            if event is None or items is None:
                self.unknown[kind] = table
            else:
                self._kinds[kind] = _KindDecoder(event, items)

    def decode(self, kind: int, body: memoryview) -> tuple[Stamp, Event] | None:
        """The record; ``None`` if its kind is not known here. ``CodecError`` if it is damaged."""
        decoder = self._kinds.get(kind)
        if decoder is None:
            if kind in self.unknown:
                return None
            raise CodecError(f"kind {kind} is not in the journal's schema")
        try:
            return decoder.decode(body)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CodecError(str(error)) from error


def _checked_schema(schema_bytes: bytes) -> list[tuple[int, str, list[_FileField] | None]]:
    """Kinds of a schema as (kind, table, fields); fields are None where a type is not known here."""
    try:
        body = json.loads(schema_bytes)
        if body["format"] != FORMAT or body["version"][0] != VERSION[0]:
            raise CodecError(
                f"format {body['format']!r} version {body['version']} is not {FORMAT} {VERSION[0]}.x"
            )
        kinds = body["kinds"]
        if len(kinds) > _MAX_KINDS:
            raise CodecError("the schema has too many kinds")
        return [(int(item["kind"]), str(item["table"]), _checked_fields(item["fields"])) for item in kinds]
    except CodecError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CodecError(f"the schema cannot be read: {error}") from error


def _checked_fields(items: list[Any]) -> list[_FileField] | None:
    if len(items) > _MAX_FIELDS:
        raise CodecError("the schema has too many fields")
    found = []
    for item in items:
        name, type_ = str(item[0]), str(item[1])
        if type_ == "array":
            dtype, shape = str(item[2]), tuple(item[3])
            if not _DTYPE.fullmatch(dtype) or not 1 <= len(shape) <= _MAX_DIMENSIONS:
                return None
            if not all(size is None or (isinstance(size, int) and 0 <= size < 2**31) for size in shape):
                raise CodecError("the schema has an impossible shape")
            found.append(_FileField(name, type_, _FileArray(dtype, shape, bool(item[4]))))
        elif type_ == "str" or type_ in _SCALARS:
            found.append(_FileField(name, type_, None))
        else:
            return None
    return found
