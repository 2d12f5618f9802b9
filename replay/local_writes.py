"""Which bytes of a page a process wrote itself: stores and copies, resolved as their kernels were told to.

A store or copy that was given a wrong stride, unit or slot lands elsewhere than it should: what counts here is where it
lands. Transfers, which come from another process, are ``descriptors.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from capture_hooks.regions import Pieces, Regions
from replay.copies import Copies
from replay.descriptors import regions_of
from replay.order import Moment
from replay.page_columns import PLACE, BufferInfo, place
from replay.timeline import Timeline
from replay.trace.errors import reading

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

#: Stores whose slots are looked at at once.
_STORES = 1024


@dataclass(frozen=True, slots=True)
class LocalWrite:
    """What one store or copy record writes to one page. ``entries`` are the slots or ids of the record that hit it."""

    table: str  #: "store" or "copy"
    row: int  #: row of that table
    request: int
    moment: Moment
    entries: I64
    mask: Bool  #: ``bool[page_bytes]``
    padding: bool  #: a negative slot, which a right kernel skips


class LocalWrites:
    """All stores and copies of a trace, found by the page in which they land."""

    def __init__(self, timeline: Timeline) -> None:
        """Remember ``timeline``; the records are read and resolved on first use."""
        self.timeline = timeline
        self.stores = timeline.trace.table("store")
        self.copies = timeline.trace.table("copy")

    def buffer_of(self, table: str, row: int) -> BufferInfo | None:
        """The buffer that a record writes to, None where it was never declared (a host tier)."""
        column = self._store_buffer if table == "store" else self._copy_buffer
        number = int(column[row])
        return self.timeline.buffers[number] if number >= 0 else None

    @cached_property
    def origins(self) -> Copies:
        """Where copied pages came from."""
        return Copies(self.timeline)

    @cached_property
    def store_request(self) -> I64:
        """Request number of each record of the store table."""
        return self.timeline.request_column("store")

    @cached_property
    def copy_request(self) -> I64:
        """Request number of each record of the copy table."""
        return self.timeline.request_column("copy")

    @cached_property
    def _regions(self) -> dict[int, Regions]:
        return regions_of(self.timeline)

    @cached_property
    def _store_buffer(self) -> I64:
        return self.timeline.buffer_column("store")

    @cached_property
    def _copy_buffer(self) -> I64:
        return self.timeline.buffer_column("copy")

    @cached_property
    def strided(self) -> I64:
        """Rows of the store table whose kernel was given another stride than the buffer's page pitch."""
        stride = self.stores["stride"].astype(np.int64)
        pitch = np.array([b.pitch for b in self.timeline.buffers] or [0], np.int64)
        return np.flatnonzero(
            (self._store_buffer >= 0) & (stride > 0) & (stride != pitch[np.maximum(self._store_buffer, 0)])
        )

    @cached_property
    def _index(self) -> tuple[I64, I64, I64]:
        """(places in ascending order, 0 store or 1 copy, row) of every page that a record touches, each once."""
        parts = [np.zeros((3, 0), np.int64), self._plain_stores()]
        for row in self.strided.tolist():
            info = self.timeline.buffers[int(self._store_buffer[row])]
            parts.append(self._found(self._store_pieces(row, info), 0, row))
        for row in np.flatnonzero(self._copy_buffer >= 0).tolist():
            info = self.timeline.buffers[int(self._copy_buffer[row])]
            parts.append(self._found(self._copy_pieces(row, info), 1, row))
        table = np.unique(np.concatenate(parts, axis=1), axis=1)
        return table[0], table[1], table[2]

    def _plain_stores(self) -> I64:
        stores = len(self.stores)
        parts = [self._plain(low, min(low + _STORES, stores)) for low in range(0, stores, _STORES)]
        return np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1)

    def _plain(self, low: int, high: int) -> I64:
        """Pages that stores ``low..high`` wrote to: the slots of all stores at once may not fit into memory."""
        slots = self.stores.arrays("slots", low, high)
        event = low + slots.owner().astype(np.int64)
        buffer = self._store_buffer[event]
        kept = (buffer >= 0) & ~np.isin(event, self.strided)
        event, buffer, slot = event[kept], buffer[kept], slots.values[kept].astype(np.int64)
        rows = np.array([b.layout.rows for b in self.timeline.buffers] or [1], np.int64)
        pages = np.array([b.pages for b in self.timeline.buffers] or [1], np.int64)
        # Slot -1 in a kernel that does not skip it is the last row of the last page.
        page = np.where(slot >= 0, slot // rows[buffer], pages[buffer] - 1)
        where = place(buffer, page)
        # Rows lie page by page as a rule: most repetitions go before the sort.
        fresh = np.ones(len(where), bool)
        fresh[1:] = (where[1:] != where[:-1]) | (event[1:] != event[:-1])
        where, event = where[fresh], event[fresh]
        return np.unique(np.stack([where, np.zeros_like(event), event]), axis=1)

    @staticmethod
    def _found(pieces: Pieces, table: int, row: int) -> I64:
        inside = pieces.buffer >= 0
        places = place(pieces.buffer[inside], pieces.page[inside])
        return np.stack([places, np.full_like(places, table), np.full_like(places, row)])

    def _resolve(self, info: BufferInfo, starts: I64, length: I64) -> Pieces:
        address = info.address + starts
        good = (address >= 0) & (length > 0)
        with reading(f"a copy or store of process {info.process}"):
            return self._regions[info.process].resolve_many(
                np.where(good, address, 0).astype(np.uint64), np.where(good, length, 0).astype(np.uint64)
            )

    def _store_pieces(self, row: int, info: BufferInfo) -> Pieces:
        """Where a store with a stride of its own lands: values, then scales, of each slot."""
        layout, stride = info.layout, int(self.stores["stride"][row])
        slots = np.asarray(self.stores.array("slots", row), np.int64)
        page, inside = np.divmod(np.where(slots >= 0, slots, 0), layout.rows)
        starts = [page * stride + inside * layout.value_bytes]
        starts.append(page * stride + layout.scale_base + inside * layout.scale_bytes)
        lengths = [np.where(slots >= 0, size, 0) for size in (layout.value_bytes, layout.scale_bytes)]
        return self._resolve(info, np.concatenate(starts), np.concatenate(lengths))

    def _copy_pieces(self, row: int, info: BufferInfo) -> Pieces:
        ids = np.asarray(self.copies.ragged("ids")[row], np.int64)
        layout, length, stride = info.layout, int(self.copies["length"][row]), int(self.copies["stride"][row])
        width = layout.value_bytes + layout.scale_bytes
        if str(self.copies["unit"][row]) == "row" and length == stride == width:
            # A row move of a kernel that knows the page: values and scales, each in its area.
            page, inside = np.divmod(ids, layout.rows)
            starts = [page * info.pitch + inside * layout.value_bytes]
            starts.append(page * info.pitch + layout.scale_base + inside * layout.scale_bytes)
            lengths = [np.full(len(ids), size) for size in (layout.value_bytes, layout.scale_bytes)]
            return self._resolve(info, np.concatenate(starts), np.concatenate(lengths))
        stride = stride if stride > 0 else info.pitch
        return self._resolve(info, ids * stride, np.full(len(ids), max(length, 0)))

    def of_page(self, buffer: int, page: int) -> list[LocalWrite]:
        """What stores and copies write to ``page`` of ``buffer`` (a number of ``Timeline.buffers``), in sequence."""
        places, tables, rows = self._index
        wanted = buffer * PLACE + page
        low, high = np.searchsorted(places, [wanted, wanted + 1])
        found = []
        for table, row in zip(tables[low:high].tolist(), rows[low:high].tolist(), strict=True):
            write = self._store(row, buffer, page) if table == 0 else self._copy(row, buffer, page)
            if write is not None:
                found.append(write)
        return sorted(found, key=lambda write: write.moment.seq)

    def _store(self, row: int, buffer: int, page: int) -> LocalWrite | None:
        info = self.timeline.buffers[int(self._store_buffer[row])]
        layout = info.layout
        slots = np.asarray(self.stores.array("slots", row), np.int64)
        size = self.timeline.buffers[buffer].layout.page_bytes
        mask = np.zeros(size, bool)
        padding = False
        if row in self.strided_set:
            entries = _paint(mask, self._store_pieces(row, info), buffer, page) % max(1, len(slots))
        else:
            wrapped = np.where(slots >= 0, slots, info.pages * layout.rows - 1)
            entries = np.flatnonzero(wrapped // layout.rows == page)
            padding = bool(len(entries)) and bool((slots[entries] < 0).all())
            for inside in np.unique(wrapped[entries] % layout.rows).tolist():
                for start, stop in (layout.value_range(inside, inside), layout.scale_range(inside, inside)):
                    mask[start:stop] = True
        moment = self.timeline.moment("store", row)
        return LocalWrite("store", row, int(self.store_request[row]), moment, entries, mask, padding)

    @cached_property
    def strided_set(self) -> frozenset[int]:
        """:attr:`strided`, for asking whether it holds one row."""
        return frozenset(self.strided.tolist())

    def _copy(self, row: int, buffer: int, page: int) -> LocalWrite | None:
        info = self.timeline.buffers[int(self._copy_buffer[row])]
        mask = np.zeros(self.timeline.buffers[buffer].layout.page_bytes, bool)
        count = max(1, len(self.copies.ragged("ids")[row]))
        entries = np.unique(_paint(mask, self._copy_pieces(row, info), buffer, page) % count)
        moment = self.timeline.moment("copy", row)
        return LocalWrite("copy", row, int(self.copy_request[row]), moment, entries, mask, False)

    def between(self, buffer: int, page: int, begin: Moment, end: Moment) -> list[tuple[LocalWrite, bool]]:
        """Writes to the page that may have fallen between two looks at it, each with whether order proves that."""
        order, found = self.timeline.order, []
        for write in self.of_page(buffer, page):
            if order.before(write.moment, begin) or order.before(end, write.moment):
                continue
            found.append((write, order.before(begin, write.moment) and order.before(write.moment, end)))
        return found


def _paint(mask: Bool, pieces: Pieces, buffer: int, page: int) -> I64:
    """Set the bytes of ``mask`` that ``pieces`` hit in the page; returns the ranges that do."""
    hit = np.flatnonzero((pieces.buffer == buffer) & (pieces.page == page) & ~pieces.padding)
    for number in hit.tolist():
        mask[int(pieces.start[number]) : int(pieces.stop[number])] = True
    return np.asarray(pieces.descriptor[hit], np.int64)
