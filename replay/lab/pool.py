"""The paged cache of one side, and the allocator that hands its pages out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from capture_hooks.events import F32, I32, I64, U8
from capture_hooks.layouts import Layout
from replay.lab import kernels, model
from replay.lab.faults import Policy

#: Page 0 is never given to a request: block tables are padded with it.
DUMMY_PAGE = 0


@dataclass(frozen=True, slots=True)
class StorePart:
    """Rows of one request within a store; the padding of a batch is a part of room -1 with slots and rows -1."""

    room: int
    attempt: int
    slots: I64  #: physical slot of each row
    positions: I64  #: token position that the kernel rotates by
    logical_rows: I64  #: index of each row within the request
    keys: F32  #: float32[n, 128]


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """One launch of the store in one layer."""

    layer: int
    step: int
    parts: tuple[StorePart, ...]


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """One launch of the read: one query row of each running request in one layer."""

    layer: int
    step: int
    rooms: tuple[tuple[int, int], ...]  #: (room, attempt) of each row of the batch
    table: I64  #: int64[batch, pages]: the step buffer itself, as a kernel gets it
    rows: I64  #: int64[batch]: length of each in rows
    query: F32  #: float32[batch, heads, 128]
    weights: F32  #: float32[batch, heads]
    k: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read computed."""

    logits: F32  #: float32[batch, rows], -inf past each length
    top_k: I32  #: int32[batch, k], -1 padded
    kernels: tuple[str, ...]  #: which kernel computed each row of the batch: "torch" or "triton"


