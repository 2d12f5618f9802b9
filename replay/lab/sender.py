"""The sending half of prefill: what decode says about requests, and the threads that move their chunks.

A request's chunks wait ("parked") until decode has announced its destination pages. Then the sender thread of
the request takes them up one after another, and posts each once the event behind its stores has happened.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from capture_hooks.events import I64, U64
from replay.lab.barriers import Barriers
from replay.lab.config import PAGE_TOKENS, LabConfig, pages_for
from replay.lab.control import Channel, Message
from replay.lab.faults import Policy
from replay.lab.metadata import SLOT_BYTES, MetadataSlots
from replay.lab.pool import PagedPool
from replay.lab.prompts import Chunk, Sequence
from replay.lab.transport import Slice, Transfer, Transport

#: Added to the priority of a component: it goes behind all chunks.
_BEHIND = 1 << 30
#: Pause of a sender thread between looks at the events it waits for.
_NAP = 0.001


class Sender:
    """Sends the chunks of all requests of one round.

    Args:
        over: is told ("sent" or "abort", sequence) when nothing more is to be done for a request; any thread.
        fail: is told of errors; any thread.
    """

    def __init__(
        self,
        config: LabConfig,
        policy: Policy,
        pool: PagedPool,
        metadata: MetadataSlots,
        transport: Transport,
        barriers: Barriers,
        over: Callable[[str, Sequence], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.pool = pool
        self.metadata = metadata
        self.transport = transport
        self.barriers = barriers
        self._over = over
        self._fail = fail
        self._lock = threading.Lock()
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._left: set[tuple[int, int]] = set()
        # Before the request itself came: pages, and the metadata slot.
        self._announced: dict[tuple[int, int], tuple[I64, int]] = {}
        self._dropped: set[tuple[int, int]] = set()  # aborted before the request itself came
        # A ``SimpleQueue`` may wait for ever where it was told for how long: CPython 3.11 counts its timeout down past
        # zero when the thread is preempted at the wrong moment.
        self._boxes: list[queue.Queue[tuple[str, Any]]] = [queue.Queue() for _ in range(config.senders)]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._peer: Channel
        self._remote: list[int] = []
        self._remote_metadata = 0

    def connect(self, peer: Channel, remote: dict[str, Any]) -> None:
        """Start: ``peer`` is decode, ``remote`` the addresses of its pool's layers and of its metadata slots."""
        self._peer = peer
        self._remote = [int(address) for address in remote["addresses"]]
        self._remote_metadata = int(remote["metadata"])
        self.transport.start_sender()
        for box in self._boxes:
            thread = threading.Thread(target=self._guarded, args=(box,), name="prefill-sender", daemon=True)
            thread.start()
            self._threads.append(thread)
        peer.serve(self.hear, "prefill-peer", self._fail)

    def close(self) -> None:
        """End the threads and the transport."""
        self._stop.set()
        for box in self._boxes:
            box.put(("stop", None))
        for thread in self._threads:
            thread.join(timeout=10)
        self.transport.close()

    @property
    def rooms(self) -> list[int]:
        """Requests that have not left."""
        return sorted(room for room, _ in list(self._sequences))

    def admit(self, sequence: Sequence) -> bool:
        """A new request; ``False`` where decode has given it up already."""
        with self._lock:
            if sequence.key in self._dropped:
                self._left.add(sequence.key)
                return False
            sequence.destination, sequence.peer_slot = self._announced.pop(sequence.key, (None, -1))
            self._sequences[sequence.key] = sequence
            return True

    def forget(self, sequence: Sequence) -> None:
        """A request has left."""
        with self._lock:
            self._sequences.pop(sequence.key, None)
            self._left.add(sequence.key)

    def busy(self, sequence: Sequence) -> bool:
        """Whether a chunk of the request is in somebody's hands."""
        with self._lock:
            posted = sequence.on_wire if self.policy.hold_source == "posted" else 0
            return sequence.in_hand > posted

    # -- decode's messages -----------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """A message from decode (runs on the peer thread)."""
        if message["kind"] == "announce":
            pages = np.array([-1] * message["logical"] + message["pages"], np.int64)
            self.announced(message["room"], message["attempt"], pages, message["slot"])
        elif message["kind"] == "abort":
            self.abort(message["room"], message["attempt"])

    def announced(self, room: int, attempt: int, pages: I64, slot: int) -> None:
        """Decode told the destination pages and its metadata slot: parked chunks may go."""
        key = room, attempt
        with self._lock:
            sequence = self._sequences.get(key)
            if sequence is not None:
                sequence.destination, sequence.peer_slot = pages, slot
                for chunk in sequence.parked:  # under the lock: a request's chunks go out in order
                    self.enqueue(chunk)
                sequence.parked.clear()
            elif key not in self._dropped and key not in self._left:
                self._announced[key] = pages, slot
        self.barriers.at("sender.announced", room)

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
        self._over("abort", sequence)

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
            self._fail(error)

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

    def _box(self, sequence: Sequence) -> queue.Queue[tuple[str, Any]]:
        return self._boxes[sequence.room % len(self._boxes)]

    def _guarded(self, box: queue.Queue[tuple[str, Any]]) -> None:
        try:
            self._loop(box)
        except Exception as error:
            self._fail(error)

    def _loop(self, box: queue.Queue[tuple[str, Any]]) -> None:
        """Take chunks up, post each once its stores are done, and see to the transfers that are over."""
        taken: deque[Chunk] = deque()
        while not self._stop.is_set():
            try:
                kind, body = box.get(timeout=_NAP if taken else None)
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
        sequence.on_wire += 1
        if transfer.slices:
            self.transport.post(transfer)
        else:
            transfer.on_over()
        if self.policy.metadata_slot == "posted":
            self._give_slot_back(transfer)
        if self.policy.tell == "posted" and chunk.last:
            self.tell_status(sequence, True)
        if self.policy.hold_source == "posted" and chunk.final:
            self._over("sent", sequence)

    def _give_slot_back(self, transfer: Transfer) -> None:
        if transfer.slots[0] >= 0:
            self.metadata.give_back(transfer.room, transfer.attempt, transfer.slots[0])
            self.barriers.at("metadata.freed", transfer.room)

    def sent(self, chunk: Chunk, transfer: Transfer) -> None:
        """The transfer of one chunk is over."""
        sequence = chunk.sequence
        self.barriers.at("sender.done", sequence.room, chunk.index)
        if self.policy.metadata_slot == "done":
            self._give_slot_back(transfer)
        ok = not transfer.error or self.policy.on_error == "ignore"
        with self._lock:
            sequence.in_hand -= 1
            sequence.on_wire -= 1
            sequence.sent += 1
            sequence.component_sent |= chunk.component
            aborted = sequence.aborted
            first_failure = not ok and not sequence.failed
            sequence.failed = sequence.failed or not ok
            whole = sequence.chunks[-1].last and sequence.sent == len(sequence.chunks)
            enough = whole or self._enough(sequence)
            tell = first_failure or (enough and not sequence.told and self.policy.tell == "done")
            sequence.told |= tell
        if aborted:
            self._settle(sequence)
        elif first_failure or not sequence.failed:
            if tell:
                self.tell_status(sequence, ok)
            if first_failure or whole:
                self._over("sent", sequence)

    def _enough(self, sequence: Sequence) -> bool:
        """Whether all that success waits for is sent, though not everything is."""
        if self.policy.awaits == "all" or not sequence.chunks[-1].component or sequence.component_sent:
            return False
        return sequence.sent == len(sequence.chunks) - 1

    def _paired_layers(self, chunk: Chunk) -> list[tuple[int, int]]:
        """(layer here, layer of the receiver) of each buffer that is sent with a chunk."""
        together = self.config.layers - self.config.apart
        layers = range(together, self.config.layers) if chunk.component else range(together)
        if self.policy.layers_sent == "without-last":
            layers = layers[:-1]
        if self.policy.layers_sent == "by-position":
            return list(zip(layers[1:], layers, strict=False))
        return [(layer, layer) for layer in layers]

    def _listed(self, sequence: Sequence) -> int:
        """Pages of the request that are sent."""
        if self.policy.list_pages == "whole":
            return max(1, sequence.tokens // PAGE_TOKENS)
        return pages_for(sequence.tokens)

    def _transfer(self, chunk: Chunk) -> Transfer:
        """Descriptors of one chunk: in each layer, page by page."""
        sequence = chunk.sequence
        assert sequence.destination is not None
        item = self.policy.item_length or self.pool.item_length()
        length = item // 2 if self.policy.half_pages else item
        known = int((sequence.destination < 0).sum())
        first = max(chunk.logical, known)  # decode has the pages before it
        source = chunk.pages[first - chunk.logical : max(self._listed(sequence) - chunk.logical, 0)]
        destination = sequence.destination[first : first + len(source)]
        if self.policy.destination_ids == "own":
            destination = source
        pages = (
            []
            if not len(source)
            else [
                Slice(
                    index,
                    here,
                    _addresses(self.pool.address(here), source, item),
                    _addresses(self._remote[there], destination, item),
                    length,
                )
                for index, (here, there) in enumerate(self._paired_layers(chunk))
            ]
        )
        slot = self._metadata(chunk) if sequence.peer_slot >= 0 and chunk.final else -1
        if slot >= 0:
            there = self._remote_metadata + sequence.peer_slot * SLOT_BYTES
            addresses = np.array([self.metadata.address(slot)], np.uint64), np.array([there], np.uint64)
            pages.append(Slice(len(pages), -1, *addresses, SLOT_BYTES))
        return Transfer(
            sequence.room, sequence.attempt, chunk.index, chunk.last, first, source, destination, item,
            chunk.written, tuple(pages), sequence.tokens + chunk.component * _BEHIND,
            outage=chunk.index == sequence.outage, slots=(slot, sequence.peer_slot),
        )  # fmt: skip

    def _metadata(self, chunk: Chunk) -> int:
        """A metadata slot that is filled for the chunk's request."""
        key = chunk.sequence.key
        slot = self.metadata.take(*key)
        self.metadata.write(*key, slot)
        self.barriers.at("metadata.written", key[0])
        return slot


def _addresses(base: int, pages: I64, item: int) -> U64:
    return np.uint64(base) + pages.astype(np.uint64) * np.uint64(item)
