"""Which bytes every transfer carried where, from the descriptors of both sides alone.

The descriptors of a send are resolved to pieces: (destination buffer, page, byte range) <- (source buffer, page,
offset). A cell is *delivered* where its pieces bring the same bytes of the same logical page; everything else that
touches its page is a misdirected or a foreign write.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from capture_hooks.regions import Pieces as Resolved
from capture_hooks.regions import Regions
from replay.cells import Cells
from replay.order import Moment
from replay.page_columns import PLACE, BufferInfo, column_at, place, rows_in
from replay.receivers import receivers
from replay.timeline import Timeline
from replay.trace.errors import reading

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


#: Sends that are resolved at once, and cells that are looked up at once.
_SENDS = 1024
_CELLS = 65_536


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns, one row a piece of one descriptor. Buffers are numbers of ``Timeline.buffers``, -1 outside all."""

    send: I64  #: row of the send table
    request: I64
    source: I64
    source_page: I64
    source_start: I64
    buffer: I64
    page: I64
    start: I64
    stop: I64


def regions_of(timeline: Timeline) -> dict[int, Regions]:
    """The map of each process's buffers, by their numbers in ``Timeline.buffers``."""
    regions: dict[int, Regions] = {}
    for b in timeline.buffers:
        with reading(f"buffer {b.buffer} of process {b.process}"):
            regions.setdefault(b.process, Regions()).add(
                b.number, b.layer, b.name, b.layout, b.address, b.pages, b.pitch
            )
    return regions


