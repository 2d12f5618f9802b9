"""Hooks as the recorder sees them: their states, their failures, and what a thread is working on."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from capture_hooks.events import Hook

_log = logging.getLogger("kv_replay")


@dataclass(frozen=True, slots=True)
class About:
    """What the calling thread is working on, told by the engine's hook to hooks below it."""

    room: int
    attempt: int = 0
    chunk: int = -1
    last: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


class Scope:
    """Context manager that tells :class:`About` to this thread; scopes nest."""

    __slots__ = ("_about", "_before", "_local")

    def __init__(self, local: threading.local, about: About) -> None:
        self._local, self._about = local, about
        self._before: About | None = None

    def __enter__(self) -> About:
        self._before = getattr(self._local, "about", None)
        self._local.about = self._about
        return self._about

    def __exit__(self, *_: object) -> None:
        self._local.about = self._before


class Guard:
    """Context manager for the body of a hook: any ``Exception`` ends the body, is counted and swallowed."""

    __slots__ = ("_failed", "_name", "errors")

    def __init__(self, name: str, failed: Callable[[str, int, Exception], None]) -> None:
        self._name, self._failed = name, failed
        self.errors = 0  #: exceptions swallowed so far

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.errors += 1
        self._failed(self._name, self.errors, error)
        return True


class HookTable:
    """States and counts of the hooks of one process. ``lose`` (reason) counts a failure."""

    def __init__(self, most_errors: int, lose: Callable[[str], None]) -> None:
        self._most_errors, self._lose = most_errors, lose
        self._states: dict[str, _State] = {}
        self._guards: dict[str, Guard] = {}

    def set(self, name: str, covers: str, state: str, complete: bool, note: str) -> None:
        """State of a hook; its count is kept."""
        new = _State(covers, state, complete, note)
        old = self._states.get(name)
        if old is not None:
            new.counter, new.fired = old.counter, old.fired
        self._states[name] = new

    def incomplete(self, name: str, why: str) -> None:
        """A hook does not see every call any more; nothing changes where it is not attached."""
        state = self._states.get(name)
        if state is not None and state.state == "attached":
            state.complete, state.note = False, why

    def fired(self, name: str) -> None:
        """Count one call; unknown names are not counted."""
        state = self._states.get(name)
        if state is not None:
            # next() of a count is atomic, += is not. A thread that stops between the two tells a little late.
            state.fired = next(state.counter)

    def guard(self, name: str) -> Guard:
        """The guard of hook ``name``."""
        found = self._guards.get(name)
        return found if found is not None else self._guards.setdefault(name, Guard(name, self._failed))

    def detached(self, name: str) -> bool:
        """Whether hook ``name`` has failed too often to run on."""
        found = self._guards.get(name)
        return found is not None and found.errors >= self._most_errors

    def changes(self, timely: bool) -> list[Hook]:
        """Records that are due: at once for a new state and a first call, else when it is ``timely``."""
        return [state.record(name) for name, state in list(self._states.items()) if state.changed(timely)]

    def _failed(self, name: str, errors: int, error: Exception) -> None:
        self._lose(f"{name}: {type(error).__name__}")
        if errors == 1:
            _log.warning("kv-replay: hook %s failed; the error is ignored", name, exc_info=error)
        if errors == self._most_errors:
            _log.warning("kv-replay: hook %s failed %d times and is detached", name, errors)
            state = self._states.get(name)
            if state is not None:
                state.state, state.complete = "detached", False


class _State:
    __slots__ = ("_told", "complete", "counter", "covers", "fired", "note", "state")

    def __init__(self, covers: str, state: str, complete: bool, note: str) -> None:
        self.covers, self.state, self.complete, self.note = covers, state, complete, note
        self.counter, self.fired = itertools.count(1), 0
        self._told: tuple[tuple[object, ...], int] | None = None

    def changed(self, timely: bool) -> bool:
        state, fired = (self.covers, self.state, self.complete, self.note), self.fired
        if self._told is not None:
            same_state, told = self._told[0] == state, self._told[1]
            if same_state and (told == fired or (told and not timely)):
                return False
        self._told = state, fired
        return True

    def record(self, name: str) -> Hook:
        return Hook(name, self.covers, self.state, self.fired, self.complete, self.note)
