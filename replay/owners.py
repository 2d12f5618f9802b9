"""Who owned which page when: every page that was given to a request, and every one that was given back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.order import Moment, line_numbers
from replay.page_columns import I64, MAX_LOGICAL, PLACE, PageEvents, check_logical

if TYPE_CHECKING:
    from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]


class Owners:
    """The allocations and frees of a trace, one row a page."""

    def __init__(self, timeline: Timeline) -> None:
        """Remember ``timeline``; its tables are read on first use."""
        self.timeline = timeline

    @cached_property
    def allocs(self) -> PageEvents:
        """Every page given to a request."""
        table = self.timeline.trace.table("alloc")
        pages = table.ragged("pages")
        event = pages.owner().astype(np.int64)
        inside = np.arange(len(event)) - np.asarray(pages.offsets, np.int64)[event]
        logical = table["logical"].astype(np.int64)[event] + inside
        check_logical(logical)
        return self._page_events("alloc", event, logical, pages.values)

    @cached_property
    def frees(self) -> PageEvents:
        """Every page given back."""
        pages = self.timeline.trace.table("free").ragged("pages")
        event = pages.owner().astype(np.int64)
        return self._page_events("free", event, np.full(len(event), -1, np.int64), pages.values)

    def _page_events(self, name: str, event: I64, logical: I64, pages: npt.NDArray[np.int64]) -> PageEvents:
        table = self.timeline.trace.table(name)
        return PageEvents(
            event=event,
            process=table["process"].astype(np.int64)[event],
            request=self.timeline.request_column(name)[event],
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
        key = (
            allocs.process * max(1, len(self.timeline.requests)) + allocs.request
        ) * MAX_LOGICAL + allocs.logical
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
        wanted = (process * max(1, len(self.timeline.requests)) + request) * MAX_LOGICAL + logical
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[found] == wanted) & (request >= 0) & (logical >= 0), pages[found], -1)

    @cached_property
    def _given_again(self) -> dict[int, list[tuple[int, int]]]:
        """Keys of logical pages that were given more than once: (sequence number, page), in sequence."""
        allocs = self.allocs
        key = (
            allocs.process * max(1, len(self.timeline.requests)) + allocs.request
        ) * MAX_LOGICAL + allocs.logical
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
        wanted = (process * max(1, len(self.timeline.requests)) + request) * MAX_LOGICAL + logical
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
        pair = process * max(1, len(self.timeline.requests)) + request
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
        return np.asarray(self.timeline.trace.table("alloc")["shared"].astype(bool)[self.allocs.event])

    def alloc_row(self, process: int, request: int, page: int) -> int | None:
        """The allocation that gave ``page`` to ``request``; None where none was seen."""
        for row in reversed(self.allocs_of_page(process, page)):
            if int(self.allocs.request[row]) == request:
                return row
        return None

    def given_before(self, process: int, request: int, pages: Iterable[int], moment: Moment) -> bool:
        """Whether each of ``pages`` was given to the request before ``moment``, by proven order."""
        rows = (self.alloc_row(process, request, page) for page in pages)
        return all(
            row is not None and self.timeline.order.before(self.allocs.moment_of(row), moment) for row in rows
        )

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
