"""The prefill engine: chunked prefill on a stream; ``sender.py`` moves what it has written.

Threads: the scheduler owns the allocator and launches forward batches; the stream runs them; sender threads
post the chunks of a request in order, always the same thread for a request; the transport's thread owns the
wire; one thread listens to decode.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from replay.lab import model
from replay.lab.audit import row_hashes
from replay.lab.config import PAGE_TOKENS, LabConfig, pages_for, rows_for
from replay.lab.control import Channel
from replay.lab.engine import Engine
from replay.lab.pool import StoreBatch, StorePart
from replay.lab.prompts import Chunk, Sequence
from replay.lab.sender import Sender
from replay.lab.stream import Event

#: Seconds that the scheduler lets a last batch wait for the next.
_IDLE = 0.06


class PrefillEngine(Engine):
    """Everything of the prefill side in one round."""

    role = "prefill"
    turn = 0.005

    def __init__(self, config: LabConfig, transport: str, router: Channel) -> None:
        super().__init__(config, transport, router, config.prefill_pages)
        self.sender = Sender(
            config,
            self.policy,
            self.pool,
            self.metadata,
            self.transport,
            self.barriers,
            lambda what, sequence: self._inbox.put((what, sequence)),
            self.fail,
        )
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._retiring: list[Sequence] = []
        self._launches: deque[Event] = deque()
        self._step = 0

    # -- life of the round -----------------------------------------------------------------------------------

    def connect(self, peer: Channel) -> None:
        """Exchange addresses with decode and start the threads."""
        peer.send("hello", item_length=self.pool.item_length())
        body = peer.expect("hello")
        self.transport.connect(body["transport"])
        self._start_threads()
        self.sender.connect(peer, body["transport"])

    def submit(self, sequence: Sequence) -> None:
        """A request from the router (any thread)."""
        self._inbox.put(("submit", sequence))

    def finish(self) -> dict[str, Any]:
        """Wait until every request has left, end the threads, and tell what was done."""
        end = time.monotonic() + self.config.timeout_s
        while self.sender.rooms and not self.error and time.monotonic() < end:
            time.sleep(0.005)
        left = self.sender.rooms
        self._end_scheduler()
        self.sender.close()
        self.stream.close()
        self.audit.write()
        return {"error": self.error, "left": left, "batches": self._step, "triton": self.pool.interpreted}

    # -- scheduler -----------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        before: list[Chunk] = []
        due = 0.0
        while not self._stop.is_set():
            busy = bool(self._running or (self._waiting and self._admissible()))
            for kind, body in self._messages(block=not busy):
                self.handle(kind, body)
            self._admit()
            batch = self._form_batch()
            if batch:
                self._launch(batch)
            # A batch is looked after once the next one is on the stream, or after a while if there is none.
            if before and (batch or time.monotonic() >= due):
                for chunk in before:
                    for part in _with_component(chunk):
                        self.barriers.at("prefill.hand-over", part.sequence.room, part.index)
                        self.sender.hand_over(part)
                before = []
            if batch:
                before, due = batch, time.monotonic() + _IDLE
            self._retire()

    def handle(self, kind: str, body: Any) -> None:
        """One message in the scheduler's inbox."""
        if kind == "submit":
            self.start(body)
        elif kind in ("sent", "abort") and not body.leaving:
            body.leaving = True
            self._retiring.append(body)

    def start(self, sequence: Sequence) -> None:
        """A request begins to wait for pages."""
        self.barriers.at("prefill.start", sequence.room)
        if self.sender.admit(sequence):
            self._waiting.append(sequence)

    def _admissible(self) -> bool:
        return self.allocator.available >= pages_for(self._waiting[0].tokens)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            if sequence.aborted:
                self._waiting.popleft()
                continue
            pages = self.allocator.alloc(sequence.room, sequence.attempt, pages_for(sequence.tokens))
            if pages is None:
                return
            sequence.pages = pages
            self._running.append(self._waiting.popleft())

    def _form_batch(self) -> list[Chunk]:
        """One chunk each of as many prompts as fit, those with the least left to do first."""
        self._running = [s for s in self._running if not (s.aborted or s.failed)]
        self._running.sort(key=lambda sequence: sequence.tokens - sequence.launched)
        batch: list[Chunk] = []
        budget = self.config.batch_tokens
        for sequence in self._running:
            left = sequence.tokens - sequence.launched
            size = min(left, self.config.chunk_tokens, budget)
            if size < left:
                size -= size % PAGE_TOKENS
            if size == 0:
                break
            chunk = Chunk(sequence, len(sequence.chunks), sequence.launched, size, size == left)
            sequence.launched += size
            sequence.chunks.append(chunk)
            if chunk.last and self.config.apart:
                component = Chunk(sequence, chunk.index + 1, 0, sequence.tokens, True, component=True)
                sequence.chunks.append(component)
            batch.append(chunk)
            budget -= size
        self._running = [sequence for sequence in self._running if sequence.launched < sequence.tokens]
        return batch

    def _launch(self, batch: list[Chunk]) -> None:
        """Put the batch on the stream."""
        while self._launches and (
            len(self._launches) >= self.config.launch_ahead or self._launches[0].query()
        ):
            self._launches.popleft().wait()
        self._step += 1
        step = self._step
        event = self.stream.launch(lambda: self.forward(step, batch))
        self._launches.append(event)
        for chunk in batch:
            for part in _with_component(chunk):
                part.event = event

    def _retire(self) -> None:
        """Free requests that have left, once nothing on the stream and no sender uses their pages."""
        still = []
        for sequence in self._retiring:
            events = [chunk.written for chunk in sequence.chunks]
            if self.sender.busy(sequence) or not all(event.query() for event in events):
                still.append(sequence)
                continue
            self.leave(sequence)
        self._retiring = still

    def leave(self, sequence: Sequence) -> None:
        """The request is over on this side."""
        if len(sequence.pages):
            reason = "abort" if sequence.aborted else "finish"
            self.allocator.free(sequence.room, sequence.attempt, sequence.pages, reason)
        self.sender.forget(sequence)
        self.barriers.at("prefill.over", sequence.room)

    # -- stream --------------------------------------------------------------------------------------------------

    def forward(self, step: int, batch: list[Chunk]) -> None:
        """One forward batch: every layer stores the rows of every chunk."""
        for layer in range(self.config.layers):
            time.sleep(self.config.layer_ms / 1000)  # the rest of the layer runs on the device
            for chunk in batch:
                self.barriers.at("forward.layer", chunk.sequence.room, chunk.index, layer)
            parts = tuple(self._part(chunk, layer) for chunk in batch if chunk.rows)
            if parts:
                self.pool.store(StoreBatch(layer, step, parts))
        for chunk in batch:
            self.stored(step, chunk)
            self.barriers.at("prefill.stored", chunk.sequence.room, chunk.index)

    def _part(self, chunk: Chunk, layer: int) -> StorePart:
        sequence = chunk.sequence
        local = np.arange(chunk.rows, dtype=np.int64)
        rows = local + rows_for(chunk.first_token)
        slots = chunk.pages[local // self.layout.rows] * self.layout.rows + local % self.layout.rows
        positions = model.position(local if self.policy.positions == "chunk" else rows)
        keys = model.keys(self.config.seed, sequence.room, layer, rows)
        alike = rows < sequence.prefix_pages * self.layout.rows
        if alike.any():
            keys[alike] = model.keys(self.config.seed, sequence.prefix_of, layer, rows[alike])
        return StorePart(sequence.room, sequence.attempt, slots, positions, rows, keys)

    def stored(self, step: int, chunk: Chunk) -> None:
        """All layers of the chunk are written (runs on the stream, before its event)."""
        sequence = chunk.sequence
        if not self.audit.on:
            return
        hashes = row_hashes(self.layout, self.pool.memory, chunk.pages, chunk.rows)
        self.audit.rows("stored", sequence.room, sequence.attempt, rows_for(chunk.first_token), hashes)
        if self.policy.positions == "chunk" and chunk.first_token:
            for i in range(pages_for(chunk.tokens)):
                self.audit.note("position", sequence.room, chunk.logical + i)


def _with_component(chunk: Chunk) -> list[Chunk]:
    """The chunk, and behind a last one the component that goes apart."""
    return chunk.sequence.chunks[chunk.index :] if chunk.last else [chunk]
