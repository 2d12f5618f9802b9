"""What was seen of every page: a trace's tables as flat numpy columns, made once (:class:`Timeline`).

One row is one page of a snapshot; ``owners`` has the pages given and given back. Requests, buffers and (request, layer,
logical page) *cells* get small integers, so that the ladder compares whole columns and looks at single pages only where
they differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import LAYOUTS
from replay.order import HappensBefore, Moment, line_numbers, moment
from replay.owners import Owners
from replay.page_columns import I64, MAX_LOGICAL, BufferInfo, PageSnapshots, by_event, check_logical
from replay.scope import Scope, scope_of
from replay.tellings import Tellings
from replay.trace.errors import DAMAGED, TraceError

if TYPE_CHECKING:
    from replay.trace.reader import Trace

Bool = npt.NDArray[np.bool_]


class Timeline:
    """Flat columns of a trace, with requests and buffers resolved."""

    def __init__(self, trace: Trace, scope: Scope | None = None) -> None:
        """Read the small tables of ``trace``; page snapshots are read on first use.

        ``scope`` limits what is judged further than the trace itself does (:func:`replay.scope.scope_of`).
        """
        self.trace = trace
        self.scope = scope_of(trace).joined(scope or Scope())
        self.unit_blocks: OrderedDict[int, npt.NDArray[np.uint64]] = (
            OrderedDict()
        )  #: cache of ``units.units_of``
        self.buffers = _buffers(trace)
        self._buffer_number = {(b.process, b.buffer): b.number for b in self.buffers}
        names = sorted({(b.name, b.layer) for b in self.buffers})
        self.slots = names
        slot_of = {name: number for number, name in enumerate(names)}
        self.slot_of_buffer = np.array([slot_of[(b.name, b.layer)] for b in self.buffers] or [-1], np.int64)
        self.requests, self._request_number = _requests(trace)
        self._request_columns: dict[str, I64] = {}
        self.request_rows = self._rows_of_requests()

    @cached_property
    def order(self) -> HappensBefore:
        """Happens-before of the trace."""
        return HappensBefore(self.trace)

    def request_number(self, room: int, attempt: int) -> int:
        """Number of a request, -1 where it is not in the trace."""
        return self._request_number.get((room, attempt), -1)

    def request_column(self, table: str) -> I64:
        """Request number of each record of ``table``."""
        if table not in self._request_columns:
            rows = self.trace.table(table)
            number = self._request_number
            pairs = zip(rows["room"].tolist(), rows["attempt"].tolist(), strict=True)
            self._request_columns[table] = np.array([number.get(pair, -1) for pair in pairs], np.int64)
        return self._request_columns[table]

    def buffer_column(self, table: str) -> I64:
        """Buffer number of each record of ``table``."""
        rows = self.trace.table(table)
        number = self._buffer_number
        pairs = zip(rows["process"].tolist(), rows["buffer"].tolist(), strict=True)
        return np.array([number.get(pair, -1) for pair in pairs], np.int64)

    def buffer_number(self, process: int, buffer: int) -> int:
        """Number of a buffer, -1 where it was never declared."""
        return self._buffer_number.get((process, buffer), -1)

    def _rows_of_requests(self) -> I64:
        """Valid prompt rows of each request, -1 where nobody told them."""
        table = self.trace.table("request")
        rows = np.full(len(self.requests), -1, np.int64)
        numbers, told = self.request_column("request"), table["rows"].astype(np.int64)
        known = (numbers >= 0) & (told >= 0)
        # The sides may disagree when one side's list is short; the longer claim is what must arrive.
        np.maximum.at(rows, numbers[known], told[known])
        return rows

    @cached_property
    def readers(self) -> frozenset[tuple[int, int]]:
        """(process, request) of every request that was read at least once."""
        process = self.trace.table("read")["process"].tolist()
        return frozenset(zip(process, self.request_column("read").tolist(), strict=True))

    @cached_property
    def marked(self) -> Bool:
        """Warm-up, health and fake requests (``bool[requests]``): nobody sent them anything, nobody judges them."""
        table = self.trace.table("request")
        numbers = self.request_column("request")
        marked = np.zeros(len(self.requests) + 1, bool)
        marked[numbers[(table["mark"] != "") & (numbers >= 0)]] = True
        return marked

    @cached_property
    def beside(self) -> Bool:
        """Requests that nobody judges (``bool[requests + 1]``): marked ones, and those outside the scope."""
        rooms = np.array([room for room, _ in self.requests] + [-1], np.int64)
        outside = ~self.scope.rooms_in(rooms)
        outside[-1] = False  # what belongs to no known request
        return self.marked | outside

    @cached_property
    def snapshots(self) -> PageSnapshots:
        """All page snapshots, flat."""
        table = self.trace.table("snapshot")
        pages, logical, content = (table.ragged(c) for c in ("pages", "logical", "content"))
        event = pages.owner()
        if not (len(pages.values) == len(logical.values) == len(content.values)):
            raise TraceError("pages, logical and content differ in length", "snapshot table", DAMAGED)
        check_logical(logical.values)
        buffer = self.buffer_column("snapshot")

        def of_record(values: I64) -> I64:
            return by_event(np.asarray(values, np.int64), event)

        return PageSnapshots(
            event=event,
            stage=table["stage"],
            moment=table["moment"],
            process=of_record(table["process"]),
            buffer=of_record(buffer),
            request=of_record(self.request_column("snapshot")),
            logical=np.asarray(logical.values, np.int64),
            page=np.asarray(pages.values, np.int64),
            content=np.asarray(content.values, np.int64),
            transfer=of_record(table["transfer"]),
            step=of_record(table["step"]),
            rows=of_record(table["rows"]),
            begin_seq=of_record(table["begin_seq"]),
            seq=of_record(table["seq"]),
            line=of_record(line_numbers(table)),
            slot=of_record(np.where(buffer >= 0, self.slot_of_buffer[np.maximum(buffer, 0)], -1)),
        )

    @cached_property
    def owners(self) -> Owners:
        """Who was given which page, and gave it back, when."""
        return Owners(self.trace, len(self.requests), self.request_column)

    def given_before(self, process: int, request: int, pages: Iterable[int], moment: Moment) -> bool:
        """Whether each of ``pages`` was given to the request before ``moment``, by proven order."""
        rows = (self.owners.alloc_row(process, request, page, before=moment.seq) for page in pages)
        return all(
            row is not None and self.order.before(self.owners.allocs.moment_of(row), moment) for row in rows
        )

    def phases(self, phase: str) -> dict[tuple[int, int], int]:
        """(process, request) -> row of the request table where it reached ``phase``."""
        table = self.trace.table("request")
        numbers = self.request_column("request")
        chosen = np.flatnonzero(table["phase"] == phase)
        return {(int(table["process"][row]), int(numbers[row])): int(row) for row in chosen}

    def moment(self, table: str, row: int) -> Moment:
        """The interval of record ``row`` of ``table``."""
        return moment(self.trace.table(table), row)

    @cached_property
    def tellings(self) -> Tellings:
        """Who told whom that a request is complete."""
        return Tellings(self.trace)

    def cell(self, request: I64, slot: I64, logical: I64) -> I64:
        """Key of each (request, layer and buffer name, logical page); -1 where a part is unknown."""
        key = (request * max(1, len(self.slots)) + slot) * MAX_LOGICAL + logical
        return np.where((request >= 0) & (slot >= 0) & (logical >= 0), key, -1)


def _buffers(trace: Trace) -> list[BufferInfo]:
    table = trace.table("buffer")
    found: list[BufferInfo] = []
    for row in range(len(table)):
        name = str(table["format"][row])
        if name not in LAYOUTS:
            continue  # a page format of a later version: its pages are not judged, and the judge says so
        found.append(
            BufferInfo(
                number=len(found),
                process=int(table["process"][row]),
                buffer=int(table["buffer"][row]),
                name=str(table["name"][row]),
                layer=int(table["layer"][row]),
                layout=LAYOUTS[name],
                address=int(table["address"][row]),
                pages=int(table["pages"][row]),
                pitch=int(table["pitch"][row]),
                item_length=int(table["item_length"][row]),
                tokens_per_row=int(table["tokens_per_row"][row]),
            )
        )
    return found


def _requests(trace: Trace) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int]]:
    pairs: dict[tuple[int, int], int] = {}
    for name in ("request", "alloc", "receive", "send", "snapshot", "read", "store"):
        table = trace.table(name)
        for pair in zip(table["room"].tolist(), table["attempt"].tolist(), strict=True):
            if pair[0] >= 0 and pair not in pairs:
                pairs[pair] = len(pairs)
    if len(pairs) * max(1, len(trace.table("buffer"))) >= (1 << 62) // MAX_LOGICAL:
        raise TraceError("more requests and buffers than can be told apart", "the tables", DAMAGED)
    return list(pairs), pairs
