"""Posts of the TCP transport, told as the NIXL adapter tells its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from capture_hooks.adapters.posts import Look, Post, tell_post, tell_state
from capture_hooks.events import Registration
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks
from replay.lab.tcp_transport import TcpTransport
from replay.lab.transport import Slice, Transfer


class TcpHooks:
    """Hooks on :class:`TcpTransport`; ``before_post`` and ``after_state`` are those of ``NixlAdapter``."""

    def __init__(self, recorder: Recorder, hooks: Hooks) -> None:
        self.recorder = recorder
        self.before_post: list[Look] = []
        self.after_state: list[Look] = []
        self._ids = itertools.count()
        self._flying: dict[int, Post] = {}
        hooks.wrap(TcpTransport, "describe", "registration", after=self._describe)
        hooks.wrap(TcpTransport, "begin", "send", around=self._begin)
        hooks.wrap(TcpTransport, "poll", "completion", after=self._poll)

    def _describe(self, _: dict[str, Any], transport: TcpTransport) -> None:
        memory = transport.memory
        self.recorder.emit(Registration(transport.role, int(memory.ctypes.data), int(memory.nbytes)))

    def _begin(
        self, original: Callable[..., int], transport: TcpTransport, transfer: Transfer, part: Slice
    ) -> int:
        post: Post | None = None
        with self.recorder.guard("lab.TcpTransport.begin"):
            post = self._posting(transport, part)
        try:
            handle = original(transport, transfer, part)
        except Exception:
            with self.recorder.guard("lab.TcpTransport.begin"):
                if post is not None:
                    self._state(post, "error")
            raise
        with self.recorder.guard("lab.TcpTransport.begin"):
            if post is not None:
                self._flying[handle] = post
                self._state(post, "posted")
        return handle

    def _posting(self, transport: TcpTransport, part: Slice) -> Post:
        about = self.recorder.current()
        lengths = np.full(len(part.source), part.length, np.uint64)
        post = Post(
            transport.role, "decode", "WRITE", np.stack([part.source, lengths], 1),
            np.stack([part.destination, lengths], 1), b"", next(self._ids), about,
        )  # fmt: skip
        if about is not None:
            tell_post(self.recorder, post, self.before_post, "lab.TcpTransport.before_post")
        return post

    def _poll(self, state: str, _: TcpTransport, handle: int) -> None:
        if state != "active" and handle in self._flying:
            self._state(self._flying.pop(handle), "done" if state == "done" else "error")

    def _state(self, post: Post, state: str) -> None:
        tell_state(self.recorder, post, state, "", self.after_state)