class PagedPool:
    """``layers`` layers of ``pages`` pages each, in one block of host memory.

    Raises:
        ValueError: a slot or page outside the pool (checked before any kernel gets it).
    """

    def __init__(
        self, layout: Layout, layers: int, pages: int, policy: Policy, triton_pages: int = 0
    ) -> None:
        self.layout = layout
        self.layers = layers
        self.pages = pages
        self.pitch = layout.page_bytes
        self.memory: U8 = np.zeros((layers, pages, self.pitch), np.uint8)
        self._caches = [torch.from_numpy(self.memory[layer]) for layer in range(layers)]
        self._policy = policy
        sample = triton_pages if policy.read == "plain" and policy.top_k == "exact" else 0
        self._store_sample, self._read_sample = triton_pages, sample
        self.interpreted = {"store": 0, "read": 0}  #: pages that Triton kernels did on the interpreter
        if triton_pages:
            kernels.load_triton()  # now: the first launch is no time for an import
        self._norm_weight = torch.from_numpy(model.norm_weight())

    def address(self, layer: int) -> int:
        """Address of the first byte of ``layer``."""
        return int(self.memory[layer].ctypes.data)

    def item_length(self) -> int:
        """Bytes of one page that a transfer has to move."""
        return self.layout.page_bytes

    def store(self, batch: StoreBatch) -> None:
        """Write the rows of ``batch``."""
        slots = np.concatenate([part.slots for part in batch.parts])
        positions = np.concatenate([part.positions for part in batch.parts])
        keys = np.concatenate([part.keys for part in batch.parts])
        limit = self.pages * self.layout.rows
        given = slots >= 0
        if self._policy.padding == "stored":
            given[-1] = True  # all padding goes to one slot, and its last row is what stays there
            slots = np.where(slots < 0, limit + slots, slots)
        slots, positions, keys = slots[given], positions[given], keys[given]
        if slots.min() < self.layout.rows or slots.max() >= limit:
            raise ValueError("slot outside the pool, or in the dummy page")
        rope = model.rope(positions)
        # The interpreter does the first pages of a run, torch all others; the bytes are the same.
        sample = min(len(slots), self._store_sample * self.layout.rows)
        for engine, part in (("triton", slice(0, sample)), ("torch", slice(sample, None))):
            if len(slots[part]) == 0:
                continue
            kernels.store(
                self.layout,
                self._caches[batch.layer],
                torch.from_numpy(slots[part]),
                torch.from_numpy(keys[part]),
                torch.from_numpy(rope[part]),
                self._norm_weight,
                model.EPSILON,
                engine=engine,
            )
        taken = -(-sample // self.layout.rows)
        self._store_sample -= taken
        self.interpreted["store"] += taken

    def clear(self, room: int, attempt: int, pages: I64) -> None:
        """Fill ``pages`` of a request with zeros in all layers."""
        self.memory[:, pages] = 0

    def read(self, batch: ReadBatch) -> ReadResult:
        """Logits and top-k of every row of the batch."""
        if batch.table.min() < 0 or batch.table.max() >= self.pages:
            raise ValueError("block table names a page outside the pool")
        logits, top_k = self._read(batch, slice(None), "torch")
        names = ["torch"] * len(batch.rooms)
        for i, rows in enumerate(batch.rows.tolist()):
            pages = -(-rows // self.layout.rows)
            if 0 < pages <= self._read_sample:
                one, best = self._read(batch, slice(i, i + 1), "triton")
                logits[i, :rows], top_k[i] = one[0, :rows], best[0]
                names[i] = "triton"
                self._read_sample -= pages
                self.interpreted["read"] += pages
        return ReadResult(logits, top_k, tuple(names))

    def _read(self, batch: ReadBatch, part: slice, engine: str) -> tuple[F32, I32]:
        logits, top_k = kernels.read(
            self.layout,
            self._caches[batch.layer],
            torch.from_numpy(batch.table)[part],
            torch.from_numpy(batch.rows[part]),
            torch.from_numpy(batch.query[part]),
            torch.from_numpy(batch.weights[part]),
            batch.k,
            engine=engine,
            how=self._policy.read,
        )
        if self._policy.top_k != "exact":
            lengths = torch.from_numpy(batch.rows[part])
            top_k = kernels.select(logits, lengths, batch.k, whole=self._policy.top_k != "short")
        return logits.numpy(), top_k.numpy()


class PageAllocator:
    """Free list of one pool. Not thread-safe: one scheduler owns it.

    A page has one owner, and others may share it. It is free again once nobody holds it; without ``keep_shared`` as
    soon as its owner gives it back.
    """

    def __init__(self, pages: int, order: str = "lifo", *, keep_shared: bool = True) -> None:
        self._free = deque(range(DUMMY_PAGE + 1, pages))
        self._lifo = order == "lifo"
        self._keep_shared = keep_shared
        self._held: dict[int, tuple[int, int]] = {}
        self._sharers: dict[int, set[tuple[int, int]]] = {}

    @property
    def available(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def alloc(self, room: int, attempt: int, count: int, logical: int = 0) -> I64 | None:
        """``count`` pages for a request, in logical order from ``logical`` on; ``None`` where there are too few."""
        if count > len(self._free):
            return None
        take = self._free.pop if self._lifo else self._free.popleft
        pages = [take() for _ in range(count)]
        for page in pages:
            self._held[page] = (room, attempt)
        return np.array(pages, np.int64)

    def share(self, room: int, attempt: int, pages: I64) -> I64:
        """Let a request use ``pages`` of another as its first ones."""
        for page in pages.tolist():
            self._sharers.setdefault(page, set()).add((room, attempt))
        return pages

    def free(self, room: int, attempt: int, pages: I64, reason: str) -> None:
        """Give ``pages`` back. A page that the request does not hold is a programming error."""
        back = [page for page in pages.tolist() if self._let_go(page, (room, attempt), reason)]
        # The last page comes off first, so that a LIFO list hands a request's pages out in the same order.
        self._free.extend(reversed(back))

    def _let_go(self, page: int, key: tuple[int, int], reason: str) -> bool:
        """Take a page from a request; whether it is free by that."""
        sharers = self._sharers.get(page, set())
        if self._held.get(page) == key:
            del self._held[page]
            return not (sharers and self._keep_shared)
        if key not in sharers:
            raise RuntimeError(f"page {page} is not held by room {key[0]} ({reason})")
        sharers.discard(key)
        return not sharers and page not in self._held and self._keep_shared
