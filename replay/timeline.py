"""What every page should hold, and who owned it when.

A trace's tables are turned into flat numpy columns once (:class:`Timeline`): one row a page snapshot, one a
page allocation, one a page free. Requests, buffers and (request, layer, logical page) *cells* get small
integers, so that the ladder compares whole columns and looks at single pages only where they differ.
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
from replay.page_columns import I64, MAX_LOGICAL, PLACE, BufferInfo, PageEvents, PageSnapshots, by_event
from replay.scope import Scope, scope_of
from replay.tellings import Tellings
from replay.trace.errors import DAMAGED, TraceError

if TYPE_CHECKING:
    from replay.trace.reader import Trace

Bool = npt.NDArray[np.bool_]


class Timeline:
    """Flat columns of a trace, with requests, buffers and owners resolved."""

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
        _check_logical(logical.values)
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
    def allocs(self) -> PageEvents:
        """Every page given to a request."""
        table = self.trace.table("alloc")
        pages = table.ragged("pages")
        event = pages.owner().astype(np.int64)
        inside = np.arange(len(event)) - np.asarray(pages.offsets, np.int64)[event]
        logical = table["logical"].astype(np.int64)[event] + inside
        _check_logical(logical)
        return self._page_events("alloc", event, logical, pages.values)

    @cached_property
    def frees(self) -> PageEvents:
        """Every page given back."""
        pages = self.trace.table("free").ragged("pages")
        event = pages.owner().astype(np.int64)
        return self._page_events("free", event, np.full(len(event), -1, np.int64), pages.values)

    def _page_events(self, name: str, event: I64, logical: I64, pages: npt.NDArray[np.int64]) -> PageEvents:
        table = self.trace.table(name)
        return PageEvents(
            event=event,
            process=table["process"].astype(np.int64)[event],
            request=self.request_column(name)[event],
            logical=logical,
            page=pages.astype(np.int64),
            begin_seq=table["begin_seq"].astype(np.int64)[event],
            seq=table["seq"].astype(np.int64)[event],
            line=line_numbers(table)[event],
        )

    @cached_property
    def shared_pages(self) -> frozenset[tuple[int, int, int]]:
        """(process, request, page) of pages that a request shares with their first owner (prefix reuse)."""
        rows = np.flatnonzero(self.shared_alloc)
        columns = (self.allocs.process, self.allocs.request, self.allocs.page)
        return frozenset(zip(*(c[rows].tolist() for c in columns), strict=True))

    @cached_property
    def _given(self) -> tuple[I64, I64]:
        """Sorted (process, request, logical) keys and the physical page last given for each."""
        allocs = self.allocs
        key = (allocs.process * max(1, len(self.requests)) + allocs.request) * MAX_LOGICAL + allocs.logical
        rows = np.flatnonzero(allocs.request >= 0)
        rows = rows[np.lexsort((allocs.seq[rows], key[rows]))]
        last = np.ones(len(rows), bool)
        last[:-1] = key[rows][1:] != key[rows][:-1]
        return key[rows][last], allocs.page[rows][last]

    def given_pages(self, process: I64, request: I64, logical: I64) -> I64:
        """Physical page that the allocator last gave for each logical page, -1 where no record says."""
        keys, pages = self._given
        if not len(keys):
            return np.full(len(process), -1, np.int64)
        wanted = (process * max(1, len(self.requests)) + request) * MAX_LOGICAL + logical
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[found] == wanted) & (request >= 0) & (logical >= 0), pages[found], -1)

    @cached_property
    def _given_again(self) -> dict[int, list[tuple[int, int]]]:
        """Keys of logical pages that were given more than once: (sequence number, page), in sequence."""
        allocs = self.allocs
        key = (allocs.process * max(1, len(self.requests)) + allocs.request) * MAX_LOGICAL + allocs.logical
        rows = np.flatnonzero(allocs.request >= 0)
        keys, count = np.unique(key[rows], return_counts=True)
        several = np.isin(key[rows], keys[count > 1])
        found: dict[int, list[tuple[int, int]]] = {}
        for row in rows[several].tolist():
            found.setdefault(int(key[row]), []).append((int(allocs.seq[row]), int(allocs.page[row])))
        return {name: sorted(given) for name, given in found.items()}

    def given_at(self, process: I64, request: I64, logical: I64, seq: I64) -> I64:
        """As :meth:`given_pages`, as it was at sequence number ``seq``: a page may be exchanged for another."""
        pages = self.given_pages(process, request, logical)
        if not self._given_again:
            return pages
        wanted = (process * max(1, len(self.requests)) + request) * MAX_LOGICAL + logical
        again = np.isin(wanted, np.fromiter(self._given_again, np.int64))
        for row in np.flatnonzero(again & (pages >= 0)).tolist():
            before = [page for at, page in self._given_again[int(wanted[row])] if at < int(seq[row])]
            pages[row] = before[-1] if before else -1
        return pages

    @cached_property
    def _handed_on(self) -> tuple[I64, I64]:
        """Sorted owner keys (process, request, page) and the sequence number at which another request got the page."""
        allocs = self.allocs
        rows = np.flatnonzero((allocs.request >= 0) & (allocs.page >= 0) & ~self.shared_alloc)
        rows = rows[np.lexsort((allocs.seq[rows], allocs.page[rows], allocs.process[rows]))]
        here, after = rows[:-1], rows[1:]
        same = (allocs.process[here] == allocs.process[after]) & (allocs.page[here] == allocs.page[after])
        same &= allocs.request[here] != allocs.request[after]
        here, after = here[same], after[same]
        keys = self._owner(allocs.process[here], allocs.request[here], allocs.page[here])
        order = np.lexsort((allocs.seq[after], keys))
        return keys[order], allocs.seq[after][order]

    def _owner(self, process: I64, request: I64, page: I64) -> I64:
        pair = process * max(1, len(self.requests)) + request
        known = (request >= 0) & (page >= 0) & (page < PLACE) & (pair < MAX_LOGICAL)
        return np.where(known, pair * PLACE + page, -1)

    def given_away(self, process: I64, request: I64, page: I64) -> I64:
        """Sequence number at which the page of each owner was last given to another request, the largest if never."""
        keys, seq = self._handed_on
        wanted = self._owner(process, request, page)
        found = np.searchsorted(keys, wanted, side="right") - 1
        result = np.full(len(wanted), np.iinfo(np.int64).max, np.int64)
        if len(keys):
            hit = (found >= 0) & (keys[np.maximum(found, 0)] == wanted) & (wanted >= 0)
            result[hit] = seq[found[hit]]
        return result

    @cached_property
    def _allocs_of_page(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        pairs = zip(self.allocs.process.tolist(), self.allocs.page.tolist(), strict=True)
        for row, pair in enumerate(pairs):
            found.setdefault(pair, []).append(row)
        return found

    @cached_property
    def _free_of(self) -> dict[tuple[int, int, int], list[int]]:
        found: dict[tuple[int, int, int], list[int]] = {}
        frees = self.frees
        columns = (frees.process, frees.request, frees.page)
        for row, key in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            found.setdefault(key, []).append(row)
        return found

    def allocs_of_page(self, process: int, page: int) -> list[int]:
        """Rows of :attr:`allocs` that gave out ``page``, in that process's sequence."""
        return self._allocs_of_page.get((process, page), [])

    def owner_before(self, process: int, page: int, seq: int) -> int:
        """The request that was last given ``page`` for itself before ``seq``, -1 where none was seen."""
        row = self._own_alloc(process, page, seq)
        return int(self.allocs.request[row]) if row is not None else -1

    def owned_since(self, process: int, page: int, seq: int) -> int:
        """When ``page`` was last given to a request for itself before ``seq``, -1 where that was not seen."""
        row = self._own_alloc(process, page, seq)
        return int(self.allocs.seq[row]) if row is not None else -1

    def _own_alloc(self, process: int, page: int, seq: int) -> int | None:
        found = None
        for row in self.allocs_of_page(process, page):
            if int(self.allocs.seq[row]) < seq and not self.shared_alloc[row]:
                found = row
        return found

    @cached_property
    def shared_alloc(self) -> Bool:
        """Whether each row of :attr:`allocs` is a share of a page that another request owns."""
        return np.asarray(self.trace.table("alloc")["shared"].astype(bool)[self.allocs.event])

    def alloc_row(self, process: int, request: int, page: int) -> int | None:
        """The allocation that gave ``page`` to ``request``; None where none was seen."""
        for row in reversed(self.allocs_of_page(process, page)):
            if int(self.allocs.request[row]) == request:
                return row
        return None

    def given_before(self, process: int, request: int, pages: Iterable[int], moment: Moment) -> bool:
        """Whether each of ``pages`` was given to the request before ``moment``, by proven order."""
        rows = (self.alloc_row(process, request, page) for page in pages)
        return all(row is not None and self.order.before(self.allocs.moment_of(row), moment) for row in rows)

    def free_row(self, process: int, request: int, page: int) -> int | None:
        """The free that took ``page`` from ``request``; None where none was seen."""
        rows = self._free_of.get((process, request, page), [])
        return rows[-1] if rows else None

    @cached_property
    def freed_seq(self) -> dict[tuple[int, int], int]:
        """(process, request) -> sequence number of the free that ended it: what runs later is an overshoot step.

        A request that was given pages again after it had given some back goes on.
        """
        last: dict[tuple[int, int], int] = {}
        allocs, frees = self.allocs, self.frees
        columns = (allocs.process, allocs.request, allocs.seq)
        for process, request, seq in zip(*(c.tolist() for c in columns), strict=True):
            last[(process, request)] = max(seq, last.get((process, request), -1))
        found: dict[tuple[int, int], int] = {}
        columns = (frees.process, frees.request, frees.seq)
        for process, request, seq in zip(*(c.tolist() for c in columns), strict=True):
            if seq > last.get((process, request), -1):
                found[(process, request)] = min(seq, found.get((process, request), seq))
        return found

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


def _check_logical(logical: npt.NDArray[np.int64]) -> None:
    if len(logical) and int(logical.max()) >= MAX_LOGICAL:
        raise TraceError(
            f"logical page {int(logical.max())} is beyond {MAX_LOGICAL - 1}", "the tables", DAMAGED
        )
