"""The prefill side: requests and their chunks as the scheduler decides them, and the end of each request.

The threads are the scheduler (it decides a chunk, names source pages and puts it into a queue), a transfer worker (it
tells how a request's transfer ended; what it posts is in ``worker``) and the bootstrap thread (it reads what decode
tells).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang import keys
from capture_hooks.adapters.sglang.requests import FAILED, SUCCESS, Held
from capture_hooks.adapters.sglang.versions import COMMON, MOONCAKE, NIXL, Target, at, only
from capture_hooks.adapters.sglang.waits import Watched
from capture_hooks.adapters.sglang.worker import Chunk, pages_of
from capture_hooks.events import Request

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

_PREFILL = ("prefill",)

HOOKS: tuple[Target, ...] = (
    Target(
        "CommonKVSender.__init__",
        "request",
        at(COMMON, "CommonKVSender.__init__"),
        _PREFILL,
        ("bootstrap_room",),
    ),
    Target(
        "CommonKVSender.send",
        "event",
        only("0.5.23", COMMON, "CommonKVSender.send") | only("0.5.16", NIXL, "NixlKVSender.send"),
        _PREFILL,
        ("kv_indices",),
    ),
    Target(
        "CommonKVSender.poll",
        "order",
        only("0.5.23", COMMON, "CommonKVSender.poll") | only("0.5.16", NIXL, "NixlKVSender.poll"),
        _PREFILL,
    ),
    Target("CommonKVSender.abort", "request", at(COMMON, "CommonKVSender.abort"), _PREFILL),
    Target("CommonKVSender.clear", "request", at(COMMON, "CommonKVSender.clear"), _PREFILL),
    Target("TransferInfo.from_zmq", "order", at(NIXL, "TransferInfo.from_zmq"), _PREFILL, ("msg",)),
    Target(
        "MooncakeTransferInfo.from_zmq", "order", at(MOONCAKE, "TransferInfo.from_zmq"), _PREFILL, ("msg",)
    ),
    Target(
        "NixlKVManager.add_transfer_request",
        "order",
        at(NIXL, "NixlKVManager.add_transfer_request"),
        _PREFILL,
        ("bootstrap_room", "kv_indices", "index_slice", "is_last_chunk"),
    ),
    Target(
        "MooncakeKVManager.add_transfer_request",
        "order",
        at(MOONCAKE, "MooncakeKVManager.add_transfer_request"),
        _PREFILL,
        ("bootstrap_room", "kv_indices", "index_slice", "is_last_chunk"),
    ),
    Target(
        "NixlKVManager._await_handles",
        "completion",
        only("0.5.23", NIXL, "NixlKVManager._await_handles"),
        _PREFILL,
        ("handles",),
    ),
    Target(
        "CommonKVManager.conclude_transfer",
        "completion",
        only("0.5.23", COMMON, "CommonKVManager.conclude_transfer"),
        _PREFILL,
        ("bootstrap_room", "status"),
    ),
    Target(
        "CommonKVManager.send_kv_status_message",
        "order",
        only("0.5.23", COMMON, "CommonKVManager.send_kv_status_message"),
        _PREFILL,
        ("targets", "bootstrap_room", "status"),
    ),
    Target(
        "NixlKVManager._handle_abort_notification",
        "request",
        at(NIXL, "NixlKVManager._handle_abort_notification"),
        _PREFILL,
        ("msg",),
    ),
    Target(
        "CommonKVManager._send_abort_ack",
        "order",
        only("0.5.23", COMMON, "CommonKVManager._send_abort_ack"),
        _PREFILL,
        ("room", "target"),
    ),
)


class PrefillHooks:
    """Hooks of the prefill side."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        self._local = threading.local()
        self._numbers: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._concluded: set[str] = set()
        wrap = session.patches.wrap
        wrap("CommonKVSender.__init__", after=self._opened)
        wrap("CommonKVSender.send", before=self._sends)
        wrap("CommonKVSender.poll", after=self._polled)
        wrap("CommonKVSender.abort", before=self._aborts)
        wrap("CommonKVSender.clear", before=self._clears)
        if session.transport == "mooncake":
            wrap("MooncakeTransferInfo.from_zmq", after=self._announced)
            wrap("MooncakeKVManager.add_transfer_request", before=self._queues)
        else:
            wrap("TransferInfo.from_zmq", after=self._announced)
            wrap("NixlKVManager.add_transfer_request", before=self._queues)
            wrap("NixlKVManager._await_handles", after=self._settled)
            wrap("NixlKVManager._handle_abort_notification", before=self._abort_read)
        wrap("CommonKVManager.conclude_transfer", before=self._concludes, after=self._has_concluded)
        wrap("CommonKVManager.send_kv_status_message", before=self._tells)
        wrap("CommonKVManager._send_abort_ack", before=self._acknowledges)

    # -- the scheduler -------------------------------------------------------------------------------------------

    def _opened(self, _: None, sender: Any, /, *__: Any, **___: Any) -> None:
        held = self._session.requests.open(int(sender.bootstrap_room))
        self._recorder.emit(Request(held.room, held.attempt, "start"))

    def _held(self, room: Any) -> Held | None:
        return self._session.requests.of_room(int(room))

    def _sends(self, sender: Any, *_: Any, **keywords: Any) -> None:
        """The event belongs to the next chunk alone. Version 0.5.16 leaves it on the sender: it counts once."""
        event = getattr(sender, "_early_send_wait_event", None)
        last = getattr(self._local, "last_event", None)
        self._local.event = event if event is not None and event is not last else None
        self._local.last_event = event
        self._local.tokens = keywords.get("num_kv_tokens")

    def _queues(
        self, manager: Any, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool,
        *_: Any, **keywords: Any,
    ) -> None:  # fmt: skip
        held = self._held(bootstrap_room)
        infos = manager.transfer_infos.get(bootstrap_room)
        event, self._local.event = getattr(self._local, "event", None), None
        if held is None or not infos:
            return
        event = keywords.get("wait_event") or event
        if not held.fixed:
            held.fixed = True
            if not held.agreed:  # no announcement was seen though there was one: count what is here
                self._session.requests.announce(held)
        number = self._numbers[held.key] = self._numbers.get(held.key, -1) + 1
        page_tokens = self._session.buffers.page_tokens or int(manager.kv_args.page_size)
        prefix = max(int(getattr(info, "decode_prefix_len", 0) or 0) for info in infos.values())
        start = int(index_slice.start or 0)
        pages = pages_of(kv_indices, keywords.get("indices_event"))
        chunk = Chunk(
            held, number, bool(is_last_chunk), prefix // page_tokens + start, kv_indices, pages, prefix // page_tokens,
            Watched(event) if event is not None else None,
        )  # fmt: skip
        self._learn_length(chunk, prefix, page_tokens)
        for agent in infos:
            self._session.head("announce", keys.announce(held, agent))
        held.over = False  # a request that was put back into the queue comes again in the same room
        steps, shared = self._session.steps, self._session.runner is not None
        if steps is not None:
            steps.passed()
            steps.sent(held, chunk.logical, pages, shared=shared)
        else:
            self._session.owners.give(held, chunk.logical, pages, shared=shared)
        self._session.worker.queue(chunk)

    def _learn_length(self, chunk: Chunk, prefix: int, page_tokens: int) -> None:
        """Where no scheduler told a request's length, its chunks add up to it."""
        held = chunk.held
        if held.tokens >= 0:
            return
        told = getattr(self._local, "tokens", None)
        tokens = len(chunk.pages) * page_tokens if told is None else int(told)
        sum_ = self._tokens[held.key] = self._tokens.get(held.key, prefix) + tokens
        if chunk.last:
            self._session.owners.told(held, sum_)
            self._recorder.emit(held.record("start"))

    def _polled(self, status: Any, sender: Any, /, *_: Any, **__: Any) -> None:
        if int(status) not in (SUCCESS, FAILED):
            return
        held = self._held(sender.bootstrap_room)
        if held is not None and held.key in self._concluded:
            self._concluded.discard(held.key)
            self._session.head("queue", keys.sent(held))

    def _aborts(self, sender: Any, *_: Any, **__: Any) -> None:
        held = self._held(sender.bootstrap_room)
        if held is not None:
            self._gives_up(held, "abort")

    def _gives_up(self, held: Held, phase: str) -> None:
        """An announcement that comes from now on is for another attempt. One that decode never announced is not told:
        its number is still the next one's.
        """
        held.fixed = True
        if held.agreed:
            self._recorder.emit(Request(held.room, held.attempt, phase))

    def _clears(self, sender: Any, *_: Any, **__: Any) -> None:
        """The scheduler is done with the request; its pages are given back now or were before."""
        held = self._held(sender.bootstrap_room)
        if held is None:
            return
        failed = int(sender.kv_mgr.request_status.get(sender.bootstrap_room, FAILED)) == FAILED
        held.fixed = True
        if not failed:
            self._recorder.emit(Request(held.room, held.attempt, "finish"))
        self._session.owners.over(held)
        for table in (self._numbers, self._tokens):
            table.pop(held.key, None)
        self._concluded.discard(held.key)
        self._session.request_over()

    # -- the end of a transfer, on its worker ---------------------------------------------------------------------

    def _settled(self, *_: Any, **__: Any) -> None:
        """The wire's own hooks tell what became of each transfer; that this one is passed is what counts."""

    def _concludes(self, manager: Any, *, bootstrap_room: int, **_: Any) -> None:
        held = self._held(bootstrap_room)
        if held is not None and bootstrap_room in manager.request_status:
            self._concluded.add(held.key)
            self._session.tail("queue", keys.sent(held))

    def _has_concluded(self, status: Any, _: Any, /, *, bootstrap_room: int, **__: Any) -> None:
        held = self._held(bootstrap_room)
        if held is not None and status is not None and int(status) == FAILED:
            self._gives_up(held, "fail")

    def _tells(self, manager: Any, *, targets: Any, bootstrap_room: int, status: Any, **_: Any) -> None:
        held = self._held(bootstrap_room)
        if held is not None and int(status) == SUCCESS:
            rank = int(manager._prefill_unique_rank())
            for address, port in targets:
                self._session.tail("status", keys.status(held, address, port, rank))

    # -- the bootstrap thread ------------------------------------------------------------------------------------

    def _abort_read(self, _: Any, msg: Any, *__: Any, **___: Any) -> None:
        """``[b"ABORT", room, address, port, ...]``; every other message goes through here as well."""
        if not msg or bytes(msg[0]) != b"ABORT":
            return
        held = self._held(int(bytes(msg[1])))
        if held is not None:
            if len(msg) > 3 and held.agreed:
                self._session.head("abort", keys.abort(held, bytes(msg[2]).decode(), int(bytes(msg[3]))))
            self._gives_up(held, "abort")

    def _announced(self, info: Any, *_: Any, **__: Any) -> None:
        name = getattr(info, "agent_name", None) or getattr(info, "mooncake_session_id", "")
        held = self._session.requests.announced(int(info.room), keys.peer(name))
        if held is not None:
            self._recorder.emit(held.record("start"))

    def _acknowledges(self, manager: Any, room: int, target: Any, *__: Any, **___: Any) -> None:
        held = self._session.requests.last_of(int(room))
        if held is not None:
            rank = int(manager._prefill_unique_rank())
            self._session.tail("ack", keys.acknowledge(held, target.ip, target.port, rank))


def install(session: Session) -> None:
    """Hook the prefill side."""
    if session.role == "prefill":
        PrefillHooks(session)
