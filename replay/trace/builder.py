"""Building a trace by hand, from plain Python and numpy values.

Scenario tests, golden traces and anybody with data of their own use this. It checks types and shapes, never sense: a
trace may say that a page was read before it was written, because that is what a fault looks like. See
``docs/building-traces.md``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import abc
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import (
    EVENTS,
    Alloc,
    Buffer,
    Clock,
    Copy,
    Free,
    Hook,
    Loss,
    Mapping,
    Metadata,
    Order,
    Process,
    Read,
    Receive,
    Registration,
    Request,
    Send,
    Snapshot,
    Store,
    StoreParams,
    TransferState,
    Trigger,
    Trim,
)
from capture_hooks.layouts import OPAQUE, layout
from capture_hooks.records import ArraySpec, Event, Stamp, schema
from replay.trace.writer import TraceWriter
from replay.words import counted

#: What the judge wants to know whether a hook saw all of it.
COVERS = ("store", "alloc", "send", "receive", "completion", "read", "top-k", "copy", "metadata")
#: Nanoseconds between two records that were given no time.
_TICK_NS = 1_000


class ProcessBuilder:
    """One process of a trace; made by :meth:`TraceBuilder.process`.

    There is one method a kind of event. It takes the fields of the dataclass in ``capture_hooks.events`` as keyword
    arguments, and besides:

    * ``thread`` (0), ``stream`` (-1);
    * ``seq``: the record's place in the process; the next one where it is left out;
    * ``begin_seq``: where the recorded action began; ``seq`` where left out;
    * ``begin_ns``, ``end_ns``: its times; the builder's own clock, one microsecond a record, where left out.

    Arrays may be lists. Every method returns the record's ``seq``. ``TypeError`` names a wrong argument,
    ``ValueError`` a value that does not fit its field.
    """

    def __init__(self, builder: TraceBuilder, number: int, process: Process) -> None:
        self._builder = builder
        self.number = number
        self._next = 0
        self._page_bytes: dict[int, int] = {}
        self._ended, self._cut = True, ""
        self._emit(Process, {item.name: getattr(process, item.name) for item in schema(Process)})

    def _emit(self, event: type[Event], given: dict[str, Any]) -> int:
        stamp = self._stamp(given)
        self._builder._add(self.number, stamp, _build(event, given))
        return stamp.seq

    def _stamp(self, given: dict[str, Any]) -> Stamp:
        times = {name: given.pop(name, None) for name in ("seq", "begin_seq", "begin_ns", "end_ns")}
        thread, stream = int(given.pop("thread", 0)), int(given.pop("stream", -1))
        seq = self._next if times["seq"] is None else int(times["seq"])
        self._next = max(self._next, seq + 1)
        begin_ns, end_ns = times["begin_ns"], times["end_ns"]
        if begin_ns is None:
            begin_ns = self._builder._now() if end_ns is None else end_ns
        return Stamp(
            seq=seq,
            begin_seq=seq if times["begin_seq"] is None else int(times["begin_seq"]),
            thread=thread,
            stream=stream,
            begin_ns=int(begin_ns),
            end_ns=int(begin_ns if end_ns is None else end_ns),
        )

    @property
    def next_seq(self) -> int:
        """The ``seq`` that the next record gets."""
        return self._next

    def buffer(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Buffer`. ``pitch`` and ``item_length`` default to the page size.

        A buffer in format ``layouts.OPAQUE`` has no page size: its ``pitch`` must be given, and it takes no snapshots.
        """
        name = str(fields.get("format", "fp8"))
        if name == OPAQUE:
            fields.setdefault("item_length", fields["pitch"])
            return self._emit(Buffer, fields)
        page = layout(name).page_bytes
        fields.setdefault("pitch", page)
        fields.setdefault("item_length", page)
        self._page_bytes[int(fields["buffer"])] = page
        return self._emit(Buffer, fields)

    def snapshot(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Snapshot`.

        ``data`` alone is enough: digests are computed from the format of ``buffer``, which must have been added
        before. ``row_values`` and ``row_scales`` alone give the page digests; ``digests`` alone is a snapshot without
        row digests. All of them have one entry a page.
        """
        pages = len(fields.get("pages", ()))
        logical = fields.get("logical")
        if logical is not None and len(logical) != pages:
            raise ValueError(
                f"snapshot: {counted(len(logical), 'logical page')} for {counted(pages, 'page')}"
            )
        for name in ("digests", "row_values", "row_scales", "data"):
            if fields.get(name) is None:
                fields.pop(name, None)
            elif len(fields[name]) != pages:
                raise ValueError(
                    f"snapshot: {name} has {counted(len(fields[name]), 'entry', 'entries')} for "
                    f"{counted(pages, 'page')}"
                )
        if "data" in fields:
            self._check_data(fields)
        return self._emit(Snapshot, fields)

    def _check_data(self, fields: dict[str, Any]) -> None:
        given = fields["data"]
        if isinstance(given, (list, tuple)):
            given = [np.frombuffer(page, np.uint8) if isinstance(page, bytes) else page for page in given]
        data = np.asarray(given)
        wanted = self._page_bytes.get(int(fields.get("buffer", -1)))
        if wanted is None and "digests" not in fields:
            raise ValueError(
                f"snapshot: add buffer {fields.get('buffer', -1)} first, its format gives the digests"
            )
        if wanted is not None and (data.ndim != 2 or data.shape[1] != wanted):
            raise ValueError(f"snapshot: data must be uint8[n, {wanted}], not {data.dtype}{list(data.shape)}")
        fields["data"] = data

    def request(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Request`."""
        return self._emit(Request, fields)

    def alloc(self, **fields: Any) -> int:
        """Add an :class:`~capture_hooks.events.Alloc`."""
        return self._emit(Alloc, fields)

    def free(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Free`."""
        return self._emit(Free, fields)

    def store(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Store`."""
        return self._emit(Store, fields)

    def store_params(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.StoreParams`."""
        return self._emit(StoreParams, fields)

    def send(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Send`."""
        return self._emit(Send, fields)

    def receive(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Receive`."""
        return self._emit(Receive, fields)

    def transfer_state(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.TransferState`."""
        return self._emit(TransferState, fields)

    def read(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Read`."""
        return self._emit(Read, fields)

    def copy(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Copy`."""
        return self._emit(Copy, fields)

    def mapping(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Mapping`."""
        return self._emit(Mapping, fields)

    def metadata(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Metadata`."""
        return self._emit(Metadata, fields)

    def order(self, **fields: Any) -> int:
        """Add one end of an :class:`~capture_hooks.events.Order` edge; :meth:`TraceBuilder.edge` adds both."""
        return self._emit(Order, fields)

    def hook(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Hook`."""
        return self._emit(Hook, fields)

    def loss(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Loss`."""
        return self._emit(Loss, fields)

    def trigger(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Trigger`."""
        return self._emit(Trigger, fields)

    def registration(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Registration`."""
        return self._emit(Registration, fields)

    def clock(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Clock`."""
        return self._emit(Clock, fields)

    def trim(self, **fields: Any) -> int:
        """Add a :class:`~capture_hooks.events.Trim`."""
        return self._emit(Trim, fields)

    def hooks_complete(self, *covers: str) -> None:
        """Declare hooks that saw everything of ``covers`` (all of :data:`COVERS` by default).

        Without it "there was no such event" proves nothing, and the judge says so.
        """
        for name in covers or COVERS:
            self.hook(name=f"built.{name}", covers=name, state="attached", fired=1, complete=True)

    def killed(self, cut: str = "") -> None:
        """The process did not end normally; ``cut`` says what of its journal could not be read."""
        self._ended, self._cut = False, cut


class TraceBuilder:
    """Writes a trace file from values given by hand.

    Use as a context manager: the file appears when the block ends, and not where the block raises.

    Args:
        path: file to write; ``TraceError`` if it exists and ``replace`` is not set.
        replace: replace an existing file.
    """

    def __init__(self, path: str | os.PathLike[str], replace: bool = False) -> None:
        self.path = Path(path)
        self._writer = TraceWriter(self.path, replace)
        self._processes: list[ProcessBuilder] = []
        self._clock_ns = 0
        self._edges = 0
        self._open = True

    def process(
        self,
        *,
        role: str,
        rank: int = 0,
        options: str | abc.Mapping[str, Any] = "",
        environment: str | abc.Mapping[str, Any] = "",
        **fields: Any,
    ) -> ProcessBuilder:
        """Add a process. Further fields are those of :class:`~capture_hooks.events.Process`."""
        fields |= {"role": role, "rank": rank}
        for name, value in (("options", options), ("environment", environment)):
            fields[name] = value if isinstance(value, str) else json.dumps(value)
        event = _build(Process, fields)
        assert isinstance(event, Process)
        process = ProcessBuilder(self, self._writer.add_process(event), event)
        self._processes.append(process)
        return process

    def edge(
        self,
        before: ProcessBuilder,
        after: ProcessBuilder,
        what: str = "queue",
        key: str | None = None,
        before_thread: int = 0,
        after_thread: int = 0,
    ) -> None:
        """Everything so far on ``before``'s thread happened before everything from now on on ``after``'s."""
        self._edges += 1
        name = f"edge-{self._edges}" if key is None else key
        before.order(what=what, key=name, end="tail", thread=before_thread)
        after.order(what=what, key=name, end="head", thread=after_thread)

    def _add(self, process: int, stamp: Stamp, event: Event) -> None:
        if not self._open:
            raise ValueError("the trace has been closed")
        self._writer.add(process, stamp, event)

    def _now(self) -> int:
        self._clock_ns += _TICK_NS
        return self._clock_ns

    def close(self) -> None:
        """Write the file."""
        if self._open:
            self._open = False
            with self._writer:
                for process in self._processes:
                    self._writer.end_process(process.number, process._ended, process._cut)

    def discard(self) -> None:
        """Give up: no file is written."""
        if self._open:
            self._open = False
            self._writer.discard()

    def __enter__(self) -> TraceBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


_SCHEMAS = {event: {item.name: item for item in schema(event)} for event in EVENTS}


def _build(event: type[Event], given: dict[str, Any]) -> Event:
    """The record with ``given`` as its fields, each converted to its declared type."""
    known = _SCHEMAS[event]
    converted: dict[str, Any] = {}
    for name, value in given.items():
        item = known.get(name)
        if item is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            raise TypeError(f"{event.TABLE} has no field {name!r}{hint}")
        try:
            converted[name] = (
                _SCALARS[item.type](value) if item.array is None else _to_array(item.array, value)
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{event.TABLE}: {name}: {error}") from error
    return event(**converted)


def _to_int(value: Any) -> int:
    found = value.__index__() if hasattr(value, "__index__") else None
    if found is None or not -(2**63) <= found < 2**63:
        raise ValueError(f"{value!r} is no 64-bit integer")
    return int(found)


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


_SCALARS: dict[str, Any] = {"int": _to_int, "float": float, "bool": bool, "str": _to_text}


def _to_array(spec: ArraySpec, value: Any) -> npt.NDArray[Any]:
    """A copy of ``value`` of the declared type and shape; a conversion that loses something is refused."""
    given = np.asarray(value)
    dtype = np.dtype(spec.dtype)
    if given.size == 0:
        return spec.empty()
    wanted = ", ".join("n" if n is None else str(n) for n in spec.shape)
    if given.ndim != len(spec.shape) or any(
        n is not None and n != m for n, m in zip(spec.shape, given.shape, strict=True)
    ):
        raise ValueError(f"expected {dtype.name}[{wanted}], not {given.dtype.name}{list(given.shape)}")
    if given.dtype == dtype:
        return given.copy()
    if dtype.kind in "iu" and given.dtype.kind not in "iub":
        raise ValueError(f"expected {dtype.name}[{wanted}], not {given.dtype.name}")
    if dtype.kind in "iu" and given.size:
        limits = np.iinfo(dtype)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise ValueError(f"{int(given.min())}..{int(given.max())} does not fit {dtype.name}")
    return given.astype(dtype)
