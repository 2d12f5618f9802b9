"""The prefill engine: chunked prefill on a stream, sender threads, one-sided writes into the decode pool.

Threads: the scheduler owns the allocator and launches forward batches; the stream runs them; sender threads post the chunks of
a request in order, always the same thread for a request; the transport's thread owns the wire; one thread listens to
decode. A request's chunks wait ("parked") until decode has announced its destination pages; then a sender takes them up,
and posts each once the event behind its stores has happened.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capture_hooks.events import I64, U64
from replay.lab import model
from replay.lab.audit import Audit, row_hashes
from replay.lab.barriers import Barriers
from replay.lab.config import PAGE_TOKENS, LabConfig, pages_for, rows_for
from replay.lab.control import Channel, Message
from replay.lab.faults import policy
from replay.lab.pool import PageAllocator, PagedPool, StoreBatch, StorePart
from replay.lab.stream import Event, Stream
from replay.lab.transport import Slice, Transfer, Transport, Wire, create

#: Pause of a sender between looks at the events it waits for.
_SENDER_NAP = 0.001
#: Longest turn of a scheduler that has nothing to launch, and how long it lets a last batch wait for the next.
_TURN = 0.005
_IDLE = 0.06


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on the prefill side."""

    room: int
    attempt: int
    tokens: int
    pages: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    launched: int = 0  #: tokens whose stores are on the stream
    chunks: list[Chunk] = field(default_factory=list)
    destination: I64 | None = None
    parked: list[Chunk] = field(default_factory=list)
    in_hand: int = 0  #: chunks that a sender has taken up and not finished
    sent: int = 0  #: chunks whose transfer is over
    aborted: bool = False
    acknowledged: bool = False
    failed: bool = False
    leaving: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """(room, attempt)."""
        return self.room, self.attempt


@dataclass(eq=False, slots=True)
class Chunk:
    """A piece of a prompt: whole pages, except at the prompt's end."""

    sequence: Sequence
    index: int
    first_token: int
    tokens: int
    last: bool
    event: Event | None = None

    @property
    def written(self) -> Event:
        """The event behind the chunk's stores, once it is launched."""
        assert self.event is not None
        return self.event

    @property
    def logical(self) -> int:
        """First logical page."""
        return self.first_token // PAGE_TOKENS

    @property
    def pages(self) -> I64:
        """Source pages."""
        return self.sequence.pages[self.logical : self.logical + pages_for(self.tokens)]

    @property
    def rows(self) -> int:
        """Complete rows of the chunk."""
        return rows_for(self.tokens)


