"""The decode side: pages announced, reception complete, admission, aborts and the release that waits for them.

The threads are the scheduler and a listener that reads what prefill tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from capture_hooks.adapters.sglang import keys
from capture_hooks.adapters.sglang.requests import FAILED, SUCCESS, Held
from capture_hooks.adapters.sglang.versions import COMMON, NIXL, Target, at, only
from capture_hooks.events import Receive, Request, TransferState

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

_DECODE = ("decode",)
_SCHEDULER = "disaggregation.decode"

HOOKS: tuple[Target, ...] = (
    Target(
        "CommonKVReceiver.__init__",
        "request",
        at(COMMON, "CommonKVReceiver.__init__"),
        _DECODE,
        ("bootstrap_room",),
    ),
    Target(
        "CommonKVReceiver.send_metadata",
        "receive",
        only("0.5.23", COMMON, "CommonKVReceiver.send_metadata")
        | only("0.5.16", NIXL, "NixlKVReceiver.send_metadata"),
        _DECODE,
        ("kv_indices", "decode_prefix_len"),
    ),
    Target(
        "CommonKVReceiver.poll",
        "completion",
        only("0.5.23", COMMON, "CommonKVReceiver.poll") | only("0.5.16", NIXL, "NixlKVReceiver.poll"),
        _DECODE,
    ),
    Target("CommonKVReceiver.abort", "request", at(COMMON, "CommonKVReceiver.abort"), _DECODE),
    Target("CommonKVReceiver.clear", "request", at(COMMON, "CommonKVReceiver.clear"), _DECODE),
    Target(
        "CommonKVReceiver._send_abort_notification",
        "request",
        at(COMMON, "CommonKVReceiver._send_abort_notification"),
        _DECODE,
    ),
    Target(
        "CommonKVManager.apply_prefill_status",
        "completion",
        only("0.5.23", COMMON, "CommonKVManager.apply_prefill_status"),
        _DECODE,
        ("bootstrap_room", "status", "prefill_rank"),
    ),
    Target(
        "CommonKVManager.note_abort_ack",
        "order",
        only("0.5.23", COMMON, "CommonKVManager.note_abort_ack"),
        _DECODE,
        ("bootstrap_room", "prefill_rank"),
    ),
    Target(
        "DecodeTransferQueue._commit_transfer_to_req",
        "request",
        at(_SCHEDULER, "DecodeTransferQueue._commit_transfer_to_req"),
        _DECODE,
        ("decode_req",),
    ),
    Target(
        "SchedulerDisaggregationDecodeMixin._verify_kv_checksums",
        "snapshot",
        only("0.5.23", _SCHEDULER, "SchedulerDisaggregationDecodeMixin._verify_kv_checksums"),
        _DECODE,
        ("batch",),
    ),
    Target(
        "DecodeTransferQueue._defer_release",
        "request",
        only("0.5.23", _SCHEDULER, "DecodeTransferQueue._defer_release"),
        _DECODE,
        ("decode_req",),
    ),
    Target(
        "DecodeTransferQueue._do_release",
        "request",
        only("0.5.23", _SCHEDULER, "DecodeTransferQueue._do_release"),
        _DECODE,
        ("decode_req",),
    ),
)


class DecodeHooks:
    """Hooks of the decode side."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        wrap = session.patches.wrap
        wrap("CommonKVReceiver.__init__", after=self._opened)
        wrap("CommonKVReceiver.send_metadata", before=self._announces)
        wrap("CommonKVReceiver.poll", after=self._polled)
        wrap("CommonKVReceiver.abort", before=self._aborts)
        wrap("CommonKVReceiver.clear", before=self._clears)
        wrap("CommonKVReceiver._send_abort_notification", before=self._tells_abort)
        wrap("CommonKVManager.apply_prefill_status", before=self._status)
        wrap("CommonKVManager.note_abort_ack", before=self._acknowledged)
        wrap("DecodeTransferQueue._commit_transfer_to_req", after=self._committed)
        wrap("SchedulerDisaggregationDecodeMixin._verify_kv_checksums", before=self._admitted)
        wrap("DecodeTransferQueue._defer_release", before=self._defers)
        wrap("DecodeTransferQueue._do_release", before=self._releases)

    def _held(self, room: Any) -> Held | None:
        return None if room is None else self._session.requests.of_room(int(room))

    # -- the scheduler -------------------------------------------------------------------------------------------

    def _opened(self, _: None, receiver: Any, /, *__: Any, **___: Any) -> None:
        held = self._session.requests.open(int(receiver.bootstrap_room))
        self._recorder.emit(Request(held.room, held.attempt, "start"))

    def _announces(
        self, receiver: Any, kv_indices: Any, aux_index: Any = None, state_indices: Any = None,
        decode_prefix_len: Any = None, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        held = self._held(receiver.bootstrap_room)
        if held is None:
            return
        if self._session.steps is not None:
            self._session.steps.passed()
        manager = receiver.kv_mgr
        page_tokens = self._session.buffers.page_tokens or int(manager.kv_args.page_size)
        logical = int(decode_prefix_len or 0) // page_tokens
        self._session.requests.announce(held)
        pages = np.asarray(kv_indices, np.int64).copy()
        self._session.owners.give(held, logical, pages)
        held.received.update(range(logical, logical + len(pages)))
        self._session.looks.look("RC", "before", held, pages, logical, rows=held.rows)
        told = dict(zip(manager.kv_args.kv_data_ptrs, manager.kv_args.kv_item_lens, strict=False))
        for pointers, lengths in zip(
            getattr(manager.kv_args, "state_data_ptrs", ()) or (),
            getattr(manager.kv_args, "state_item_lens", ()) or (),
            strict=False,
        ):
            told |= dict(zip(pointers, lengths, strict=False))
        # A judged buffer that the transfer was never told of should be filled all the same: its item length is 0.
        judged = self._session.buffers.judged
        self._recorder.emit(
            Receive(
                held.room,
                held.attempt,
                logical,
                pages,
                np.array([b.number for b in judged], np.int64),
                np.array([int(told.get(b.address, 0)) for b in judged], np.int64),
            )
        )
        self._session.tail("announce", keys.announce(held, keys.agent(manager)))

    def _polled(self, status: Any, receiver: Any, /, *_: Any, **__: Any) -> None:
        if int(status) != SUCCESS:
            return
        held = self._held(receiver.bootstrap_room)
        if held is None or held.arrived:
            return
        held.arrived = True
        for rank in held.ranks:
            self._session.head("queue", keys.told(held, rank))
        self._recorder.emit(TransferState("arrived", room=held.room, attempt=held.attempt))
        self._arrived_request(held)
        self._look(held, "RC")
        self._later(held)

    def _arrived_request(self, held: Held) -> None:
        self._recorder.emit(held.record("arrived"))

    def _look(self, held: Held, stage: str, moment: str = "") -> None:
        places = sorted(held.received)
        self._session.looks.look(stage, moment, held, [held.pages[p] for p in places], places, rows=held.rows)

    def _later(self, held: Held) -> None:
        self._session.tail("queue", keys.later(held, "arrived"))

        def look() -> bool:
            with held.lock:
                if self._session.requests.holds(held):
                    self._session.head("queue", keys.later(held, "arrived"))
                    self._look(held, "LT")
            return False

        self._session.looks.later(self._recorder.options.later_ms / 1000, look)

    def _aborts(self, receiver: Any, *_: Any, **__: Any) -> None:
        held = self._held(receiver.bootstrap_room)
        if held is not None and held.agreed:  # else nobody was told of it: its number is still the next one's
            self._recorder.emit(Request(held.room, held.attempt, "abort"))

    def _clears(self, receiver: Any, *_: Any, **__: Any) -> None:
        """A request that never announced pages is over; all others are when their pages are given back."""
        held = self._held(receiver.bootstrap_room)
        if held is not None and not held.pages:
            self._session.owners.over(held)

    def _tells_abort(self, receiver: Any, *_: Any, **__: Any) -> None:
        held = self._held(receiver.bootstrap_room)
        if held is not None and held.agreed:
            manager = receiver.kv_mgr
            self._recorder.emit(TransferState("aborted", room=held.room, attempt=held.attempt))
            self._session.tail("abort", keys.abort(held, manager.local_ip, manager.rank_port))

    def _committed(self, _: Any, __: Any, /, decode_req: Any, *___: Any, **____: Any) -> None:
        """The transfer is committed: the request enters a batch next, unless its metadata was another's."""
        req = decode_req.req
        held = self._held(getattr(req, "bootstrap_room", None))
        if held is None or type(getattr(req, "finished_reason", None)).__name__ == "FINISH_ABORT":
            return
        if held.tokens != len(req.origin_input_ids):
            self._session.owners.told(held, len(req.origin_input_ids))
            self._arrived_request(held)

    def _admitted(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """Just before the first step of decode. A retracted request comes here again; its pages were read by then."""
        for req in batch.reqs:
            held = self._held(getattr(req, "bootstrap_room", None))
            if held is not None and not held.admitted:
                held.admitted = True
                self._look(held, "LT")

    def _defers(self, _: Any, decode_req: Any, *__: Any, **___: Any) -> None:
        held = self._held(decode_req.req.bootstrap_room)
        if held is not None:
            held.ending = "abort, deferred"

    def _releases(self, queue: Any, decode_req: Any, *_: Any, **__: Any) -> None:
        held = self._held(decode_req.req.bootstrap_room)
        if held is not None and held.ending:
            held.ending = "abort, acknowledged" if held.acknowledged else "abort, not acknowledged in time"

    # -- the listener --------------------------------------------------------------------------------------------

    def _status(self, manager: Any, *, bootstrap_room: int, status: Any, prefill_rank: int, **_: Any) -> None:
        held = self._held(bootstrap_room)
        if held is None or bootstrap_room not in manager.request_status:
            return
        if int(status) == SUCCESS:
            rank = int(prefill_rank)
            self._session.head("status", keys.status(held, manager.local_ip, manager.rank_port, rank))
            held.ranks.append(rank)  # in the tables before the status is: the scheduler looks after it
            self._session.tail("queue", keys.told(held, rank))
        elif int(status) == FAILED:
            self._recorder.emit(Request(held.room, held.attempt, "fail"))

    def _acknowledged(self, manager: Any, bootstrap_room: int, prefill_rank: int, *_: Any, **__: Any) -> None:
        held = self._session.requests.last_of(int(bootstrap_room))
        if held is not None:
            held.acknowledged = True
            key = keys.acknowledge(held, manager.local_ip, manager.rank_port, int(prefill_rank))
            self._session.head("ack", key)
            self._recorder.emit(
                TransferState(
                    "acknowledged",
                    room=held.room,
                    attempt=held.attempt,
                    detail=f"prefill rank {prefill_rank}",
                )
            )


def install(session: Session) -> None:
    """Hook the decode side."""
    if session.role == "decode":
        DecodeHooks(session)
