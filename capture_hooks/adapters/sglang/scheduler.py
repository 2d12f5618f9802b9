"""What the scheduler knows of requests: their ids and lengths, and pages given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang.requests import Held, room_of, row_of
from capture_hooks.adapters.sglang.versions import Target, at
from capture_hooks.events import Request
from capture_hooks.rid import rid_hash

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

HOOKS: tuple[Target, ...] = (
    Target(
        "PrefillBootstrapQueue.create_sender",
        "request",
        at("disaggregation.prefill", "PrefillBootstrapQueue.create_sender"),
        ("prefill",),
        ("req",),
    ),
    Target(
        "DecodePreallocQueue._pre_alloc",
        "alloc",
        at("disaggregation.decode", "DecodePreallocQueue._pre_alloc"),
        ("decode",),
        ("req",),
    ),
    Target(
        "FakeKVSender.__init__",
        "request",
        at("disaggregation.fake.conn", "FakeKVSender.__init__"),
        ("prefill",),
    ),
    Target(
        "FakeKVReceiver.__init__",
        "request",
        at("disaggregation.fake.conn", "FakeKVReceiver.__init__"),
        ("decode",),
    ),
    Target("release_kv_cache", "alloc", at("mem_cache.common", "release_kv_cache"), takes=("req",)),
)

_HEALTH = "HEALTH_CHECK"


class SchedulerHooks:
    """Hooks of the scheduler, in every role."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        wrap = session.patches.wrap
        wrap("PrefillBootstrapQueue.create_sender", after=self._sender_made)
        wrap("DecodePreallocQueue._pre_alloc", after=self._pre_allocated)
        wrap("FakeKVSender.__init__", after=self._fake)
        wrap("FakeKVReceiver.__init__", after=self._fake)
        wrap("release_kv_cache", before=self._released)

    def of(self, req: Any) -> Held | None:
        """What is known of a scheduler's request; in a plain server it is opened here."""
        room = room_of(req)
        held = self._session.requests.of_room(room)
        if held is None and self._session.role == "server":
            held = self._session.requests.open(room, local=True)
            self._learn(held, req)
        return held

    def _learn(self, held: Held, req: Any) -> None:
        rid = str(getattr(req, "rid", ""))
        held.rid = rid_hash(rid)
        if not held.mark and rid.startswith(_HEALTH):
            held.mark = "health"
        held.req_pool_idx, held.generation = self._session.table_rows.of(req)
        self._session.owners.told(held, len(req.origin_input_ids))
        self._recorder.emit(held.record("start"))

    def placed(self, held: Held, req: Any) -> None:
        """A pass of ``req`` begins: it has a row by now, which is told where it is news."""
        found = self._session.table_rows.of(req)
        if found[0] >= 0 and found != (held.req_pool_idx, held.generation):
            held.req_pool_idx, held.generation = found
            self._recorder.emit(held.record("start"))

    def _sender_made(self, made: Any, _: Any, /, req: Any, *__: Any, **___: Any) -> None:
        held = self._session.requests.of_room(room_of(req)) if made else None
        if held is not None:
            self._learn(held, req)

    def _pre_allocated(self, _: Any, __: Any, /, req: Any, *___: Any, **____: Any) -> None:
        held = self._session.requests.of_room(room_of(req))
        if held is not None:
            self._learn(held, req)

    def _fake(self, _: None, endpoint: Any, /, *args: Any, **keywords: Any) -> None:
        """A request that moves nothing (warm-up, health check): marked, so that nobody judges it."""
        room = keywords.get("bootstrap_room", args[2] if len(args) > 2 else None)
        if room is not None:
            held = self._session.requests.open(int(room), local=True)
            held.mark = "fake"
            self._recorder.emit(Request(held.room, held.attempt, "start", mark="fake"))

    # -- pages (those of a pass are told by ``steps``) -----------------------------------------------------------

    def _released(self, req: Any, *_: Any, **__: Any) -> None:
        held = self._session.requests.of_room(room_of(req))
        if held is None or row_of(req) < 0:
            return
        if self._session.steps is not None:
            self._session.steps.passed()
        reason = held.ending or _reason(req)
        decode = self._session.role != "prefill"
        if decode and held.arrived and not held.over:
            # The last look while the request still owns its pages: what landed after its first read is seen here.
            places = sorted(held.received)
            pages = [held.pages[place] for place in places]
            self._session.looks.look("LT", "end", held, pages, places, rows=held.rows)
        self._session.owners.free(held, reason)
        if decode or held.mark:  # at prefill, all others are over when their sender is
            self._session.owners.over(held)
        if decode:
            if not reason.startswith("abort"):
                self._recorder.emit(Request(held.room, held.attempt, "finish"))
            self._session.request_over()


def _reason(req: Any) -> str:
    ended = type(getattr(req, "finished_reason", None)).__name__
    return "abort" if ended == "FINISH_ABORT" else "finish" if ended != "NoneType" else "evict"


def install(session: Session) -> None:
    """Hook the scheduler."""
    session.scheduler = SchedulerHooks(session)
