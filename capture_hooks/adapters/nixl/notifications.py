"""Notifications as order: each message that is sent and seen is one edge between two agents."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from capture_hooks.adapters.nixl.kept import Kept
from capture_hooks.events import Order
from capture_hooks.recorder import Recorder

#: (sender, message) -> how many of them.
Held = Counter[tuple[str, bytes]]

#: How many different messages are counted in each direction.
MOST = 131_072


class Notifications:
    """Emits the tails and heads. Counts equal messages in each direction, so that they get different keys.

    Of the messages only a digest is kept, and of the last :data:`MOST` alone. ``forgets`` is called once, when the
    first one is forgotten: a message that comes again after that many others is counted from one again.
    """

    def __init__(self, recorder: Recorder, forgets: Callable[[], None]) -> None:
        self._recorder = recorder
        self._sent: Kept[int] = Kept(MOST)
        self._seen: Kept[int] = Kept(MOST)
        self._forgets: Callable[[], None] | None = forgets
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()

    def tail(self, sender: str, receiver: str, message: bytes) -> None:
        """``sender`` is about to send ``message``."""
        self._edge("tail", self._sent, sender, receiver, message)

    def heads(self, agent: Any, messages: Iterable[tuple[str, bytes]]) -> None:
        """``agent`` was given these (sender, message)."""
        for sender, message in messages:
            self._edge("head", self._seen, sender, agent_name(agent), message)

    def held(self, agent: Any) -> Held:
        """What ``agent`` held when it was looked at last."""
        return self._held.get(id(agent), Counter())

    def look(self, agent: Any, held: Held) -> None:
        """``agent`` holds ``held`` now: heads for what it did not hold when it was looked at last."""
        self.heads(agent, (held - self.held(agent)).elements())
        self._held[id(agent)] = held

    def _edge(self, end: str, counts: Kept[int], sender: str, receiver: str, message: bytes) -> None:
        # One key for both ends. Messages are an engine's own and may hold anything, so only a digest is told.
        name = xxhash.xxh3_64_intdigest(b"\0".join([sender.encode(), receiver.encode(), message]))
        with self._lock:
            count = (counts.get(name) or 0) + 1
            counts.put(name, count)
            forgets = self._forgets if counts.forgotten else None
            if forgets is not None:
                self._forgets = None
        if forgets is not None:
            forgets()
        self._recorder.emit(Order("notify", f"{name:016x}.{count}", end))


def agent_name(agent: Any) -> str:
    """Name of a NIXL agent."""
    return text(getattr(agent, "name", ""))


def text(name: Any) -> str:
    """A name that may be bytes."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def payload(given: Any) -> bytes:
    """A message that may be text."""
    return given.encode() if isinstance(given, str) else bytes(given)


def payloads(found: dict[Any, list[Any]]) -> list[tuple[str, bytes]]:
    """(sender, message) of what an agent returns as sender -> messages."""
    return [(text(sender), payload(message)) for sender, messages in found.items() for message in messages]
