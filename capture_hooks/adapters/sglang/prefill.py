"""The prefill side: chunks from the scheduler to the wire, what was known of their source, and the end of each request.

The threads are the scheduler (it decides a chunk, names source pages and puts it into a queue), a transfer worker (it
posts the transfer and waits for it) and the bootstrap thread (it reads what decode tells).
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from capture_hooks.adapters.posts import Post
from capture_hooks.adapters.sglang import keys
from capture_hooks.adapters.sglang.requests import FAILED, SUCCESS, Held
from capture_hooks.adapters.sglang.versions import COMMON, MOONCAKE, NIXL, Target, at, only
from capture_hooks.adapters.sglang.waits import Watched
from capture_hooks.events import I64, Request

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
    Target("FastQueue.get", "order", at("disaggregation.common.utils", "FastQueue.get"), _PREFILL),
    Target(
        "NixlKVManager.send_kvcache",
        "send",
        at(NIXL, "NixlKVManager.send_kvcache"),
        _PREFILL,
        ("peer_name", "prefill_kv_indices", "dst_kv_indices"),
    ),
    Target(
        "NixlKVManager.maybe_send_extra",
        "send",
        at(NIXL, "NixlKVManager.maybe_send_extra"),
        _PREFILL,
        ("peer_name", "prefill_state_indices", "dst_state_indices"),
    ),
    Target(
        "MooncakeKVManager.add_transfer_request",
        "order",
        at(MOONCAKE, "MooncakeKVManager.add_transfer_request"),
        _PREFILL,
        ("bootstrap_room", "kv_indices", "index_slice", "is_last_chunk"),
    ),
    Target(
        "MooncakeKVManager.send_kvcache",
        "send",
        at(MOONCAKE, "MooncakeKVManager.send_kvcache"),
        _PREFILL,
        ("prefill_kv_indices", "dst_kv_indices"),
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

#: How long the end of an event is waited for, in looks a millisecond apart.
_MOST_LOOKS = 30_000


@dataclass(eq=False, slots=True)
class Chunk:
    """One chunk between the scheduler and the wire. ``indices`` is the engine's own object, by whose id it is known
    again: held here, so that no other object is given that id.

    ``pages`` are the source pages that the scheduler named; the worker may send fewer.
    """

    held: Held
    number: int
    last: bool
    logical: int
    indices: Any
    pages: I64
    prefix: int = 0  # logical pages that decode had before
    watched: Watched | None = None
    written: int = -1


class PrefillHooks:
    """Hooks of the prefill side. ``wire`` has lists ``before_post`` and ``after_state``, as ``NixlAdapter`` has."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        self._local = threading.local()
        self._chunks: dict[int, Chunk] = {}  # by id of the indices, from the scheduler to the worker
        self._numbers: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._concluded: set[str] = set()
        wrap = session.patches.wrap
        wrap("CommonKVSender.__init__", after=self._opened)
        wrap("CommonKVSender.send", before=self._sends)
        wrap("CommonKVSender.poll", after=self._polled)
        wrap("CommonKVSender.abort", before=self._aborts)
        wrap("CommonKVSender.clear", before=self._clears)
        wrap("FastQueue.get", after=self._taken)
        if session.transport == "mooncake":
            wrap("MooncakeTransferInfo.from_zmq", after=self._announced)
            wrap("MooncakeKVManager.add_transfer_request", before=self._queues)
            wrap("MooncakeKVManager.send_kvcache", around=self._posts)
        else:
            wrap("TransferInfo.from_zmq", after=self._announced)
            wrap("NixlKVManager.add_transfer_request", before=self._queues)
            wrap("NixlKVManager.send_kvcache", around=self._posts)
            wrap("NixlKVManager.maybe_send_extra", around=self._posts_states)
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
        pages = _pages(kv_indices, keywords.get("indices_event"))
        chunk = Chunk(
            held, number, bool(is_last_chunk), prefix // page_tokens + start, kv_indices, pages, prefix // page_tokens,
            Watched(event) if event is not None else None,
        )  # fmt: skip
        self._learn_length(chunk, prefix, page_tokens)
        for agent in infos:
            self._session.head("announce", keys.announce(held, agent))
        held.over = False  # a request that was put back into the queue comes again in the same room
        # Passes tell the pages of their requests, a while later. What a scheduler sends of a request before any
        # pass of it is a prefix that others stored.
        steps = self._session.steps
        if steps is not None:
            steps.passed()
        first = max(0, steps.told(held) - chunk.logical) if steps is not None else 0
        shared = self._session.runner is not None
        self._session.owners.give(held, chunk.logical + first, pages[first:], shared=shared)
        self._chunks[id(kv_indices)] = chunk
        self._session.tail("queue", keys.queued(held, number))

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
            self._recorder.emit(Request(held.room, held.attempt, "start", tokens=held.tokens, rows=held.rows))

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

    # -- a transfer worker ---------------------------------------------------------------------------------------

    def _taken(self, item: Any, /, *_: Any, **__: Any) -> None:
        chunk = self._chunks.pop(id(getattr(item, "prefill_kv_indices", None)), None)
        self._local.chunk = chunk
        if chunk is not None:
            self._session.head("queue", keys.queued(chunk.held, chunk.number))

    def _posts(self, original: Any, manager: Any, peer_name: Any, *args: Any, **keywords: Any) -> Any:
        chunk: Chunk | None = getattr(self._local, "chunk", None)
        if chunk is None:
            return original(manager, peer_name, *args, **keywords)
        about = None
        with self._recorder.guard("sglang.NixlKVManager.send_kvcache"):
            destination = keywords["dst_kv_indices"] if "dst_kv_indices" in keywords else args[2]
            if not len(chunk.pages):  # they were on their way from the device when the chunk was queued
                source = keywords["prefill_kv_indices"] if "prefill_kv_indices" in keywords else args[0]
                chunk.pages = _pages(source, None)
                self._session.owners.give(chunk.held, chunk.logical, chunk.pages, shared=True)
            args_ = manager.kv_args
            about = self._about(chunk, destination, args_.kv_data_ptrs, args_.kv_item_lens)
        if about is None:
            return original(manager, peer_name, *args, **keywords)
        with about:
            found = original(manager, peer_name, *args, **keywords)
        with self._recorder.guard("sglang.NixlKVManager.send_kvcache"):
            self._after_post(chunk)
        return found

    def _about(self, chunk: Chunk, destination: Any, pointers: Any, item_lengths: Any) -> Any:
        """What the wire is told of a chunk's transfer; its source is looked at where it carries index-K."""
        buffers = [self._session.buffers.of_address(int(pointer)) for pointer in pointers]
        carries = any(buffer is not None and buffer.judged for buffer in buffers)
        return self._recorder.about(
            chunk.held.room,
            chunk.held.attempt,
            chunk.number,
            chunk.last,
            sglang=chunk if carries else None,
            written=lambda: self._ask(chunk),
            awaited=chunk.watched.awaited if chunk.watched is not None else -1,
            logical=chunk.logical,
            pages=chunk.pages,
            destination_pages=np.asarray(destination, np.int64),
            item_lengths=np.asarray(item_lengths, np.int64),
        )

    def _posts_states(self, original: Any, manager: Any, *args: Any, **keywords: Any) -> Any:
        """Caches that travel as states, with the last chunk and for the whole request: V3.2's index-K does."""
        tell: Any = None
        with self._recorder.guard("sglang.NixlKVManager.maybe_send_extra"):
            tell = self._about_states(manager, args, keywords)
        if tell is None:
            return original(manager, *args, **keywords)
        with tell():
            found = original(manager, *args, **keywords)
        return _each(found, tell) if inspect.isgenerator(found) else found

    def _about_states(self, manager: Any, args: Any, keywords: Any) -> Any:
        chunk: Chunk | None = getattr(self._local, "chunk", None)
        if chunk is None:
            return None
        named = dict(zip(("peer", "pages", "pointers", "there"), args, strict=False))
        source = named.get("pages", keywords.get("prefill_state_indices"))
        there = named.get("there", keywords.get("dst_state_indices"))
        for number, pointers in enumerate(manager.kv_args.state_data_ptrs or ()):
            buffers = [self._session.buffers.of_address(int(pointer)) for pointer in pointers]
            if number < len(source) and any(buffer is not None and buffer.judged for buffer in buffers):
                whole = replace(
                    chunk, logical=chunk.prefix, pages=np.asarray(source[number], np.int64), watched=None
                )
                lengths = manager.kv_args.state_item_lens[number]
                return lambda: self._about(whole, there[number], pointers, lengths)
        return None

    def _ask(self, chunk: Chunk) -> int:
        """Asked just before the post: is what wrote the source pages over?"""
        if chunk.watched is not None:
            chunk.written = chunk.watched.happened()
        elif self._session.steps is not None and len(chunk.pages):
            return int(self._session.steps.written(chunk.held, chunk.logical + len(chunk.pages) - 1))
        return chunk.written

    def _after_post(self, chunk: Chunk) -> None:
        """The source was not written yet: look at it once the event that the engine made for it has happened."""
        watched, chunk.watched = chunk.watched, None
        if watched is None:
            return
        watched.release()
        if chunk.written != 0:
            return
        left = [_MOST_LOOKS]
        self._session.tail("queue", keys.later(chunk.held, f"written.{chunk.number}"))

        def look() -> bool:
            left[0] -= 1
            if not watched.happened():
                return left[0] > 0
            held = chunk.held
            with held.lock:
                if not held.over:
                    self._session.head("queue", keys.later(held, f"written.{chunk.number}"))
                    self._session.looks.look(
                        "ST", "", held, chunk.pages, chunk.logical, rows=self._rows(chunk), tap="send"
                    )
            return False

        self._session.looks.later(0.0, look)

    def _rows(self, chunk: Chunk) -> int:
        """Rows of the request that are written once this chunk is."""
        judged = self._session.buffers.judged
        rows = (chunk.logical + len(chunk.pages)) * (judged[0].rows if judged else 0)
        return min(rows, chunk.held.rows) if chunk.held.rows >= 0 else rows

    def before_post(self, post: Post) -> None:
        """The source, just before the transfer goes to the wire."""
        self._source(post, "before")

    def after_state(self, post: Post) -> None:
        """The source, once the transfer is known to be over."""
        if post.state == "done":
            self._source(post, "after")

    def _source(self, post: Post, moment: str) -> None:
        """What the wire reads. Also where the request gave its pages back meanwhile: its bytes go out all the same."""
        chunk = post.about.more.get("sglang") if post.about is not None else None
        if isinstance(chunk, Chunk) and (moment == "before" or not chunk.held.over):
            self._session.looks.look(
                "SE", moment, chunk.held, chunk.pages, chunk.logical, transfer=post.transfer
            )

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
            self._recorder.emit(
                Request(held.room, held.attempt, "start", held.rid, held.tokens, held.rows, held.mark)
            )

    def _acknowledges(self, manager: Any, room: int, target: Any, *__: Any, **___: Any) -> None:
        held = self._session.requests.last_of(int(room))
        if held is not None:
            rank = int(manager._prefill_unique_rank())
            self._session.tail("ack", keys.acknowledge(held, target.ip, target.port, rank))


def _pages(indices: Any, event: Any) -> I64:
    """Source pages as the scheduler named them; none where they are still on their way from the device."""
    if event is not None:
        return np.zeros(0, np.int64)
    return np.asarray(indices, np.int64).copy()


def _each(posts: Any, tell: Any) -> Any:
    """What a generator gives, which posts a transfer each time it is asked for more."""
    try:
        while True:
            with tell():
                try:
                    handle = next(posts)
                except StopIteration as over:
                    return over.value
            yield handle
    finally:
        posts.close()


def install(session: Session) -> None:
    """Hook the prefill side."""
    if session.role != "prefill":
        return
    hooks = PrefillHooks(session)
    wire = session.wire
    if wire is not None:
        wire.before_post.append(hooks.before_post)
        wire.after_state.append(hooks.after_state)