class PrefillEngine:
    """Everything of the prefill side in one round."""

    role = "prefill"

    def __init__(self, config: LabConfig, transport: str, router: Channel) -> None:
        self.config = config
        self._router = router
        self.layout = config.layout
        self.policy = policy(config.fault, self.layout)
        self.barriers = Barriers(config.flags, config.rules)
        self.audit = Audit(config.audit, self.role)
        self.pool = PagedPool(
            self.layout, config.layers, config.prefill_pages, self.policy, config.triton_pages
        )
        self.allocator = PageAllocator(config.prefill_pages, config.free_list)
        self.transport = self._transport(transport)
        self.error = ""
        self._lock = threading.Lock()
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._left: set[tuple[int, int]] = set()
        self._announced: dict[tuple[int, int], I64] = {}  # before the request itself came
        self._dropped: set[tuple[int, int]] = set()  # aborted before the request itself came
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._retiring: list[Sequence] = []
        self._launches: deque[Event] = deque()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._boxes: list[queue.SimpleQueue[tuple[str, Any]]] = [
            queue.SimpleQueue() for _ in range(config.senders)
        ]
        self._stop = threading.Event()
        self._step = 0
        self._peer: Channel
        self._remote: list[int] = []
        self._remote_item = 0
        self._threads: list[threading.Thread] = []

    def _transport(self, kind: str) -> Transport:
        wire = Wire(self.config.bandwidth, self.config.window)
        return create(kind, self.role, self.pool.memory, wire, self.barriers)

    # -- life of the round ---------------------------------------------------------------------------------------

    def connect(self, peer: Channel) -> None:
        """Exchange addresses with decode and start the threads."""
        self._peer = peer
        peer.send("hello", item_length=self.pool.item_length())
        body = peer.expect("hello")
        self.transport.connect(body["transport"])
        self._remote = [int(address) for address in body["transport"]["addresses"]]
        self._remote_item = int(body["item_length"])
        self.transport.start_sender()
        self.stream = Stream("prefill-stream", self.fail)
        self._thread(self._schedule, "prefill-scheduler")
        for box in self._boxes:
            self._thread(lambda box=box: self._sender(box), "prefill-sender")
        peer.serve(self.hear, "prefill-peer")

    def submit(self, room: int, attempt: int, tokens: int) -> None:
        """A request from the router (any thread)."""
        self._inbox.put(("submit", Sequence(room, attempt, tokens)))

    def finish(self) -> dict[str, Any]:
        """Wait until every request has left, end the threads, and tell what was done."""
        end = time.monotonic() + self.config.timeout_s
        while self._sequences and not self.error and time.monotonic() < end:
            time.sleep(0.005)
        left = sorted(room for room, _ in self._sequences)
        self._stop.set()
        self._inbox.put(("stop", None))
        for box in self._boxes:
            box.put(("stop", None))
        for thread in self._threads:
            thread.join(timeout=10)
        self.stream.close()
        self.transport.close()
        self.audit.write()
        return {"error": self.error, "left": left, "batches": self._step, "triton": self.pool.interpreted}

    def fail(self, error: BaseException) -> None:
        """Remember the first error of any thread; the round ends with it."""
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            self._router.send("error", error=self.error)
        self._stop.set()

    def _thread(self, target: Any, name: str) -> None:
        def guarded() -> None:
            try:
                target()
            except Exception as error:
                self.fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

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
                    self.hand_over(chunk)
                before = []
            if batch:
                before, due = batch, time.monotonic() + _IDLE
            self._retire()

    def _messages(self, block: bool) -> list[tuple[str, Any]]:
        found = []
        try:
            timeout = _TURN
            found.append(self._inbox.get(block=block, timeout=timeout if block else None))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def handle(self, kind: str, body: Any) -> None:
        """One message in the scheduler's inbox."""
        if kind == "submit":
            self.start(body)
        elif kind in ("sent", "abort") and not body.leaving:
            body.leaving = True
            self._retiring.append(body)

    def start(self, sequence: Sequence) -> None:
        """A request begins to wait for pages."""
        with self._lock:
            if sequence.key in self._dropped:
                self._left.add(sequence.key)
                return
            sequence.destination = self._announced.pop(sequence.key, None)
            self._sequences[sequence.key] = sequence
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
        self._running = [sequence for sequence in self._running if not sequence.aborted]
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
            chunk.event = event

    def _retire(self) -> None:
        """Free requests that have left, once nothing on the stream and no sender uses their pages."""
        still = []
        for sequence in self._retiring:
            with self._lock:
                busy = sequence.in_hand > 0
            events = [chunk.event for chunk in sequence.chunks if chunk.event is not None]
            if busy or not all(event.query() for event in events):
                still.append(sequence)
                continue
            self.leave(sequence)
        self._retiring = still

    def leave(self, sequence: Sequence) -> None:
        """The request is over on this side."""
        if len(sequence.pages):
            reason = "abort" if sequence.aborted else "finish"
            self.allocator.free(sequence.room, sequence.attempt, sequence.pages, reason)
        with self._lock:
            self._sequences.pop(sequence.key, None)
            self._left.add(sequence.key)

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

    def _part(self, chunk: Chunk, layer: int) -> StorePart:
        sequence = chunk.sequence
        local = np.arange(chunk.rows, dtype=np.int64)
        rows = local + rows_for(chunk.first_token)
        slots = chunk.pages[local // self.layout.rows] * self.layout.rows + local % self.layout.rows
        positions = model.position(local if self.policy.positions == "chunk" else rows)
        keys = model.keys(self.config.seed, sequence.room, layer, rows)
        return StorePart(sequence.room, sequence.attempt, slots, positions, rows, keys)

    def stored(self, step: int, chunk: Chunk) -> None:
        """All layers of the chunk are written (runs on the stream, before its event)."""
        sequence = chunk.sequence
        if chunk.last:
            self._tell("computed", room=sequence.room, attempt=sequence.attempt)
        if not self.audit.on:
            return
        hashes = row_hashes(self.layout, self.pool.memory, chunk.pages, chunk.rows)
        self.audit.rows("stored", sequence.room, sequence.attempt, rows_for(chunk.first_token), hashes)
        if self.policy.positions == "chunk" and chunk.first_token:
            for i in range(pages_for(chunk.tokens)):
                self.audit.note("position", sequence.room, chunk.logical + i)

    # -- decode's messages ---------------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """A message from decode (runs on the peer thread)."""
        if message["kind"] == "announce":
            self.announced(message["room"], message["attempt"], np.array(message["pages"], np.int64))
        elif message["kind"] == "abort":
            self.abort(message["room"], message["attempt"])

    def announced(self, room: int, attempt: int, pages: I64) -> None:
        """Decode told the destination pages: parked chunks may go."""
        key = room, attempt
        with self._lock:
            sequence = self._sequences.get(key)
            if sequence is None:
                if key not in self._dropped and key not in self._left:
                    self._announced[key] = pages
                return
            sequence.destination = pages
            for chunk in sequence.parked:  # under the lock: a request's chunks go out in order
                self.enqueue(chunk)
            sequence.parked.clear()

    def abort(self, room: int, attempt: int) -> None:
        """Decode gave the request up: drop what is not in a sender's hands, acknowledge once nothing is."""
        key = room, attempt
        with self._lock:
            self._announced.pop(key, None)
            sequence = self._sequences.get(key)
            if sequence is not None:
                sequence.aborted = True
                sequence.parked.clear()
            elif key not in self._left:
                self._dropped.add(key)
        if sequence is None:
            self.acknowledge(room, attempt)
            return
        self._settle(sequence)
        self._inbox.put(("abort", sequence))

    def _settle(self, sequence: Sequence) -> None:
        """Acknowledge an abort as soon as no sender has a chunk of the request."""
        with self._lock:
            ready = sequence.aborted and sequence.in_hand == 0 and not sequence.acknowledged
            if ready:
                sequence.acknowledged = True
        if ready:
            self.acknowledge(sequence.room, sequence.attempt)

    def acknowledge(self, room: int, attempt: int) -> None:
        """Tell decode that no write of the request is in flight, and none will be."""
        self._tell("ack", room=room, attempt=attempt)

    def tell_status(self, sequence: Sequence, ok: bool) -> None:
        """Tell decode that all pages of the request are there (or that they never will be)."""
        self._tell("status", room=sequence.room, attempt=sequence.attempt, ok=ok)

    def _tell(self, kind: str, **body: Any) -> None:
        try:
            self._peer.send(kind, **body)
        except OSError as error:
            self.fail(error)

    # -- senders -------------------------------------------------------------------------------------------------

    def hand_over(self, chunk: Chunk) -> None:
        """A launched chunk goes to its sender, or is parked until its destination is known."""
        sequence = chunk.sequence
        with self._lock:
            if sequence.aborted:
                return
            if sequence.destination is None:
                sequence.parked.append(chunk)
            else:
                self.enqueue(chunk)

    def enqueue(self, chunk: Chunk) -> None:
        """Give ``chunk`` to the sender thread of its request."""
        self._box(chunk.sequence).put(("chunk", chunk))

    def _box(self, sequence: Sequence) -> queue.SimpleQueue[tuple[str, Any]]:
        return self._boxes[sequence.room % len(self._boxes)]

    def _sender(self, box: queue.SimpleQueue[tuple[str, Any]]) -> None:
        """Take chunks up, post each once its stores are done, and see to the transfers that are over."""
        taken: deque[Chunk] = deque()
        while not self._stop.is_set():
            try:
                kind, body = box.get(timeout=_SENDER_NAP if taken else None)
                if kind == "over":
                    self.sent(*body)
                elif kind == "chunk" and self.take(body):
                    taken.append(body)
            except queue.Empty:
                pass
            while taken and self.may_post(taken[0]):
                self.send(taken.popleft())

    def take(self, chunk: Chunk) -> bool:
        """Take a chunk up, unless its request is over already."""
        sequence = chunk.sequence
        with self._lock:
            if sequence.aborted or sequence.failed:
                return False
            sequence.in_hand += 1
        self.barriers.at("sender.taken", sequence.room, chunk.index)
        return True

    def may_post(self, chunk: Chunk) -> bool:
        """Whether the chunk's stores are done, as far as this sender wants to know."""
        return not self.policy.await_stores or chunk.written.query()

    def send(self, chunk: Chunk) -> None:
        """Hand one chunk to the transport."""
        sequence = chunk.sequence
        self.barriers.at("sender.post", sequence.room, chunk.index)
        transfer = self._transfer(chunk)
        transfer.on_over = lambda: self._box(sequence).put(("over", (chunk, transfer)))
        self.transport.post(transfer)
        if self.policy.tell == "posted" and chunk.last:
            self.tell_status(sequence, True)

    def sent(self, chunk: Chunk, transfer: Transfer) -> None:
        """The transfer of one chunk is over."""
        sequence = chunk.sequence
        self.barriers.at("sender.done", sequence.room, chunk.index)
        ok = not transfer.error
        with self._lock:
            sequence.in_hand -= 1
            sequence.sent += 1
            aborted = sequence.aborted
            first_failure = not ok and not sequence.failed
            sequence.failed = sequence.failed or not ok
            whole = sequence.chunks[-1].last and sequence.sent == len(sequence.chunks)
        if aborted:
            self._settle(sequence)
        elif first_failure or (whole and not sequence.failed):
            if self.policy.tell == "done" or not ok:
                self.tell_status(sequence, ok)
            self._inbox.put(("sent", sequence))

    def _transfer(self, chunk: Chunk) -> Transfer:
        """Descriptors of one chunk: in each layer, page by page."""
        sequence = chunk.sequence
        assert sequence.destination is not None
        item = self.policy.item_length or self.pool.item_length()
        source = chunk.pages
        destination = sequence.destination[chunk.logical : chunk.logical + len(source)]
        slices = tuple(
            Slice(
                layer,
                layer,
                _addresses(self.pool.address(layer), source, item),
                _addresses(self._remote[layer], destination, item),
                item,
            )
            for layer in range(self.config.layers)
        )
        return Transfer(
            sequence.room, sequence.attempt, chunk.index, chunk.last, chunk.logical, source, destination, item,
            chunk.written, slices,
            sequence.tokens,
        )  # fmt: skip


def _addresses(base: int, pages: I64, item: int) -> U64:
    return np.uint64(base) + pages.astype(np.uint64) * np.uint64(item)


def main() -> int:
    """Run one prefill process; the runner starts it."""
    from replay.lab.process import run

    return run("prefill")


if __name__ == "__main__":
    raise SystemExit(main())
