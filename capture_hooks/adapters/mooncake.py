"""Mooncake at the wire level: blocks that an engine moves, told as the NIXL adapter tells its posts.

Mooncake's transfer call returns when the bytes have been moved, so a post and its end are seen by one thread. The
call itself is hooked by the engine's plug-in, which hands it to :meth:`MooncakeAdapter.transfer`. Not proven against
the real library: nothing here has run with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from capture_hooks.adapters.nixl import Post
from capture_hooks.events import Registration, Send, TransferState
from capture_hooks.recorder import Recorder

#: Where the recorder's guard counts failures of these bodies.
_GUARD = "mooncake.transfer"


class MooncakeAdapter:
    """Transfers of one process; ``before_post`` and ``after_state`` are as on ``NixlAdapter``."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.before_post: list[Callable[[Post], None]] = []
        self.after_state: list[Callable[[Post], None]] = []
        self._ids = itertools.count()

    def registered(self, agent: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Memory ranges (address, length) were made known to the library."""
        for address, length in ranges:
            self.recorder.emit(Registration(agent, int(address), int(length), 0, "VRAM"))

    def transfer(
        self, call: Callable[[], int], agent: str, peer: str, blocks: Sequence[tuple[int, int, int]]
    ) -> int:
        """Move ``blocks`` (source address, destination address, length) by ``call``, which returns 0 on success."""
        post: Post | None = None
        with self.recorder.guard(_GUARD):
            post = self._posting(agent, peer, blocks)
        try:
            code = call()
        except BaseException as error:
            self._over(post, "error", type(error).__name__)
            raise
        self._over(post, "done" if code == 0 else "error", "" if code == 0 else f"code {code}")
        return code

    def _posting(self, agent: str, peer: str, blocks: Sequence[tuple[int, int, int]]) -> Post:
        about = self.recorder.current()
        table = np.array(blocks, np.uint64).reshape(-1, 3)
        post = Post(
            agent, peer, "WRITE", table[:, [0, 2]], table[:, [1, 2]], b"", next(self._ids), about, "posted"
        )
        more: dict[str, Any] = dict(about.more) if about is not None else {}
        written = more.get("written", -1)
        # Asked first: if it says "finished", everything that looks at the source from here on sees all of it.
        written = written() if callable(written) else written
        for look in self.before_post:
            look(post)
        self.recorder.emit(
            Send(
                post.transfer,
                about.room if about else -1,
                about.attempt if about else 0,
                about.chunk if about else -1,
                about.last if about else False,
                agent,
                peer,
                "WRITE",
                int(written),
                int(more.get("awaited", -1)),
                int(more.get("logical", -1)),
                np.asarray(more.get("pages", ()), np.int64),
                np.asarray(more.get("destination_pages", ()), np.int64),
                np.asarray(more.get("item_lengths", ()), np.int64),
                post.source,
                post.destination,
            )
        )
        self._state(post, "posted")
        return post

    def _over(self, post: Post | None, state: str, detail: str) -> None:
        if post is None:
            return
        with self.recorder.guard(_GUARD):
            post.state = state
            self._state(post, state, detail)
            for look in self.after_state:
                look(post)

    def _state(self, post: Post, state: str, detail: str = "") -> None:
        about = post.about
        room, attempt = (about.room, about.attempt) if about else (-1, 0)
        self.recorder.emit(TransferState(state, post.transfer, room, attempt, post.agent, detail))
