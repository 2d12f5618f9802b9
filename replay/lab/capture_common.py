"""What the hooks of both sides share: buffers, pages given and taken, stores, and the edges of a stream."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from capture_hooks.events import I64, Alloc, Buffer, Copy, Free, Metadata, Store, StoreParams
from capture_hooks.recorder import Recorder
from capture_hooks.taps.host import snapshot
from capture_hooks.taps.methods import Hooks
from replay.lab import model
from replay.lab.config import TOKENS_PER_ROW
from replay.lab.metadata import MetadataSlots
from replay.lab.pool import PageAllocator, PagedPool, StoreBatch
from replay.lab.stream import Event, Stream

#: The one set of store constants that the lab has.
PARAMS = 0


class CommonHooks:
    """Hooks on the pool, the allocator and the stream. Buffer ids are layers: each side has one pool."""

    def __init__(self, recorder: Recorder, hooks: Hooks) -> None:
        self.recorder = recorder
        self.hooks = hooks
        self._launches = itertools.count()
        self._passed: set[tuple[int, int]] = set()
        hooks.wrap(PageAllocator, "alloc", "alloc", after=self._alloc)
        hooks.wrap(PageAllocator, "share", "alloc", after=self._share)
        hooks.wrap(PageAllocator, "free", "alloc", before=self._free)
        hooks.wrap(PagedPool, "clear", "copy", around=self._clear)
        hooks.wrap(MetadataSlots, "take", "metadata", after=self._slot_given)
        hooks.wrap(MetadataSlots, "write", "metadata", after=self._slot_written)
        hooks.wrap(MetadataSlots, "read", "metadata", after=self._slot_taken)
        hooks.wrap(MetadataSlots, "give_back", "metadata", before=self._slot_freed)
        hooks.wrap(PagedPool, "store", "store", around=self._store)
        hooks.wrap(Stream, "launch", "order", around=self._launch)
        hooks.wrap(Event, "complete", "order", before=self._complete)
        hooks.wrap(Event, "query", "order", after=self._passes)
        hooks.wrap(Event, "wait", "order", after=self._passes)

    def buffers(self, engine: Any) -> None:
        """Make the pool known."""
        pool: PagedPool = engine.pool
        for layer in range(pool.layers):
            buffer = Buffer(
                layer, "index_k", layer, pool.layout.name, pool.address(layer), pool.pages, pool.pitch,
                pool.item_length(), TOKENS_PER_ROW,
            )  # fmt: skip
            self.recorder.inventory.add(buffer, pool.memory[layer])
        self.recorder.emit(StoreParams(PARAMS, model.norm_weight(), model.EPSILON, model.ROPE_DIM))

    def look(
        self,
        stage: str,
        moment: str,
        layer: int,
        pages: I64,
        *,
        room: int,
        attempt: int,
        rows: int,
        logical: int = 0,
        transfer: int = -1,
        step: int = -1,
    ) -> None:
        """A snapshot of consecutive logical pages of one layer."""
        places = np.arange(logical, logical + len(pages), dtype=np.int64)
        snapshot(
            self.recorder, stage, moment, layer, pages, places, room=room, attempt=attempt, rows=rows,
            transfer=transfer, step=step,
        )  # fmt: skip

    def kept(self, room: int) -> bool:
        """Whether store inputs of this request are kept."""
        options = self.recorder.options
        return options.mode == "full" or (options.mode == "pages" and room % options.store_every == 0)

    # -- bodies --------------------------------------------------------------------------------------------------

    def _alloc(
        self, pages: I64 | None, _: PageAllocator, room: int, attempt: int, count: int, logical: int = 0
    ) -> None:
        if pages is not None:
            self.recorder.emit(Alloc(room, attempt, logical, pages))

    def _share(self, pages: I64, _: PageAllocator, room: int, attempt: int, *__: Any) -> None:
        self.recorder.emit(Alloc(room, attempt, 0, pages, shared=True))

    def _free(self, _: PageAllocator, room: int, attempt: int, pages: I64, reason: str) -> None:
        self.recorder.emit(Free(room, attempt, pages, reason))

    def _store(self, original: Callable[..., None], pool: PagedPool, batch: StoreBatch) -> None:
        mark = self.recorder.mark()
        original(pool, batch)
        with self.recorder.guard("lab.PagedPool.store"):
            for part in batch.parts:
                inputs: dict[str, Any] = {}
                if part.room >= 0 and self.kept(part.room):
                    # The angles of the right position, whatever position the engine gave to the kernel.
                    inputs = {"keys": part.keys, "rope": model.rope(model.position(part.logical_rows))}
                store = Store(
                    part.room, part.attempt, batch.layer, batch.step, PARAMS, part.slots, part.positions,
                    part.logical_rows, **inputs,
                )  # fmt: skip
                self.recorder.emit(store, mark)

    def _clear(
        self, original: Callable[..., None], pool: PagedPool, room: int, attempt: int, pages: I64
    ) -> None:
        mark = self.recorder.mark()
        original(pool, room, attempt, pages)
        with self.recorder.guard("lab.PagedPool.clear"):
            for layer in range(pool.layers):
                length = pool.layout.page_bytes
                cleared = Copy(
                    "clear", room, attempt, buffer=layer, ids=pages, length=length, stride=pool.pitch
                )
                self.recorder.emit(cleared, mark)

    def _slot_given(self, slot: int, slots: MetadataSlots, room: int, attempt: int) -> None:
        self._slot("given", slots, room, attempt, slot)

    def _slot_written(self, _: None, slots: MetadataSlots, room: int, attempt: int, slot: int) -> None:
        self._slot("written", slots, room, attempt, slot)

    def _slot_taken(self, holds: int, slots: MetadataSlots, room: int, attempt: int, slot: int) -> None:
        self.recorder.emit(Metadata("read", room, attempt, slot, holds=holds))

    def _slot_freed(self, slots: MetadataSlots, room: int, attempt: int, slot: int) -> None:
        self._slot("freed", slots, room, attempt, slot)

    def _slot(self, moment: str, slots: MetadataSlots, room: int, attempt: int, slot: int) -> None:
        self.recorder.emit(Metadata(moment, room, attempt, slot, holds=slots.holds(slot)))

    def _launch(self, original: Callable[..., Event], stream: Stream, job: Callable[[], None]) -> Event:
        key = f"{self.recorder.process.role}.launch.{next(self._launches)}"
        with self.recorder.guard("lab.Stream.launch"):
            self.recorder.tail("queue", key)

        def launched() -> None:
            with self.recorder.guard("lab.Stream.launch"):
                self.recorder.head("queue", key)
            job()

        return original(stream, launched)

    def _complete(self, event: Event) -> None:
        self.recorder.tail("sync", f"{self.recorder.process.role}.{event.serial}")

    def _passes(self, passed: bool, event: Event, *_: Any, **__: Any) -> None:
        """A thread has seen that the event happened: once for each thread is enough."""
        known = threading.get_ident(), event.serial
        if passed and known not in self._passed:
            self._passed.add(known)
            self.recorder.head("sync", f"{self.recorder.process.role}.{event.serial}")

    def has_passed(self, event: Event) -> bool:
        """Whether the calling thread has waited for the event."""
        return (threading.get_ident(), event.serial) in self._passed
