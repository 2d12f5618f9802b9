"""One process of the simulated pair: its memory byte for byte, its page allocator, and the hooks that record it.

Memory is the truth: every look (snapshot) is a copy of it as it is at that moment, and the records say what the engine
did. A record that the recorder lost is counted and told at the end, as a real recorder does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import Layout, layout
from replay.trace.builder import COVERS, ProcessBuilder

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: A buffer of a side: (name, layer).
Unit = tuple[str, int]

_GAP = 1 << 33  # address space between two buffers


@dataclass(slots=True)
class Recording:
    """How much a recorder keeps: bytes or digests alone, and the share of records that it loses."""

    bytes: bool = True
    threads: bool = False
    loss: float = 0.0
    may_lose: tuple[str, ...] = (
        "snapshot",
        "read",
        "store",
        "transfer_state",
        "alloc",
        "free",
        "order",
        "send",
    )


@dataclass(slots=True)
class Side:
    """A process, prefill or decode. ``memory[unit]`` is ``uint8[pages, page_bytes]``; page 0 is nobody's."""

    role: str
    rank: int
    process: ProcessBuilder
    units: tuple[Unit, ...]
    format: str
    pages: int
    base: int
    first_buffer: int
    rng: random.Random
    recording: Recording
    pitch: int = 0
    lifo: bool = True
    clock: list[int] = field(default_factory=lambda: [0])
    memory: dict[Unit, U8] = field(default_factory=dict)
    free_pages: list[int] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    lost: dict[str, list[int]] = field(default_factory=dict)
    seq: int = -1
    hands: int = 0

    def __post_init__(self) -> None:
        self.pitch = self.pitch or self.layout.page_bytes
        for unit in self.units:
            self.memory[unit] = np.zeros((self.pages, self.layout.page_bytes), np.uint8)
        self.free_pages = list(range(self.pages - 1, 0, -1))
        if self.rng.random() < 0.7:
            self.rng.shuffle(self.free_pages)  # a pool that has been in use for a while
        self._introduce()

    @property
    def layout(self) -> Layout:
        return layout(self.format)

    @property
    def agent(self) -> str:
        return f"{self.role}-{self.rank}"

    def buffer(self, unit: Unit) -> int:
        return self.first_buffer + self.units.index(unit)

    def address(self, unit: Unit) -> int:
        return self.base + self.units.index(unit) * _GAP

    # What the recorder writes

    def emit(self, kind: str, **fields: Any) -> int:
        """One record; it may be lost."""
        self.clock[0] += self.rng.randrange(500, 30_000)
        self.seq = max(self.seq + 1, self.process.next_seq)
        fields = {"begin_ns": self.clock[0], "end_ns": self.clock[0], "seq": self.seq} | fields
        share = self.recording.loss
        if share and kind in self.recording.may_lose and self.rng.random() < share:
            self.lost.setdefault(kind, []).append(self.seq)  # its number is taken, the record is gone
        else:
            getattr(self.process, kind)(**fields)
        return self.seq

    def close(self) -> None:
        """The end of the recording: what was lost is told."""
        for kind, seqs in self.lost.items():
            self.process.loss(
                stage="queue",
                what=kind,
                count=len(seqs),
                first_seq=min(seqs),
                last_seq=max(seqs),
                reason="full",
            )

    def _introduce(self) -> None:
        for unit in self.units:
            length = (self.pages - 1) * self.pitch + self.layout.page_bytes
            self.emit("registration", agent=self.agent, address=self.address(unit), length=length)
            self.emit(
                "buffer",
                buffer=self.buffer(unit),
                name=unit[0],
                layer=unit[1],
                format=self.format,
                address=self.address(unit),
                pages=self.pages,
                pitch=self.pitch,
            )
        for covers in COVERS:
            self.emit("hook", name=f"{self.role}.{covers}", covers=covers, fired=1)

    def hand(self, giver: int, taker: int) -> None:
        """A hand-over between two threads."""
        if giver == taker:
            return
        self.hands += 1
        for thread, end in ((giver, "tail"), (taker, "head")):
            self.emit("order", what="queue", key=f"{self.agent}.{self.hands}", end=end, thread=thread)

    def look(
        self,
        stage: str,
        moment: str,
        room: int,
        attempt: int,
        logical: Sequence[int],
        pages: Sequence[int],
        *,
        rows: int,
        units: Iterable[Unit] | None = None,
        **fields: Any,
    ) -> None:
        """A snapshot of pages, one record a buffer."""
        if not len(pages):
            return
        for unit in self.units if units is None else units:
            data = self.memory[unit][list(pages)]
            seen: dict[str, Any] = {"data": data}
            if not self.recording.bytes:
                found = digest_pages(self.layout, data)
                seen = {name: getattr(found, name) for name in ("digests", "row_values", "row_scales")}
            self.emit(
                "snapshot",
                stage=stage,
                moment=moment,
                room=room,
                attempt=attempt,
                buffer=self.buffer(unit),
                logical=list(logical),
                pages=list(pages),
                rows=rows,
                **seen,
                **fields,
            )

    # Pages

    def take(self, count: int) -> list[int] | None:
        """Pages off the free list, None where there are too few."""
        if len(self.free_pages) < count:
            return None
        taken = [self.free_pages.pop(-1 if self.lifo else 0) for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        self.holders.update(pages)

    def drop(self, pages: Iterable[int]) -> list[int]:
        """One holder less for each page; those without any go back to the free list and are returned."""
        back = []
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] <= 0:
                del self.holders[page]
                if page not in self.free_pages:
                    back.append(page)
        self.free_pages += back
        return back

    # Bytes

    def put_rows(self, unit: Unit, slots: I64, values: U8, scales: U8) -> None:
        """Rows reach memory. Slots below 0 are skipped, as a kernel does with padding."""
        keep = slots >= 0
        page, row = np.divmod(slots[keep], self.layout.rows)
        self.layout.values(self.memory[unit])[page, row] = values[keep]
        if self.layout.scale_bytes:
            self.layout.scales(self.memory[unit])[page, row] = scales[keep]

    def rows_at(self, unit: Unit, slots: I64) -> tuple[U8, U8]:
        page, row = np.divmod(slots, self.layout.rows)
        return (
            self.layout.values(self.memory[unit])[page, row],
            self.layout.scales(self.memory[unit])[page, row],
        )

    def read_bytes(self, address: int, length: int) -> U8:
        """Bytes at an address; memory outside of pages reads as 0."""
        found = np.zeros(length, np.uint8)
        for unit, page, start, offset, size in self._parts(address, length):
            found[offset : offset + size] = self.memory[unit][page, start : start + size]
        return found

    def write_bytes(self, address: int, data: U8) -> None:
        """Bytes to an address; what falls outside of pages is gone."""
        for unit, page, start, offset, size in self._parts(address, len(data)):
            self.memory[unit][page, start : start + size] = data[offset : offset + size]

    def _parts(self, address: int, length: int) -> Iterable[tuple[Unit, int, int, int, int]]:
        index, at = divmod(address - self.base, _GAP)
        if not 0 <= index < len(self.units):
            return
        unit, offset, size = self.units[index], 0, self.layout.page_bytes
        while offset < length:
            page, start = divmod(at + offset, self.pitch)
            if page >= self.pages:
                return
            step = min(length - offset, (size if start < size else self.pitch) - start)
            if start < size and page >= 0:
                yield unit, page, start, offset, step
            offset += step