class DescriptorMap:
    """All pieces of all sends of a trace, found by destination page."""

    def __init__(self, timeline: Timeline) -> None:
        """Remember ``timeline``; the pieces are resolved on first use."""
        self.timeline = timeline
        self.sends = timeline.trace.table("send")
        self.request = timeline.request_column("send")

    @cached_property
    def peers(self) -> I64:
        """Process that each send wrote to, -1 where it cannot be told."""
        return receivers(self.timeline)

    @cached_property
    def _regions(self) -> dict[int, Regions]:
        return regions_of(self.timeline)

    @cached_property
    def pieces(self) -> Pieces:
        """Every piece of every send, ordered by (destination buffer, page)."""
        source, destination = self.sends.ragged("source"), self.sends.ragged("destination")
        columns: list[npt.NDArray[np.int64]] = []
        process = self.sends["process"].astype(np.int64)
        # Sides of unequal length cannot be paired; the descriptors of such a send say nothing.
        paired = source.lengths == destination.lengths
        for from_process in np.unique(process).tolist():
            for to_process in np.unique(self.peers[process == from_process]).tolist():
                every = np.flatnonzero((process == from_process) & (self.peers == to_process) & paired)
                for start in range(0, len(every) if to_process >= 0 else 0, _SENDS):
                    rows = every[start : start + _SENDS]
                    left, right = source.take(rows), destination.take(rows)
                    columns.append(
                        self._resolve(
                            left.values,
                            right.values,
                            rows[left.owner()],
                            self._regions.get(int(from_process), Regions()),
                            self._regions.get(int(to_process), Regions()),
                        )
                    )
        table = np.concatenate([np.zeros((8, 0), np.int64), *columns], axis=1)
        table = table[:, np.lexsort((table[0], table[5], table[4]))]
        request = self.request[table[0]] if table.shape[1] else np.zeros(0, np.int64)
        return Pieces(table[0], request, *table[1:])

    def _resolve(
        self,
        source: npt.NDArray[np.uint64],
        destination: npt.NDArray[np.uint64],
        owner: I64,
        from_regions: Regions,
        to_regions: Regions,
    ) -> npt.NDArray[np.int64]:
        """Pieces of the descriptors of one pair of processes: rows of (send, source.., destination..)."""
        length = np.minimum(source[:, 1], destination[:, 1])
        with reading("send table, descriptors"):
            left = from_regions.resolve_many(source[:, 0], length)
            right = to_regions.resolve_many(destination[:, 0], length)
        # Cut both sides at each other's borders: a piece lies in one page on either side.
        joined = _intersect(left, right)
        send = owner[joined[0]] if joined.shape[1] else np.zeros(0, np.int64)
        return np.concatenate([send[None, :], joined[1:]])

    @cached_property
    def _place(self) -> I64:
        return place(self.pieces.buffer, self.pieces.page)

    def touching(self, buffer: int, page: int) -> I64:
        """Rows of :attr:`pieces` that write to ``page`` of destination ``buffer``."""
        wanted = buffer * PLACE + page
        low, high = np.searchsorted(self._place, [wanted, wanted + 1])
        return np.arange(low, high)

    @cached_property
    def _over(self) -> dict[tuple[int, int], int]:
        states = self.timeline.trace.table("transfer_state")
        found: dict[tuple[int, int], int] = {}
        for row in np.flatnonzero((states["state"] == "done") | (states["state"] == "error")).tolist():
            found.setdefault((int(states["process"][row]), int(states["transfer"][row])), row)
        return found

    def completion(self, send: int) -> Moment | None:
        """When the sender learned that the transfer of ``send`` was over, None where it never did."""
        row = self._over.get((int(self.sends["process"][send]), int(self.sends["transfer"][send])))
        return self.timeline.moment("transfer_state", row) if row is not None else None

    def may_write(self, buffer: int, page: int, begin: Moment, end: Moment, *, besides: int = -1) -> bool:
        """Whether some transfer that names the page may have written to it between two moments.

        Those of the request ``besides`` are left out.
        """
        sends = np.unique(self.pieces.send[self.touching(buffer, page)]).tolist()
        return any(int(self.request[send]) != besides and self.may_run(send, begin, end) for send in sends)

    def may_run(self, send: int, begin: Moment | None, end: Moment) -> bool:
        """Whether a transfer may have written between two moments, or at any time before ``end``.

        Only a proven order rules it out: it was over before ``begin``, or posted after ``end``.
        """
        order, over = self.timeline.order, self.completion(send)
        if begin is not None and over is not None and order.before(over, begin):
            return False
        return not order.before(end, self.timeline.moment("send", send))

    def failed(self, send: int) -> bool:
        """Whether the sender learned that the transfer of ``send`` had failed."""
        row = self._over.get((int(self.sends["process"][send]), int(self.sends["transfer"][send])))
        return row is not None and str(self.timeline.trace.table("transfer_state")["state"][row]) == "error"

    def sends_of(self, request: int) -> I64:
        """Rows of the send table that belong to a request."""
        low, high = np.searchsorted(self._by_request[0], [request, request + 1])
        return self._by_request[1][low:high]

    def sends_to(self, request: int, process: int) -> list[int]:
        """Those of a request that wrote to ``process``, or of which it cannot be told to whom."""
        return [row for row in self.sends_of(request).tolist() if int(self.peers[row]) in (process, -1)]

    @cached_property
    def _by_request(self) -> tuple[I64, I64]:
        rows = np.argsort(self.request, kind="stable")
        return self.request[rows], rows

    def delivered(self, cells: Cells) -> tuple[Bool, Bool]:
        """(judged, delivered) of each cell: whether the pieces of its own request bring its own page, whole.

        One piece may do it, or several together: ranks that each send their slice of a page that all of them hold.
        """
        snaps, pieces = self.timeline.snapshots, self.pieces
        seen = cells.stage["RC"]
        source = np.where(cells.stage["SE"] >= 0, cells.stage["SE"], cells.stage["SE+"])
        # A page that was never sent was never looked at by its sender: its store says where it lies.
        stored = cells.stage["ST"]
        elsewhere = (stored >= 0) & (column_at(snaps.process, stored) != cells.process)
        source = np.where((source < 0) & elsewhere, stored, source)
        judged = (seen >= 0) & (source >= 0) & np.isin(cells.request, self.request)
        judged &= ~np.isin(cells.request, self.request[self.peers < 0])  # where to is not known
        # A page that is shared with its first owner was brought for that one.
        judged &= column_at(snaps.request, seen) == cells.request
        sizes = self._page_bytes
        whole = (pieces.start == 0) & (pieces.source_start == 0) & (pieces.buffer >= 0) & (pieces.source >= 0)
        whole &= pieces.stop == sizes[np.maximum(pieces.buffer, 0)]
        whole &= sizes[np.maximum(pieces.source, 0)] == sizes[np.maximum(pieces.buffer, 0)]
        have = np.stack([pieces.request, pieces.buffer, pieces.page, pieces.source, pieces.source_page], 1)[
            whole
        ]
        looked_at = [column_at(c, rows) for rows in (seen, source) for c in (snaps.buffer, snaps.page)]
        want = np.stack([cells.request, *looked_at], 1)
        done = judged & self._brought(want, have)
        in_place = (pieces.start == pieces.source_start) & (pieces.buffer >= 0) & (pieces.request >= 0)
        partial = np.flatnonzero(in_place & ~whole)
        left = np.flatnonzero(judged & ~done)
        if len(partial) and len(left):
            done[left] = self._in_slices(cells, left, source[left], partial)
        return judged, done

    def _in_slices(self, cells: Cells, chosen: I64, source: I64, rows: I64) -> Bool:
        """Whether the pieces ``rows``, all in their place, together cover each of the ``chosen`` cells."""
        snaps, pieces = self.timeline.snapshots, self.pieces
        seen = cells.stage["RC"][chosen]
        # Each piece belongs to the cell of its request whose page it writes to.
        keys = np.stack([cells.request[chosen], snaps.buffer[seen], snaps.page[seen]], 1)
        written = np.stack([pieces.request[rows], pieces.buffer[rows], pieces.page[rows]], 1)
        every, number = np.unique(np.concatenate([keys, written]), axis=0, return_inverse=True)
        number = number.reshape(-1)
        cell_of = np.full(len(every), -1, np.int64)
        cell_of[number[: len(keys)]] = np.arange(len(keys))
        cell = cell_of[number[len(keys) :]]
        rows, cell = rows[cell >= 0], cell[cell >= 0]
        own = self.from_own_page(
            rows,
            snaps.buffer[source[cell]],
            snaps.page[source[cell]],
            cells.logical[chosen[cell]],
        )
        rows, cell = rows[own], cell[own]
        return covered(cell, pieces.start[rows], pieces.stop[rows], self._page_bytes[snaps.buffer[seen]])

    @cached_property
    def _page_bytes(self) -> I64:
        """Bytes of a page of each buffer."""
        return np.array([b.layout.page_bytes for b in self.timeline.buffers] or [0], np.int64)

    @cached_property
    def _process_of(self) -> I64:
        """The process of each buffer."""
        return np.array([b.process for b in self.timeline.buffers] or [-1], np.int64)

    def from_own_page(self, rows: I64, source: I64 | int, source_page: I64 | int, logical: I64 | int) -> Bool:
        """Whether each piece takes its bytes from a copy of the page that lies at ``source_page`` of ``source``.

        Ranks that share the work of a transfer hold the page each: what the allocator of another rank gave to the
        request for the same logical page is a copy too.
        """
        pieces, timeline = self.pieces, self.timeline
        slot, size, process = timeline.slot_of_buffer, self._page_bytes, self._process_of
        at, to = np.maximum(pieces.source[rows], 0), np.maximum(pieces.buffer[rows], 0)
        known = (pieces.source[rows] >= 0) & (pieces.buffer[rows] >= 0) & (source >= 0)
        known &= size[at] == size[to]  # the bytes of another format are right nowhere
        same = (pieces.source[rows] == source) & (pieces.source_page[rows] == source_page)
        given = timeline.owners.given_pages(
            process[at], pieces.request[rows], np.broadcast_to(logical, rows.shape)
        )
        twin = (process[at] != process[source]) & (slot[at] == slot[source])
        own: Bool = known & (same | (twin & (given == pieces.source_page[rows])))
        return own

    def _brought(self, want: I64, have: I64) -> Bool:
        """Whether each row of ``want`` is one of ``have``; both begin with the request, and ``want`` is sorted."""
        have = have[np.argsort(have[:, 0], kind="stable")]
        found = np.zeros(len(want), bool)
        for start in range(0, len(want), _CELLS):
            part = want[start : start + _CELLS]
            low, high = np.searchsorted(have[:, 0], [part[:, 0].min(), part[:, 0].max() + 1])
            found[start : start + _CELLS] = rows_in(part, have[low:high])
        return found

    @cached_property
    def _pieces_by_request(self) -> tuple[I64, I64]:
        rows = np.argsort(self.pieces.request, kind="stable")
        return self.pieces.request[rows], rows

    def pieces_of(self, request: int, process: int) -> I64:
        """Rows of :attr:`pieces` that belong to a request's sends to ``process``."""
        low, high = np.searchsorted(self._pieces_by_request[0], [request, request + 1])
        rows = self._pieces_by_request[1][low:high]
        found: I64 = rows[self.peers[self.pieces.send[rows]] == process]
        return found

    def lengths_to(self, request: int, buffer: BufferInfo) -> list[int]:
        """Lengths of the request's descriptors that begin in destination ``buffer``."""
        destination = self.sends.ragged("destination")
        address, size = buffer.address, buffer.pitch * buffer.pages
        found: set[int] = set()
        for send in self.sends_to(request, buffer.process):  # another receiver may have the same addresses
            rows = destination[send]
            if len(rows):
                inside = (rows[:, 0] >= address) & (rows[:, 0] < address + size)
                found |= {int(length) for length in rows[inside, 1]}
        return sorted(found)

    def told_lengths(self, request: int, process: int) -> set[int]:
        """Bytes a page with which the engine made the request's descriptors to ``process``; empty where not told."""
        lengths = self.sends.ragged("item_lengths")
        return {int(length) for send in self.sends_to(request, process) for length in lengths[send]}

    def own_bytes(
        self, request: int, buffer: int, page: int, source: int, source_page: int, logical: int
    ) -> Bool:
        """Bytes of a destination page that the request's own sends bring from the right place: ``bool[page_bytes]``."""
        pieces = self.pieces
        right = np.zeros(self.timeline.buffers[buffer].layout.page_bytes, bool)
        rows = self.touching(buffer, page)
        rows = rows[(pieces.request[rows] == request) & (pieces.source_start[rows] == pieces.start[rows])]
        for row in rows[self.from_own_page(rows, source, source_page, logical)].tolist():
            right[int(pieces.start[row]) : int(pieces.stop[row])] = True
        return right

    def senders_of(self, buffer: int) -> set[int]:
        """Prefill processes that may send to destination ``buffer``: those with a buffer of its name and layer."""
        timeline = self.timeline
        return {
            b.process
            for b in timeline.buffers
            if timeline.slot_of_buffer[b.number] == timeline.slot_of_buffer[buffer]
            and timeline.trace.processes[b.process].role == "prefill"
        }


