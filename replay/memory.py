"""The memory of one process as far as looks show it: a sparse address space made of the recorded pages.

A read that goes astray takes its bytes from somewhere else in the same memory. With the base address and the stride of
every buffer and the last look at each page this module says what lay at an address, without allocating the space.
Bytes that a store, a copy or a transfer may have written since that look are not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from replay.descriptors import DescriptorMap
from replay.local_writes import LocalWrites
from replay.order import Moment
from replay.page_columns import BufferInfo, place
from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Memory:
    """What the pages of every buffer held, by address."""

    def __init__(self, timeline: Timeline, local: LocalWrites, descriptors: DescriptorMap) -> None:
        """Remember where looks and writes are found; the looks are sorted on first use."""
        self.timeline, self.local, self.descriptors = timeline, local, descriptors
        self._kept: dict[int, U8] = {}

    @cached_property
    def _index(self) -> tuple[I64, I64, I64, Bool]:
        """Places in ascending order, and the sequence number and row of each look there; looks with bytes only.

        The last column says whether a look shows the old content before a transfer.
        """
        snaps, contents = self.timeline.snapshots, self.timeline.trace.contents
        rows = np.flatnonzero(snaps.content >= 0)
        rows = rows[contents.has_data[snaps.content[rows]]]
        places = place(snaps.buffer[rows], snaps.page[rows])
        rows, places = rows[places >= 0], places[places >= 0]
        order = np.lexsort((snaps.seq[rows], places))
        rows = rows[order]
        old = (snaps.stage[snaps.event[rows]] == "RC") & (snaps.moment[snaps.event[rows]] == "before")
        return places[order], snaps.seq[rows], rows, np.asarray(old, bool)

    def look(self, buffer: int, page: int, seq: int) -> int:
        """The last look (a row of ``Timeline.snapshots``) at a page at sequence number ``seq`` of its process, or -1.

        Before its first look it held what that one shows, if it is one at the old content before a transfer.
        """
        places, seqs, looks, olds = self._index
        wanted = int(place(np.array([buffer]), np.array([page]))[0])
        low, high = np.searchsorted(places, [wanted, wanted + 1]).tolist()
        if wanted < 0 or low == high:
            return -1
        found = low + int(np.searchsorted(seqs[low:high], seq, side="right")) - 1
        if found >= low:
            return int(looks[found])
        return int(looks[low]) if bool(olds[low]) else -1

    def page(self, buffer: int, page: int, at: Moment) -> tuple[U8, Bool] | None:
        """Bytes of a page at a moment of its process, and which of them are known; None where none are."""
        look = self.look(buffer, page, at.seq)
        if look < 0:
            return None
        seen = self.timeline.snapshots.moment_of(look)
        if self.descriptors.may_write(buffer, page, seen, at):
            return None
        data = self._data(int(self.timeline.snapshots.content[look]))
        known = np.ones(len(data), bool)
        for write, _ in self.local.between(buffer, page, seen, at):
            if write.mask.shape == known.shape:
                known &= ~write.mask
        return data, known

    def _data(self, content: int) -> U8:
        if content not in self._kept:
            if len(self._kept) > 4096:  # some 64 MiB of the largest pages
                self._kept.clear()
            self._kept[content] = np.asarray(self.timeline.trace.contents.data(np.array([content]))[0])
        return self._kept[content]

    def at(self, moment: Moment) -> Space:
        """The memory of a process as it was at a moment of it."""
        return Space(self, moment)


@dataclass(frozen=True, slots=True)
class Space:
    """The memory of one process at one moment."""

    memory: Memory
    moment: Moment
    _pages: dict[tuple[int, int], tuple[U8, Bool] | None] = field(default_factory=dict)  # asked for so far

    def gather(self, addresses: I64, length: int) -> tuple[U8, Bool]:
        """``uint8[n, length]`` from each address on, and which of these bytes are known."""
        data = np.zeros((len(addresses), length), np.uint8)
        known = np.zeros(data.shape, bool)
        for info in self.memory.timeline.buffers:
            if info.process != self.moment.process or info.pitch <= 0 or info.pages <= 0:
                continue
            end = info.address + (info.pages - 1) * info.pitch + info.layout.page_bytes
            for index in np.flatnonzero((addresses + length > info.address) & (addresses < end)).tolist():
                self._fill(info, int(addresses[index]), data[index], known[index])
        return data, known

    def _fill(self, info: BufferInfo, address: int, data: U8, known: Bool) -> None:
        offset, size = address - info.address, info.layout.page_bytes
        first = max(0, offset // info.pitch)
        last = min(info.pages - 1, (offset + len(data) - 1) // info.pitch)
        for page in range(first, last + 1):
            start = page * info.pitch - offset
            low, high = max(start, 0), min(start + size, len(data))
            if low >= high:
                continue
            found = self._page(info.number, page)
            if found is not None and len(found[0]) >= size:
                data[low:high], known[low:high] = (part[low - start : high - start] for part in found)

    def _page(self, buffer: int, page: int) -> tuple[U8, Bool] | None:
        """As ``Memory.page``, kept: every hypothesis asks for much the same pages."""
        if (buffer, page) not in self._pages:
            if len(self._pages) > 4096:
                self._pages.clear()
            self._pages[buffer, page] = self.memory.page(buffer, page, self.moment)
        return self._pages[buffer, page]
