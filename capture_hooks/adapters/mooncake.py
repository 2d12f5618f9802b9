"""Mooncake at the wire level: blocks that an engine moves, told as the NIXL adapter tells its posts.

Mooncake's transfer call returns when the bytes have been moved, so a post and its end are seen by one thread. The
call itself is hooked by the engine's plug-in, which hands it to :meth:`MooncakeAdapter.transfer`. Not proven against
the real library: nothing here has run with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from capture_hooks.adapters.posts import Look, Post, tell_post, tell_state
from capture_hooks.events import Registration
from capture_hooks.recorder import Recorder

#: Where the recorder's guard counts failures of these bodies.
_GUARD = "mooncake.transfer"


class MooncakeAdapter:
    """Transfers of one process; ``before_post`` and ``after_state`` are as on ``NixlAdapter``."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.before_post: list[Look] = []
        self.after_state: list[Look] = []
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
        table = np.array(blocks, np.uint64).reshape(-1, 3)
        post = Post(
            agent, peer, "WRITE", table[:, [0, 2]], table[:, [1, 2]], b"", next(self._ids),
            self.recorder.current(), "posted",
        )  # fmt: skip
        tell_post(self.recorder, post, self.before_post, "mooncake.before_post")
        tell_state(self.recorder, post, "posted", "", ())
        return post

    def _over(self, post: Post | None, state: str, detail: str) -> None:
        if post is None:
            return
        with self.recorder.guard(_GUARD):
            tell_state(self.recorder, post, state, detail, self.after_state)
