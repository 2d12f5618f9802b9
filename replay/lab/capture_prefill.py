"""Hooks of the prefill side: requests, ST, SE and the edges between its threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capture_hooks.adapters.nixl import NixlAdapter
from capture_hooks.adapters.posts import Post
from capture_hooks.events import Metadata, Request
from capture_hooks.hooktable import Scope
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks
from replay.lab.capture_common import CommonHooks
from replay.lab.capture_wire import TcpHooks
from replay.lab.config import rows_for
from replay.lab.nixl_transport import NixlTransport
from replay.lab.prefill import PrefillEngine
from replay.lab.prompts import Chunk, Sequence
from replay.lab.sender import Sender
from replay.lab.tcp_transport import TcpTransport
from replay.lab.transport import Slice, Transfer, Transport


class PrefillHooks(CommonHooks):
    """Hooks on :class:`PrefillEngine` and on its end of the transport."""

    def __init__(self, recorder: Recorder, hooks: Hooks, wire: NixlAdapter | TcpHooks | None) -> None:
        super().__init__(recorder, hooks)
        self._awaited: dict[int, int] = {}  # by the event's serial
        self._over_keys: set[str] = set()  # keys of chunks whose transfer is over
        engine = PrefillEngine
        hooks.wrap(engine, "connect", "buffer", before=self._connect)
        hooks.wrap(engine, "start", "request", before=self._start)
        hooks.wrap(engine, "stored", "snapshot", before=self._stored)
        hooks.wrap(Sender, "hand_over", "order", before=self._hand_over)
        hooks.wrap(Sender, "enqueue", "order", before=self._enqueue)
        hooks.wrap(Sender, "take", "order", before=self._take)
        hooks.wrap(Sender, "send", "order", before=self._send)
        hooks.wrap(Sender, "sent", "order", before=self._sent)
        hooks.wrap(Sender, "tell_status", "completion", before=self._tell_status)
        hooks.wrap(Sender, "acknowledge", "completion", before=self._acknowledge)
        hooks.wrap(Sender, "announced", "order", before=self._announced)
        hooks.wrap(Sender, "abort", "request", before=self._abort)
        hooks.wrap(engine, "leave", "request", before=self._leave)
        hooks.wrap(Transport, "post", "order", before=self._post)
        hooks.wrap(Transport, "take", "order", after=self._taken)
        hooks.wrap(Transport, "complete", "order", before=self._over)
        if isinstance(wire, NixlAdapter):
            hooks.wrap(NixlTransport, "begin", "request", around=self._begin, label="request")
        else:
            hooks.wrap(TcpTransport, "begin", "request", around=self._begin, label="request")
        if wire is not None:
            wire.before_post.append(lambda post: self._source(post, "before"))
            wire.after_state.append(lambda post: self._source(post, "after"))

    def _connect(self, engine: PrefillEngine, *_: Any) -> None:
        self._metadata = engine.metadata
        self.buffers(engine)

    def _start(self, _: PrefillEngine, sequence: Sequence) -> None:
        tokens = sequence.tokens
        self.recorder.emit(
            Request(sequence.room, sequence.attempt, "start", tokens=tokens, rows=rows_for(tokens))
        )

    def _stored(self, _: PrefillEngine, step: int, chunk: Chunk) -> None:
        sequence = chunk.sequence
        rows = rows_for(chunk.first_token + chunk.tokens)
        for layer in range(len(self.recorder.inventory)):
            self.look(
                "ST", "", layer, chunk.pages, room=sequence.room, attempt=sequence.attempt, rows=rows,
                logical=chunk.logical, step=step,
            )  # fmt: skip

    # -- scheduler -> (parked) -> sender -> wire -> sender -> scheduler ----------------------------------------------

    def _hand_over(self, _: Sender, chunk: Chunk) -> None:
        self.recorder.tail("queue", _key("launched", chunk))

    def _enqueue(self, _: Sender, chunk: Chunk) -> None:
        # Whoever hands the chunk on knows where it goes: the scheduler too, where decode announced the pages before.
        self.recorder.head("announce", f"{chunk.sequence.room}.{chunk.sequence.attempt}")
        self.recorder.head("queue", _key("launched", chunk))
        self.recorder.tail("queue", _key("chunk", chunk))

    def _take(self, _: Sender, chunk: Chunk) -> None:
        self.recorder.head("queue", _key("chunk", chunk))

    def _send(self, _: Sender, chunk: Chunk) -> None:
        self._awaited[chunk.written.serial] = int(self.has_passed(chunk.written))

    def _post(self, _: Transport, transfer: Transfer) -> None:
        self.recorder.tail("queue", _wire_key("post", transfer))

    def _taken(self, transfer: Transfer | None, *_: Any, **__: Any) -> None:
        if transfer is not None:
            self.recorder.head("queue", _wire_key("post", transfer))

    def _begin(
        self, original: Callable[..., Any], transport: Transport, transfer: Transfer, part: Slice
    ) -> Any:
        about: Scope | None = None
        with self.recorder.guard("lab.begin"):
            about = self._about(transfer, part)
        if about is None:
            return original(transport, transfer, part)
        with about:
            return original(transport, transfer, part)

    def _about(self, transfer: Transfer, part: Slice) -> Scope:
        event = transfer.written
        if part.layer < 0:
            slot, there = transfer.slots
            holds = self._metadata.holds(slot)
            self.recorder.emit(Metadata("sent", transfer.room, transfer.attempt, slot, there, holds))
            return self.recorder.about(transfer.room, transfer.attempt, transfer.chunk, transfer.last)
        return self.recorder.about(
            transfer.room,
            transfer.attempt,
            transfer.chunk,
            transfer.last,
            layer=part.layer,
            written=lambda: int(event.happened),
            awaited=self._awaited.get(event.serial, -1),
            logical=transfer.logical,
            pages=transfer.pages,
            destination_pages=transfer.destination_pages,
            item_lengths=[transfer.item_length],
        )

    def _source(self, post: Post, moment: str) -> None:
        about = post.about
        if about is None or post.state == "error" or "layer" not in about.more:
            return
        pages = about.more["pages"]
        self.look(
            "SE", moment, about.more["layer"], pages, room=about.room, attempt=about.attempt, rows=-1,
            logical=about.more["logical"], transfer=post.transfer,
        )  # fmt: skip

    def _over(self, _: Transport, transfer: Transfer) -> None:
        self.recorder.tail("queue", _wire_key("over", transfer))

    def _sent(self, _: Sender, chunk: Chunk, transfer: Transfer) -> None:
        self.recorder.head("queue", _wire_key("over", transfer))
        self._over_keys.add(_key("sent", chunk))
        self.recorder.tail("queue", _key("sent", chunk))

    def _leave(self, _: PrefillEngine, sequence: Sequence) -> None:
        for key in {_key("sent", chunk) for chunk in sequence.chunks} & self._over_keys:
            self._over_keys.discard(key)
            self.recorder.head("queue", key)
        if not sequence.aborted:
            self.recorder.emit(
                Request(sequence.room, sequence.attempt, "fail" if sequence.failed else "finish")
            )

    # -- the protocol with decode --------------------------------------------------------------------------------

    def _announced(self, _: Sender, room: int, attempt: int, *__: Any) -> None:
        self.recorder.head("announce", f"{room}.{attempt}")

    def _abort(self, _: Sender, room: int, attempt: int) -> None:
        self.recorder.head("abort", f"{room}.{attempt}")
        self.recorder.emit(Request(room, attempt, "abort"))

    def _tell_status(self, _: Sender, sequence: Sequence, ok: bool) -> None:
        self.recorder.tail("status", f"{sequence.room}.{sequence.attempt}")

    def _acknowledge(self, _: Sender, room: int, attempt: int) -> None:
        self.recorder.tail("ack", f"{room}.{attempt}")


def _key(what: str, chunk: Chunk) -> str:
    return f"prefill.{what}.{chunk.sequence.room}.{chunk.sequence.attempt}.{chunk.index}"


def _wire_key(what: str, transfer: Transfer) -> str:
    return f"prefill.{what}.{transfer.room}.{transfer.attempt}.{transfer.chunk}"
