"""Hooks of the decode side: requests, RC, LT, RD, reads, appended rows and the edges of the protocol."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from capture_hooks.events import I64, Read, Receive, Request, TransferState
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks
from replay.lab.capture_common import CommonHooks
from replay.lab.decode import DecodeEngine
from replay.lab.pool import ReadBatch, ReadResult, StoreBatch
from replay.lab.replies import Sequence, Step

#: The top-k is seen by the hook on the read.
_TOP_K = "lab.DecodeEngine.read top-k"


class DecodeHooks(CommonHooks):
    """Hooks on :class:`DecodeEngine`."""

    def __init__(self, recorder: Recorder, hooks: Hooks) -> None:
        super().__init__(recorder, hooks)
        self._layers = 0
        engine = DecodeEngine
        hooks.wrap(engine, "connect", "buffer", before=self._connect)
        hooks.wrap(engine, "start", "request", before=self._start)
        hooks.wrap(engine, "announce", "receive", before=self._announce)
        hooks.wrap(engine, "handle", "order", before=self._handle)
        hooks.wrap(engine, "arrived", "completion", before=self._arrived)
        hooks.wrap(engine, "abort", "completion", before=self._abort)
        hooks.wrap(engine, "tell_abort", "completion", before=self._tell_abort)
        hooks.wrap(engine, "release", "request", before=self._release)
        hooks.wrap(engine, "append", "snapshot", after=self._append)
        hooks.wrap(engine, "read", "read", around=self._read)
        hooks.wrap(engine, "hand_back", "order", before=self._hand_back)
        recorder.hook(_TOP_K, "top-k")
        self._later: queue.SimpleQueue[tuple[int, Sequence, tuple[int, ...]] | None] = queue.SimpleQueue()
        self._held: dict[tuple[int, int], Sequence] = {}
        # Held while LT copies a request's pages, and for a moment when pages are given back.
        self._copying = threading.Lock()
        self._thread = threading.Thread(target=self._look_later, name="lab-capture-later", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """End the thread that looks later."""
        self._later.put(None)
        self._thread.join(timeout=5)

    def _connect(self, engine: DecodeEngine, *_: Any) -> None:
        self.buffers(engine)
        self._layers = engine.pool.layers

    def _start(self, _: DecodeEngine, sequence: Sequence) -> None:
        self._request(sequence, "start")

    def _request(self, sequence: Sequence, phase: str) -> None:
        self.recorder.emit(
            Request(sequence.room, sequence.attempt, phase, tokens=sequence.tokens, rows=sequence.prompt_rows)
        )

    def _prompt(self, stage: str, moment: str, sequence: Sequence) -> None:
        for layer in range(self._layers):
            self._sent(stage, moment, layer, sequence)

    def _sent(self, stage: str, moment: str, layer: int, sequence: Sequence) -> None:
        """A look at the pages that are sent: a prefix that is shared came for another request."""
        self.look(
            stage, moment, layer, sequence.prompt_pages[sequence.shared :], room=sequence.room,
            attempt=sequence.attempt, rows=sequence.prompt_rows, logical=sequence.shared,
        )  # fmt: skip

    # -- the protocol with prefill -------------------------------------------------------------------------------

    def _announce(self, engine: DecodeEngine, sequence: Sequence) -> None:
        self._prompt("RC", "before", sequence)
        buffers = np.arange(self._layers, dtype=np.int64)
        lengths = np.full(self._layers, engine.pool.item_length(), np.int64)
        shared = sequence.shared
        self.recorder.emit(
            Receive(sequence.room, sequence.attempt, shared, sequence.prompt_pages[shared:], buffers, lengths)
        )
        self.recorder.tail("announce", _key(sequence))

    def _handle(self, engine: DecodeEngine, kind: str, body: Any) -> None:
        if kind in ("status", "ack"):
            key = f"{body['room']}.{body['attempt']}"
            self.recorder.head(kind, key)
            if kind == "ack":
                self.recorder.emit(
                    TransferState("acknowledged", room=body["room"], attempt=body["attempt"], agent="decode")
                )
        elif kind == "step":
            self.recorder.head("queue", f"decode.step.{body.number}")

    def _arrived(self, _: DecodeEngine, sequence: Sequence) -> None:
        room, attempt = sequence.key
        self.recorder.emit(TransferState("arrived", room=room, attempt=attempt, agent="decode"))
        self._prompt("RC", "", sequence)
        self._request(sequence, "arrived")
        self._held[sequence.key] = sequence
        key = f"decode.later.{_key(sequence)}"
        self.recorder.tail("queue", key)
        due = time.monotonic_ns() + self.recorder.options.later_ms * 1_000_000
        self._later.put((due, sequence, sequence.key))

    def _abort(self, _: DecodeEngine, sequence: Sequence) -> None:
        if sequence.state not in ("aborting", "over"):
            self._request(sequence, "abort")

    def _tell_abort(self, _: DecodeEngine, sequence: Sequence) -> None:
        room, attempt = sequence.key
        self.recorder.emit(TransferState("aborted", room=room, attempt=attempt, agent="decode"))
        self.recorder.tail("abort", _key(sequence))

    def _release(self, _: DecodeEngine, sequence: Sequence, reason: str) -> None:
        with self._copying:
            held = self._held.pop(sequence.key, None)
        if held is not None:
            # The last look while the request still owns its pages: what landed after its first read is seen here.
            self._prompt("LT", "end", sequence)
        if reason != "abort":
            self._request(sequence, reason)

    # -- a little later ------------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        while (item := self._later.get()) is not None:
            due, sequence, key = item
            pause = (due - time.monotonic_ns()) / 1e9
            if pause > 0:
                time.sleep(pause)
            with self.recorder.guard("lab.later"):
                self.recorder.head("queue", f"decode.later.{_key(sequence)}")
                for layer in range(self._layers):
                    # Only while the request holds the pages: a copy of one layer is what a release may wait for.
                    with self._copying:
                        if self._held.get((key[0], key[1])) is not sequence:
                            break
                        self._sent("LT", "", layer, sequence)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _append(self, _: None, engine: DecodeEngine, batch: StoreBatch) -> None:
        rows = engine.layout.rows
        for part in batch.parts:
            if part.room < 0:
                continue  # padding
            page = part.slots // rows
            self.look(
                "ST", "", batch.layer, page, room=part.room, attempt=part.attempt,
                rows=int(part.logical_rows[-1]) + 1, logical=int(part.logical_rows[0]) // rows, step=batch.step,
            )  # fmt: skip

    def _read(
        self, original: Callable[..., ReadResult], engine: DecodeEngine, step: Step, batch: ReadBatch
    ) -> ReadResult:
        name = "lab.DecodeEngine.read"
        tables: list[I64] = []
        sampled: list[int] = []
        with self.recorder.guard(name):
            counts = -(-batch.rows // engine.layout.rows)
            tables = [row[:count].copy() for row, count in zip(batch.table, counts.tolist(), strict=True)]
            sampled = self._sampled(step)
            self._bracket("before", batch, tables, sampled)
        mark = self.recorder.mark()
        result = original(engine, step, batch)
        with self.recorder.guard(name):
            chosen = set(sampled)
            for i, (room, attempt) in enumerate(batch.rooms):
                rows = int(batch.rows[i])
                more: dict[str, Any] = {}
                if i in chosen:
                    more = {
                        "query": batch.query[i].reshape(-1),
                        "weights": batch.weights[i],
                        "logits": result.logits[i, :rows],
                        "top_k": result.top_k[i],
                    }
                    self.recorder.fired(_TOP_K)
                after = batch.table[i, : len(tables[i])]
                read = Read(
                    room,
                    attempt,
                    batch.layer,
                    batch.step,
                    rows,
                    tables[i],
                    after,
                    batch.k,
                    result.kernels[i],
                    **more,
                )
                self.recorder.emit(read, mark)
            self._bracket("after", batch, tables, sampled)
        return result

    def _sampled(self, step: Step) -> list[int]:
        """Rows of the batch that are recorded with bytes: a request's first read and every Nth after it."""
        every = self.recorder.options.read_every
        lengths = step.tokens.tolist()
        return [i for i, s in enumerate(step.sequences) if (lengths[i] - s.tokens - 1) % every == 0]

    def _bracket(self, moment: str, batch: ReadBatch, tables: list[I64], sampled: list[int]) -> None:
        for i in sampled:
            room, attempt = batch.rooms[i]
            self.look(
                "RD", moment, batch.layer, tables[i], room=room, attempt=attempt, rows=int(batch.rows[i]),
                step=batch.step,
            )  # fmt: skip

    def _hand_back(self, _: DecodeEngine, step: Step) -> None:
        self.recorder.tail("queue", f"decode.step.{step.number}")


def _key(sequence: Sequence) -> str:
    return f"{sequence.room}.{sequence.attempt}"
