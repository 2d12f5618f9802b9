"""What every kind of record is made of: its base class, its stamp, and how its fields are declared and listed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Declared type of an array field: little-endian numpy dtype and shape (``None`` = any length).

    ``bulk`` marks payload (page bytes, keys, logits): it goes to the content-addressed blob store of the
    trace instead of an event table.
    """

    dtype: str
    shape: tuple[int | None, ...]
    bulk: bool = False

    def empty(self) -> npt.NDArray[Any]:
        """The value of a field that was not recorded."""
        return np.zeros(tuple(0 if n is None else n for n in self.shape), self.dtype)


def array(dtype: str, *shape: int | None, bulk: bool = False) -> Any:
    """Dataclass field for an array of ``dtype`` and ``shape``; empty by default.

    The first dimension must be ``None``: a field that was not recorded has length 0 there.
    """
    spec = ArraySpec(dtype, shape, bulk)
    return field(default_factory=spec.empty, metadata={"array": spec})


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who made a record, and when.

    ``begin_seq``/``begin_ns`` were taken when the action was asked for and ``seq``/``end_ns`` when it was over;
    for an instant they are equal. Times are ``time.monotonic_ns()``: comparable within one host only, and never
    used to order events (they may corroborate). ``stream`` is the device stream the work was put on, -1 for
    work done by the calling thread itself.
    """

    seq: int = -1
    begin_seq: int = -1
    thread: int = 0
    stream: int = -1
    begin_ns: int = 0
    end_ns: int = 0


class Event:
    """Base of all records. ``KIND`` is the number in the journal, ``TABLE`` the name of the trace's table."""

    __slots__ = ()
    KIND: ClassVar[int]
    TABLE: ClassVar[str]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of an event: ``type`` is "int", "float", "bool", "str" or "array"."""

    name: str
    type: str
    array: ArraySpec | None


def schema(event: type[Event]) -> tuple[FieldSpec, ...]:
    """The fields of ``event`` in order, as the journal, the trace and the builder see them."""
    found = []
    for item in fields(event):  # type: ignore[arg-type]  # every Event subclass is a dataclass
        spec = item.metadata.get("array")
        kind = "array" if spec is not None else str(item.type)
        found.append(FieldSpec(item.name, kind, spec))
    return tuple(found)