def covered(group: I64, start: I64, stop: I64, size: I64) -> Bool:
    """Of each group ``0..len(size)-1``: whether its ranges ``[start, stop)`` together cover ``[0, size)``."""
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # One line for all groups, each in a stretch of its own, so that one running maximum serves them all.
    stretch = 1 + int(max(size.max(initial=0), stop.max(initial=0)))
    base = group * stretch
    reached = np.maximum.accumulate(base + stop)
    before = np.maximum(base, np.concatenate([[0], reached[:-1]]))
    whole = np.bincount(group[base + start > before], minlength=len(size)) == 0
    furthest = np.zeros(len(size), np.int64)
    np.maximum.at(furthest, group, stop)
    result: Bool = whole & (furthest >= size)
    return result


def _intersect(left: Resolved, right: Resolved) -> npt.NDArray[np.int64]:
    """Common refinement of two resolutions of the same descriptors: each row lies in one page on either side.

    Columns: descriptor, source buffer, page and start, destination buffer, page, start and stop.
    """
    count = 1 + int(max(left.descriptor.max(initial=-1), right.descriptor.max(initial=-1)))
    single = (np.bincount(left.descriptor, minlength=count) == 1) & (
        np.bincount(right.descriptor, minlength=count) == 1
    )
    a, b = np.flatnonzero(single[left.descriptor]), np.flatnonzero(single[right.descriptor])
    columns = [
        left.descriptor[a], left.buffer[a], left.page[a], left.start[a],
        right.buffer[b], right.page[b], right.start[b], right.stop[b],
    ]  # fmt: skip
    rows = [np.stack(columns)]
    first_left, last_left = _bounds(left.descriptor, count)
    first_right, last_right = _bounds(right.descriptor, count)
    found: list[tuple[int, ...]] = []
    for number in np.flatnonzero(~single).tolist():
        for i in range(first_left[number], last_left[number]):
            low, high = int(left.offset[i]), int(left.offset[i] + left.stop[i] - left.start[i])
            for j in range(first_right[number], last_right[number]):
                begin, end = int(right.offset[j]), int(right.offset[j] + right.stop[j] - right.start[j])
                start, stop = max(low, begin), min(high, end)
                if start < stop:
                    at = int(right.start[j]) + start - begin
                    found.append((
                        number, int(left.buffer[i]), int(left.page[i]), int(left.start[i]) + start - low,
                        int(right.buffer[j]), int(right.page[j]), at, at + stop - start,
                    ))  # fmt: skip
    if found:
        rows.append(np.array(found, np.int64).T)
    return np.concatenate(rows, axis=1)


def _bounds(descriptor: I64, count: int) -> tuple[I64, I64]:
    numbers = np.arange(count)
    return np.searchsorted(descriptor, numbers, side="left"), np.searchsorted(
        descriptor, numbers, side="right"
    )
