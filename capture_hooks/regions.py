"""Who owns which byte: from addresses to (buffer, layer, page, byte range).

A buffer is an array of pages that lie ``pitch`` bytes apart, each ``layout.page_bytes`` long. Views may overlap: in a
packed slab the pages of one layer lie in the gaps between another's, and two buffers may be views of the same
memory. So a byte can belong to pages of several buffers (each is told), to the *padding* between pages, or to
nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Buffer
from capture_hooks.layouts import OPAQUE, Layout
from capture_hooks.layouts import layout as layout_named

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_TOP = 2**63  # addresses from here on belong to nobody


@dataclass(frozen=True, slots=True)
class Region:
    """One buffer of the map."""

    buffer: int
    layer: int
    name: str
    layout: Layout
    address: int
    pages: int
    pitch: int

    @property
    def end(self) -> int:
        """Address one past the last byte of the last page."""
        return (
            self.address + (self.pages - 1) * self.pitch + self.layout.page_bytes
            if self.pages
            else self.address
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an address range that lies in one page, in padding, or outside every buffer.

    ``start``/``stop`` are the half-open byte range within the page; in padding they lie past the page's end. Outside
    every buffer ``buffer``, ``layer`` and ``page`` are -1 and ``start`` is 0. ``offset`` is where the piece begins
    within the range that was asked for.
    """

    buffer: int
    layer: int
    page: int
    start: int
    stop: int
    offset: int
    padding: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of many address ranges as columns of one length, ordered by (descriptor, offset, buffer as added).

    ``descriptor`` is the index of the range; the others are as in :class:`Piece`.
    """

    descriptor: I64
    buffer: I64
    layer: I64
    page: I64
    start: I64
    stop: I64
    offset: I64
    padding: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.descriptor)


class Regions:
    """The map of one process."""

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._regions: dict[int, Region] = {}
        for region in regions:
            self.add(**{name: getattr(region, name) for name in Region.__slots__})

    @classmethod
    def of(cls, buffers: Iterable[Buffer]) -> Regions:
        """The map of ``Buffer`` records; opaque ones are left out."""
        found = cls()
        for event in buffers:
            if event.format == OPAQUE:
                continue
            found.add(
                event.buffer,
                event.layer,
                event.name,
                layout_named(event.format),
                event.address,
                event.pages,
                event.pitch,
            )
        return found

    def add(
        self, buffer: int, layer: int, name: str, layout: Layout, address: int, pages: int, pitch: int
    ) -> Region:
        """Add a buffer. Raises ``ValueError`` if its id is taken or its geometry is impossible."""
        if buffer in self._regions:
            raise ValueError(f"buffer {buffer} is in the map already")
        if buffer < 0 or pages < 0 or pitch <= 0 or address < 0:
            raise ValueError(f"buffer {buffer}: {pages} pages of pitch {pitch} at {address} are impossible")
        region = Region(buffer, layer, name, layout, address, pages, pitch)
        if region.end > _TOP:
            raise ValueError(f"buffer {buffer}: {pages} pages of pitch {pitch} end past the address space")
        self._regions[buffer] = region
        return region

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def __contains__(self, buffer: object) -> bool:
        return buffer in self._regions

    def __getitem__(self, buffer: int) -> Region:
        return self._regions[buffer]

    def resolve(self, address: int, length: int) -> list[Piece]:
        """The pieces of ``[address, address + length)``, in the order of their addresses."""
        if not (0 <= address < 2**64 and 0 <= length < 2**64):
            raise ValueError(f"address {address}, length {length}: expected unsigned 64-bit numbers")
        found = self.resolve_many(np.array([address], np.uint64), np.array([length], np.uint64))
        columns = [getattr(found, name).tolist() for name in Piece.__slots__]
        return [Piece(*row) for row in zip(*columns, strict=True)]

    def resolve_many(self, addresses: U64, lengths: U64, *, limit: int = 2**26) -> Pieces:
        """The pieces of n ranges, given as ``uint64[n]`` addresses and lengths in bytes.

        Raises ``ValueError`` if there are more than ``limit`` pieces (a damaged length can name every page there is).
        """
        if addresses.shape != lengths.shape or addresses.ndim != 1:
            raise ValueError("addresses and lengths must be one-dimensional and of one length")
        finder = _Finder(
            addresses.astype(np.uint64, copy=False), lengths.astype(np.uint64, copy=False), limit
        )
        regions = [region for region in self._regions.values() if region.pages]
        for order, region in enumerate(regions):
            finder.pages_of(order, region)
        finder.gaps(regions)
        return finder.pieces(regions)


class _Finder:
    """One call of ``resolve_many``: collects columns (descriptor, order of region, page, begin address, length)."""

    def __init__(self, addresses: U64, lengths: U64, limit: int) -> None:
        top = np.uint64(_TOP)
        # Ranges that leave the lower half of the address space belong to nobody and are kept out of signed sums.
        self.far = (addresses >= top) | (lengths >= top)
        self.far |= ~self.far & (addresses + lengths > top)
        near = np.flatnonzero(~self.far & (lengths > 0))
        self.far &= lengths > 0
        low = addresses[near].astype(np.int64)
        by_address = np.argsort(low, kind="stable")
        self.index = near[by_address]
        self.low = low[by_address]
        # addresses + lengths may be exactly 2**63; the last byte always fits.
        self.last = self.low + (lengths[self.index] - np.uint64(1)).astype(np.int64)
        self.reach = np.maximum.accumulate(self.last) if len(self.last) else self.last
        self.lengths, self.limit, self.count = lengths, limit, 0
        self.columns: list[tuple[I64, I64, I64, I64, I64, npt.NDArray[np.bool_]]] = []

    def pages_of(self, order: int, region: Region) -> None:
        """Collect the parts of all ranges that lie in pages of ``region``."""
        first = int(np.searchsorted(self.reach, region.address, "left"))
        stop = int(np.searchsorted(self.low, region.end, "left")) if region.end < _TOP else len(self.low)
        if first >= stop:
            return
        size, pitch = region.layout.page_bytes, region.pitch
        low = np.maximum(self.low[first:stop], region.address) - region.address
        last = self.last[first:stop] - region.address
        page_first = np.maximum((low - size) // pitch + 1, 0)
        page_last = np.minimum(last // pitch, region.pages - 1)
        counts = np.maximum(page_last - page_first + 1, 0)
        self._grow(counts)
        owner = np.repeat(np.arange(len(counts)), counts)
        page = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + page_first[owner]
        base = page * pitch
        begin = np.maximum(low[owner], base)
        length = np.minimum(last[owner], base + (size - 1)) - begin + 1
        self.columns.append(
            (
                owner + first,
                np.full(len(owner), order),
                page,
                begin + region.address,
                length,
                np.zeros(len(owner), bool),
            )
        )

    def _grow(self, counts: I64) -> None:
        total = self.count + float(
            counts.sum(dtype=np.float64)
        )  # as a float: a damaged length would overflow
        if total > self.limit:
            raise ValueError(
                f"the descriptors name more than {self.limit} pages; their lengths cannot be right"
            )
        self.count = int(total)

    def gaps(self, regions: list[Region]) -> None:
        """Collect what no page covers: padding where it lies within a buffer, else nobody's."""
        owner, begin, stop = self._uncovered()
        # A gap holds no page, and a buffer begins and ends with one, so no buffer begins or ends within it.
        best = np.full(len(owner), -1, np.int64)
        best_end = np.full(len(owner), -1, np.int64)
        best_page = np.full(len(owner), -1, np.int64)
        for order in sorted(range(len(regions)), key=lambda order: regions[order].buffer):
            region = regions[order]
            inside = np.flatnonzero((begin >= region.address) & (begin <= region.end - 1))
            page = (begin[inside] - region.address) // region.pitch
            end = region.address + page * region.pitch + region.layout.page_bytes
            nearer = end > best_end[inside]
            chosen = inside[nearer]
            best[chosen], best_end[chosen], best_page[chosen] = order, end[nearer], page[nearer]
        self.columns.append((owner, best, best_page, begin, stop - begin + 1, best >= 0))

    def _uncovered(self) -> tuple[I64, I64, I64]:
        """Owner, first and last address of each stretch of the ranges that no page covers."""
        if not self.columns:
            return np.arange(len(self.low)), self.low, self.last
        owner = np.concatenate([column[0] for column in self.columns])
        begin = np.concatenate([column[3] for column in self.columns])
        last = begin + np.concatenate([column[4] for column in self.columns]) - 1
        order = np.lexsort((begin, owner))
        owner, begin, last = owner[order], begin[order], last[order]
        # Running maximum of `last` within each owner, by rank: sums of owner and address would overflow.
        values, rank = np.unique(last, return_inverse=True)
        high = np.maximum.accumulate(owner * (len(values) + 1) + rank) % (len(values) + 1)
        reached = values[high] if len(values) else last
        is_first = np.ones(len(owner), bool)
        is_first[1:] = owner[1:] != owner[:-1]
        before = np.empty_like(begin)  # first address that is not yet covered when this piece begins
        before[1:] = reached[:-1] + 1
        before[is_first] = self.low[owner[is_first]]
        gap = np.flatnonzero(begin > before)
        is_last = np.ones(len(owner), bool)
        is_last[:-1] = is_first[1:]
        tail = np.flatnonzero(is_last & (reached < self.last[owner]))
        bare = np.setdiff1d(np.arange(len(self.low)), owner[is_first], assume_unique=True)
        return (
            np.concatenate([owner[gap], owner[tail], bare]),
            np.concatenate([before[gap], reached[tail] + 1, self.low[bare]]),
            np.concatenate([begin[gap] - 1, self.last[owner[tail]], self.last[bare]]),
        )

    def pieces(self, regions: list[Region]) -> Pieces:
        owner, order, page, begin, length, padding = (
            np.concatenate(part) for part in zip(*self.columns, strict=True)
        )
        far = np.flatnonzero(self.far)
        sort = np.lexsort((page, order, begin, owner))
        owner, order, page, begin, length, padding = (
            column[sort] for column in (owner, order, page, begin, length, padding)
        )
        inside = order >= 0
        table = np.array([(r.buffer, r.layer, r.address, r.pitch) for r in regions], np.int64).reshape(-1, 4)
        buffer, layer, address, pitch = (
            np.where(inside, column[order] if len(table) else -1, -1) for column in table.T
        )
        start = np.where(inside, begin - address - page * pitch, 0)
        found = [
            self.index[owner],
            buffer,
            layer,
            page,
            start,
            start + length,
            begin - self.low[owner],
            padding,
        ]
        if len(far):
            capped = np.minimum(self.lengths[far], np.uint64(_TOP - 1)).astype(np.int64)
            nobody, zero = np.full(len(far), -1, np.int64), np.zeros(len(far), np.int64)
            outside = [far, nobody, nobody, nobody, zero, capped, zero, np.zeros(len(far), bool)]
            found = [np.concatenate(pair) for pair in zip(found, outside, strict=True)]
        by_descriptor = np.argsort(found[0], kind="stable")
        return Pieces(*(column[by_descriptor] for column in found))
