"""Who owned which page when: every page that was given to a request, and every one that was given back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.order import line_numbers
from replay.page_columns import I64, MAX_LOGICAL, PLACE, PageEvents, check_logical, column_at
from replay.spans import Last, Spans

if TYPE_CHECKING:
    from replay.trace.reader import Trace

Bool = npt.NDArray[np.bool_]

#: Reasons of a free after which its request is over, whatever else it held.
ENDINGS = ("finish", "abort")


class Owners:
    """The allocations and frees of a trace, one row a page."""

    def __init__(self, trace: Trace, requests: int, column: Callable[[str], I64]) -> None:
        """The tables of ``trace`` are read on first use. ``requests`` is how many there are, ``column`` gives the
        request number of each record of a table, -1 where it is unknown.
        """
        self._trace, self._requests, self._column = trace, max(1, requests), column

    @cached_property
    def allocs(self) -> PageEvents:
        """Every page given to a request."""
        table = self._trace.table("alloc")
        pages = table.ragged("pages")
        event = pages.owner().astype(np.int64)
        inside = np.arange(len(event)) - np.asarray(pages.offsets, np.int64)[event]
        logical = table["logical"].astype(np.int64)[event] + inside
        check_logical(logical)
        return self._page_events("alloc", event, logical, pages.values)

    @cached_property
    def frees(self) -> PageEvents:
        """Every page given back."""
        pages = self._trace.table("free").ragged("pages")
        event = pages.owner().astype(np.int64)
        return self._page_events("free", event, np.full(len(event), -1, np.int64), pages.values)

    def _page_events(self, name: str, event: I64, logical: I64, pages: npt.NDArray[np.int64]) -> PageEvents:
        table = self._trace.table(name)
        return PageEvents(
            event=event,
            process=table["process"].astype(np.int64)[event],
            request=self._column(name)[event],
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
    def _given(self) -> Last:
        allocs = self.allocs
        return Last(self._place(allocs.process, allocs.request, allocs.logical), allocs.seq)

    def given_pages(self, process: I64, request: I64, logical: I64) -> I64:
        """Physical page that the allocator last gave for each logical page, -1 where no record says."""
        return self._page_at(process, request, logical, np.full(len(process), np.iinfo(np.int64).max))

    def given_at(self, process: I64, request: I64, logical: I64, seq: I64) -> I64:
        """As :meth:`given_pages`, as it was at sequence number ``seq``: a page may be exchanged for another.

        -1 also where the page was not the request's any more: what it was given instead was not seen.
        """
        seq = np.asarray(seq, np.int64)
        page = self._page_at(process, request, logical, seq)
        return np.where(self.lost(process, request, page, seq), -1, page)

    def _page_at(self, process: I64, request: I64, logical: I64, seq: I64) -> I64:
        key = self._place(process, request, logical)
        return np.where(key >= 0, column_at(self.allocs.page, self._given.before(key, seq)), -1)

    @cached_property
    def _away(self) -> Spans:
        """When each owner (process, request, page) had lost its page: given back, or given to another request."""
        allocs, frees = self.allocs, self.frees
        own = np.flatnonzero((allocs.request >= 0) & (allocs.page >= 0) & ~self.shared_alloc)
        own = own[np.lexsort((allocs.seq[own], allocs.page[own], allocs.process[own]))]
        here, after = own[:-1], own[1:]
        same = (allocs.process[here] == allocs.process[after]) & (allocs.page[here] == allocs.page[after])
        same &= allocs.request[here] != allocs.request[after]
        here, after = here[same], after[same]
        keys = (
            self._owner(allocs.process[here], allocs.request[here], allocs.page[here]),
            self._owner(frees.process, frees.request, frees.page),
            self._owner(allocs.process, allocs.request, allocs.page),
        )
        key = np.concatenate(keys)
        lost = np.arange(len(key)) < len(here) + len(frees.page)
        seq = np.concatenate([allocs.seq[after], frees.seq, allocs.seq])
        return Spans(key[key >= 0], seq[key >= 0], lost[key >= 0])

    def _place(self, process: I64, request: I64, logical: I64) -> I64:
        pair = self._pair(process, request)
        return np.where((pair >= 0) & (logical >= 0), pair * MAX_LOGICAL + logical, -1)

    def _owner(self, process: I64, request: I64, page: I64) -> I64:
        pair = self._pair(process, request)
        known = (pair >= 0) & (page >= 0) & (page < PLACE) & (pair < MAX_LOGICAL)
        return np.where(known, pair * PLACE + page, -1)

    def _pair(self, process: I64, request: I64) -> I64:
        return np.where(request >= 0, process * self._requests + request, -1)

    def lost(self, process: I64, request: I64, page: I64, seq: I64) -> Bool:
        """Whether each page was not its request's at ``seq`` any more: given back or given to another, and not given
        again. A page whose allocation was never seen counts as the request's.
        """
        return self._away.inside(self._owner(process, request, page), np.asarray(seq, np.int64))

    @cached_property
    def _over(self) -> Spans:
        allocs, ends = self.allocs, self._ends
        taken = np.unique(np.column_stack([self._pair(allocs.process, allocs.request), allocs.seq]), axis=0)
        key = np.concatenate([ends[:, 0], taken[:, 0]])
        lost = np.arange(len(key)) < len(ends)
        seq = np.concatenate([ends[:, 1], taken[:, 1]])
        return Spans(key[key >= 0], seq[key >= 0], lost[key >= 0])

    @cached_property
    def _ends(self) -> I64:
        """(process and request, sequence number) of every free that ended a request: by its reason, or because
        the request held no page afterwards.
        """
        frees, allocs = self.frees, self.allocs
        reason = self._trace.table("free")["reason"]
        pair, given = self._pair(frees.process, frees.request), self._pair(allocs.process, allocs.request)
        by_reason = (
            np.isin(reason.astype(str), ENDINGS)[frees.event] if len(frees.event) else np.zeros(0, bool)
        )
        found = np.column_stack([pair[by_reason], frees.seq[by_reason]])
        # The others may have given back a part of their pages: what they held is counted.
        rest = np.unique(pair[~by_reason])
        rest = rest[rest >= 0]
        key, seq = np.concatenate([given, pair]), np.concatenate([allocs.seq, frees.seq])
        page, gained = np.concatenate([allocs.page, frees.page]), np.arange(len(key)) < len(given)
        rows = np.flatnonzero(np.isin(key, rest))
        rows = rows[np.lexsort((seq[rows], key[rows]))]
        holds: dict[int, set[int]] = {}
        last: dict[tuple[int, int], bool] = {}
        columns = (key[rows], seq[rows], page[rows], gained[rows])
        for who, when, which, more in zip(*(c.tolist() for c in columns), strict=True):
            held = holds.setdefault(who, set())
            if more:
                held.add(which)
            else:
                held.discard(which)
                last[who, when] = not held  # after the last page of one free
        emptied = [at for at, empty in last.items() if empty]
        return np.concatenate([found, np.array(emptied, np.int64).reshape(-1, 2)])

    def over(self, process: I64, request: I64, seq: I64) -> Bool:
        """Whether each request had given its pages back before ``seq`` and was given none since: what runs then is an
        overshoot step.
        """
        return self._over.inside(self._pair(process, request), np.asarray(seq, np.int64))

    @cached_property
    def ended(self) -> frozenset[tuple[int, int]]:
        """(process, request) of every request that gave its pages back and was given none afterwards."""
        keys = np.unique(self._ends[:, 0])
        keys = keys[keys >= 0]
        last = np.full(len(keys), np.iinfo(np.int64).max - 1)
        return frozenset(
            (int(key) // self._requests, int(key) % self._requests)
            for key in keys[self._over.inside(keys, last)].tolist()
        )

    @cached_property
    def _allocs_of_page(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        pairs = zip(self.allocs.process.tolist(), self.allocs.page.tolist(), strict=True)
        for row, pair in enumerate(pairs):
            found.setdefault(pair, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: int(self.allocs.seq[row]))
        return found

    @cached_property
    def _free_of(self) -> dict[tuple[int, int, int], list[int]]:
        found: dict[tuple[int, int, int], list[int]] = {}
        frees = self.frees
        columns = (frees.process, frees.request, frees.page)
        for row, key in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            found.setdefault(key, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: int(frees.seq[row]))
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
        return np.asarray(self._trace.table("alloc")["shared"].astype(bool)[self.allocs.event])

    def alloc_row(self, process: int, request: int, page: int, before: int | None = None) -> int | None:
        """The last allocation that gave ``page`` to ``request``, before sequence number ``before`` where that is told;
        None where none was seen.
        """
        for row in reversed(self.allocs_of_page(process, page)):
            if int(self.allocs.request[row]) == request and (
                before is None or int(self.allocs.seq[row]) < before
            ):
                return row
        return None

    def alloc_at(self, process: int, request: int, page: int, seq: int) -> int | None:
        """The allocation by which ``request`` has ``page`` in a look that ended at ``seq``: the last one before it.

        A request that shares the page later has its owner's look for its own: then the first one after it.
        """
        row = self.alloc_row(process, request, page, before=seq)
        if row is not None:
            return row
        rows = self.allocs_of_page(process, page)
        return next((row for row in rows if int(self.allocs.request[row]) == request), None)

    def free_row(self, process: int, request: int, page: int, since: int = -1) -> int | None:
        """The first free that took ``page`` from ``request`` after sequence number ``since``, None if none was seen."""
        for row in self._free_of.get((process, request, page), []):
            if int(self.frees.seq[row]) > since:
                return row
        return None
