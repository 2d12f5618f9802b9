"""The decode engine: announces pages, waits for their data, reads them step by step, appends a row every fourth
token.

Threads: the scheduler owns the allocator, the batch and the step buffers; the stream runs the steps; the
transport's thread lets the library receive; two threads listen to the router and to prefill. The scheduler
works one step ahead: it fills and launches step N + 1 while the stream runs step N.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from capture_hooks.events import I64
from replay.lab.audit import row_hashes
from replay.lab.config import PAGE_TOKENS, LabConfig, pages_for
from replay.lab.control import Channel, Message
from replay.lab.engine import Engine
from replay.lab.kernels import TILE_ROWS
from replay.lab.pool import DUMMY_PAGE, ReadBatch, ReadResult, StoreBatch
from replay.lab.replies import Sequence, Step, appended, padded, read_batch


class DecodeEngine(Engine):
    """Everything of the decode side in one round."""

    role = "decode"
    turn = 0.2

    def __init__(self, config: LabConfig, transport: str, router: Channel) -> None:
        super().__init__(config, transport, router, config.decode_pages)
        self.transport.expecting = lambda: bool(self._awaited)
        self._peer: Channel
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._arrived: deque[Sequence] = deque()
        self._batch: list[Sequence] = []
        self._leaving: list[Sequence] = []  # out of the batch, their last step may still run
        self._awaited: set[tuple[int, int]] = set()  # data or an acknowledgement is to come
        longest = max(pages_for(job.tokens + job.new_tokens) for job in config.clients())
        self._buffers = [
            np.full((len(config.clients()), longest), DUMMY_PAGE, np.int64)
            for _ in range(self.policy.table_buffers)
        ]
        self._steps = 0
        self._flying = 0

    # -- life of the round ---------------------------------------------------------------------------------------

    def connect(self, peer: Channel) -> None:
        """Exchange addresses with prefill and start the threads."""
        self._peer = peer
        peer.expect("hello")
        peer.send("hello", transport=self.transport.describe(), item_length=self.pool.item_length())
        self.transport.start_receiver()
        self._start_threads()
        peer.serve(self.hear, "decode-peer", self.fail)

    def submit(self, sequence: Sequence) -> None:
        """A request from the router (any thread)."""
        self._inbox.put(("submit", sequence))

    def cancel(self, room: int, attempt: int) -> None:
        """The client went away (any thread)."""
        self._inbox.put(("cancel", (room, attempt)))

    def hear(self, message: Message) -> None:
        """A message from prefill (runs on the peer thread)."""
        self._inbox.put((message["kind"], message))

    def finish(self) -> dict[str, Any]:
        """Wait until nothing is to come any more, end the threads, and tell what was done."""
        end = time.monotonic() + self.config.timeout_s
        while (self._sequences or self._awaited) and not self.error and time.monotonic() < end:
            time.sleep(0.005)
        left = sorted(room for room, _ in self._sequences)
        self._end_scheduler()
        self.stream.close()
        self.audit.write()
        return {"error": self.error, "left": left, "steps": self._steps, "triton": self.pool.interpreted}

    def close(self) -> None:
        """Take the transport down, once the sender is gone."""
        self.transport.close()

    # -- scheduler -----------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        while not self._stop.is_set():
            ready = self._flying < 2 and bool(self._batch or self._arrived)
            for kind, body in self._messages(block=not ready):
                self.handle(kind, body)
            self._admit()
            if self._flying < 2 and (self._batch or self._arrived):
                step = self.prepare()
                if step is not None:
                    self.launch(step)

    def handle(self, kind: str, body: Any) -> None:
        """One message in the scheduler's inbox."""
        if kind == "submit":
            self.start(body)
        elif kind == "cancel":
            sequence = self._sequences.get(body)
            if sequence is not None:
                self.abort(sequence)
        elif kind == "status":
            sequence = self._sequences.get((body["room"], body["attempt"]))
            if sequence is not None and sequence.state == "announced":
                self.told(sequence, bool(body["ok"]))
        elif kind == "ack":
            self.acknowledged(body["room"], body["attempt"])
        elif kind == "step":
            self.processed(body)

    def start(self, sequence: Sequence) -> None:
        """A request begins to wait for pages."""
        self._sequences[sequence.key] = sequence
        self._waiting.append(sequence)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            shared = self._prefix(sequence)
            count = pages_for(sequence.tokens + sequence.new_tokens) - len(shared)
            pages = self.allocator.alloc(sequence.room, sequence.attempt, count, len(shared))
            if pages is None:
                return
            if len(shared):
                self.allocator.share(sequence.room, sequence.attempt, shared)
                sequence.shared = len(shared)
                self.barriers.at("decode.shared", sequence.room)
            sequence.pages = np.concatenate([shared, pages])
            if self.config.metadata_slots:
                sequence.slot = self.metadata.take(sequence.room, sequence.attempt)
            self._waiting.popleft()
            self.announce(sequence)

    def _prefix(self, sequence: Sequence) -> I64:
        """Pages of a running request whose prompt begins alike: they need not be sent again."""
        first = self._sequences.get((sequence.prefix_of, 0))
        if first is None or first.state != "running":
            return np.empty(0, np.int64)
        return first.pages[: sequence.prefix_pages]

    def announce(self, sequence: Sequence) -> None:
        """Tell prefill where the pages of the prompt that are not shared are to go."""
        sequence.state = "announced"
        self._awaited.add(sequence.key)
        pages = sequence.prompt_pages[sequence.shared :].tolist()
        self._peer.send(
            "announce", room=sequence.room, attempt=sequence.attempt, logical=sequence.shared, pages=pages,
            slot=sequence.slot,
        )  # fmt: skip

    def told(self, sequence: Sequence, ok: bool) -> None:
        """Prefill says that the data is there, or that it never will be."""
        self._awaited.discard(sequence.key)
        if not ok:
            sequence.outcome = "fail"
            self.release(sequence, "fail")
            return
        self.arrived(sequence)
        if sequence.slot >= 0:
            holds = self.metadata.read(sequence.room, sequence.attempt, sequence.slot)
            if holds != sequence.room:
                self.audit.note("metadata", sequence.room, holds)
        self.barriers.at("decode.arrived", sequence.room)
        sequence.state = "running"
        self._arrived.append(sequence)

    def arrived(self, sequence: Sequence) -> None:
        """The request may be read from now on."""
        self._audit_rows("arrived", sequence)

    def abort(self, sequence: Sequence) -> None:
        """The client is gone."""
        if sequence.state in ("aborting", "over"):
            return
        sequence.outcome = "abort"
        before, sequence.state = sequence.state, "aborting"
        if before == "waiting":
            self._waiting.remove(sequence)
            self.tell_abort(sequence)
            self.release(sequence, "abort")
        elif before == "announced":
            self.tell_abort(sequence)
            if self.policy.free_on_abort == "at-once":
                self.release(sequence, "abort")
        elif sequence in self._arrived:
            self._arrived.remove(sequence)
            self.release(sequence, "abort")
        # A running one leaves the batch when the next step is prepared.

    def tell_abort(self, sequence: Sequence) -> None:
        """Ask prefill to stop, and to acknowledge once no write is in flight."""
        self._awaited.add(sequence.key)
        self._peer.send("abort", room=sequence.room, attempt=sequence.attempt)
        self.barriers.at("decode.aborting", sequence.room)

    def acknowledged(self, room: int, attempt: int) -> None:
        """Prefill has no write of the request in flight any more."""
        self._awaited.discard((room, attempt))
        sequence = self._sequences.get((room, attempt))
        if sequence is not None and sequence.state == "aborting":
            self.release(sequence, "abort")

    def release(self, sequence: Sequence, reason: str) -> None:
        """Give the pages back and tell the router."""
        sequence.state = "over"
        if len(sequence.pages):
            self.allocator.free(sequence.room, sequence.attempt, sequence.pages, reason)
        if sequence.slot >= 0:
            self.metadata.give_back(sequence.room, sequence.attempt, sequence.slot)
        self._sequences.pop(sequence.key, None)
        self.barriers.at("decode.over", sequence.room)
        self._router.send("done", room=sequence.room, attempt=sequence.attempt, outcome=sequence.outcome)

    # -- steps ---------------------------------------------------------------------------------------------------

    def prepare(self) -> Step | None:
        """Compose the next step and fill its buffer."""
        batch = self._batch
        for i in range(len(batch) - 1, -1, -1):
            sequence = batch[i]
            if sequence.produced < sequence.new_tokens and sequence.state == "running":
                continue
            # The last one moves into the hole, so that the others keep their place.
            batch[i] = batch[-1]
            batch.pop()
            if sequence.last_step <= self._steps - self._flying:
                self.leave(sequence)
            else:
                self._leaving.append(sequence)
        batch.extend(self._arrived)
        self._arrived.clear()
        if not batch:
            return None
        self._steps += 1
        for sequence in batch:
            sequence.produced += 1
            sequence.last_step = self._steps
        tokens = np.array([s.tokens + s.produced for s in batch], np.int64)
        table = self._buffers[self._steps % len(self._buffers)][: len(batch)]
        self.fill(table, batch)
        step = Step(self._steps, tuple(batch), tokens, table)
        for sequence in self._leaving:
            self.barriers.at("step.left", sequence.room)
        return step

    def fill(self, table: I64, batch: list[Sequence]) -> None:
        """Write the batch's block tables into a step buffer."""
        for row, sequence in zip(table, batch, strict=True):
            row[: len(sequence.pages)] = sequence.pages
            row[len(sequence.pages) :] = DUMMY_PAGE

    def launch(self, step: Step) -> None:
        """Put the step on the stream."""
        self._flying += 1
        self.stream.launch(lambda: self.run(step))

    def run(self, step: Step) -> None:
        """One step (runs on the stream)."""
        if self.config.clears:
            self._clear(step)
        for layer in range(self.config.layers):
            self._barrier(step, layer)
            rows = appended(step, layer, self.layout.rows, self.config.seed)
            if rows:
                rows = padded(rows, layer, self.config.pads, self.config.seed)
                self.append(StoreBatch(layer, step.number, rows))
            self.read(step, read_batch(step, layer, self.layout.rows, self.config, self.policy.extra_rows))
        for sequence, tokens in zip(step.sequences, step.tokens.tolist(), strict=True):
            if tokens == sequence.tokens + 1:
                self._audit_rows("read", sequence)
                self.barriers.at("read.over", sequence.room)
        self.hand_back(step)

    def _clear(self, step: Step) -> None:
        """Clear the pages for the replies that begin with this step."""
        for sequence, tokens in zip(step.sequences, step.tokens.tolist(), strict=True):
            if tokens == sequence.tokens + 1:
                whole = sequence.tokens // PAGE_TOKENS
                first = whole if self.policy.clear_from == "last-page" else pages_for(sequence.tokens)
                pages = sequence.pages[first:]
                if len(pages):
                    self.pool.clear(sequence.room, sequence.attempt, pages)

    def hand_back(self, step: Step) -> None:
        """Give the finished step to the scheduler."""
        self._inbox.put(("step", step))

    def append(self, batch: StoreBatch) -> None:
        """Store the appended rows of one layer."""
        self.pool.store(batch)

    def read(self, step: Step, batch: ReadBatch) -> ReadResult:
        """One launch of the read kernel."""
        before = batch.table.copy() if self.audit.on else batch.table
        result = self.pool.read(batch)
        if self.audit.on:
            self._audit_tables(step, batch, before)
        return result

    def processed(self, step: Step) -> None:
        """A step is over: free what had its last step."""
        self._flying -= 1
        for sequence in [s for s in self._leaving if s.last_step <= step.number]:
            self._leaving.remove(sequence)
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """No step uses the request any more."""
        if sequence.outcome != "abort":
            sequence.outcome = "finish"
        # One whose client went away was read all the same.
        self._audit_rows("end", sequence)
        self.release(sequence, sequence.outcome)

    # -- tests and truth -----------------------------------------------------------------------------------------

    def _barrier(self, step: Step, layer: int) -> None:
        if not self.config.flags:
            return
        for sequence, tokens in zip(step.sequences, step.tokens.tolist(), strict=True):
            if tokens == sequence.tokens + 1:
                self.barriers.at("read.first", sequence.room, layer)
            if tokens == sequence.tokens + sequence.new_tokens:
                self.barriers.at("read.last", sequence.room, layer)

    def _audit_rows(self, moment: str, sequence: Sequence) -> None:
        if self.audit.on:
            pages, rows = sequence.prompt_pages, sequence.prompt_rows
            hashes = row_hashes(self.layout, self.pool.memory, pages, rows)
            self.audit.rows(moment, sequence.room, sequence.attempt, 0, hashes)

    def _audit_tables(self, step: Step, batch: ReadBatch, before: I64) -> None:
        """Note requests that this launch read through entries which are not theirs."""
        for i, sequence in enumerate(step.sequences):
            count = -(-int(batch.rows[i]) // self.layout.rows)
            if not np.array_equal(before[i, :count], sequence.pages[:count]):
                self.audit.note("table", sequence.room, batch.layer, step.number)
            if self._reads_wrongly(batch, i):
                self.audit.note("kernel", sequence.room)

    def _reads_wrongly(self, batch: ReadBatch, i: int) -> bool:
        """Whether this engine's read is wrong for row ``i`` of a batch in every run."""
        rows = int(batch.rows[i])
        tiled = self.policy.read == "tiled" and (not self.layout.scale_bytes or rows > TILE_ROWS)
        short = self.policy.top_k == "short" and min(rows, batch.k) > batch.k - batch.k // 8
        coarse = self.policy.top_k == "coarse" and rows > batch.k
        return self.policy.read == "other-format" or self.policy.extra_rows > 0 or tiled or short or coarse
