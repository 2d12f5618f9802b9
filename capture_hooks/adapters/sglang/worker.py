"""The transfer worker at prefill: chunks from the queue to the wire, and what was known of their source at the post.

The call that posts a transfer does not know whose it is: the chunk that the worker took from its queue before does.
Index-K travels with the pages of the main cache (DeepSeek-V4), or with the states of a request (V3.2).
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from capture_hooks.adapters.posts import Post
from capture_hooks.adapters.sglang import keys
from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.requests import Held
from capture_hooks.adapters.sglang.versions import MOONCAKE, NIXL, Target, at
from capture_hooks.adapters.sglang.waits import Watched
from capture_hooks.events import I64

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

_PREFILL = ("prefill",)

HOOKS: tuple[Target, ...] = (
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
        "MooncakeKVManager.send_kvcache",
        "send",
        at(MOONCAKE, "MooncakeKVManager.send_kvcache"),
        _PREFILL,
        ("prefill_kv_indices", "dst_kv_indices"),
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


class WorkerHooks:
    """Hooks of the transfer workers. ``session.wire`` has lists ``before_post`` and ``after_state``, as ``NixlAdapter``
    has.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        self._local = threading.local()
        self._queued: dict[int, Chunk] = {}  # by id of the indices, from the scheduler to the worker
        wrap = session.patches.wrap
        wrap("FastQueue.get", after=self._taken)
        manager = "MooncakeKVManager" if session.transport == "mooncake" else "NixlKVManager"
        self._guard = hook_name(f"{manager}.send_kvcache")
        wrap(f"{manager}.send_kvcache", around=self._posts)
        if session.transport != "mooncake":
            wrap("NixlKVManager.maybe_send_extra", around=self._posts_states)
        if session.wire is not None:
            session.wire.before_post.append(self._before_post)
            session.wire.after_state.append(self._after_state)

    def queue(self, chunk: Chunk) -> None:
        """The scheduler puts a chunk into the queue."""
        self._queued[id(chunk.indices)] = chunk
        self._session.tail("queue", keys.queued(chunk.held, chunk.number))

    def _taken(self, item: Any, /, *_: Any, **__: Any) -> None:
        chunk = self._queued.pop(id(getattr(item, "prefill_kv_indices", None)), None)
        self._local.chunk = chunk
        if chunk is not None:
            self._session.head("queue", keys.queued(chunk.held, chunk.number))

    def _posts(self, original: Any, manager: Any, peer_name: Any, *args: Any, **keywords: Any) -> Any:
        chunk: Chunk | None = getattr(self._local, "chunk", None)
        if chunk is None:
            return original(manager, peer_name, *args, **keywords)
        about = None
        with self._recorder.guard(self._guard):
            destination = keywords["dst_kv_indices"] if "dst_kv_indices" in keywords else args[2]
            if not len(chunk.pages):  # they were on their way from the device when the chunk was queued
                source = keywords["prefill_kv_indices"] if "prefill_kv_indices" in keywords else args[0]
                chunk.pages = pages_of(source, None)
                self._session.owners.give(chunk.held, chunk.logical, chunk.pages, shared=True)
            args_ = manager.kv_args
            about = self._about(chunk, destination, args_.kv_data_ptrs, args_.kv_item_lens)
        if about is None:
            return original(manager, peer_name, *args, **keywords)
        with about:
            found = original(manager, peer_name, *args, **keywords)
        with self._recorder.guard(self._guard):
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

    def _before_post(self, post: Post) -> None:
        """The source, just before the transfer goes to the wire."""
        self._source(post, "before")

    def _after_state(self, post: Post) -> None:
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


def pages_of(indices: Any, event: Any) -> I64:
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
    """Hook the transfer workers."""
    if session.role == "prefill":
        session.worker = WorkerHooks(session)
