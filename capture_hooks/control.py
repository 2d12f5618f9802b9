"""Triggers from outside: ``trigger-*.json`` files that appear in the capture folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from capture_hooks.events import Trigger

_MAX_BYTES = 64 * 1024
_MAX_TRIES = 5


class Control:
    """Looks for trigger files that were not there when the process started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tries: dict[str, int] = {}
        self._done = set(self._names())

    def poll(self) -> list[Trigger]:
        """Triggers that are new since the last call. Files that cannot be read (yet) are tried a few times."""
        found = []
        for name in self._names():
            if name in self._done:
                continue
            trigger = self._read(name)
            self._tries[name] = self._tries.get(name, 0) + 1
            if trigger is not None or self._tries[name] >= _MAX_TRIES:
                self._done.add(name)
                del self._tries[name]
            if trigger is not None:
                found.append(trigger)
        return found

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._folder) as entries:
                return sorted(
                    e.name for e in entries if e.name.startswith("trigger-") and e.name.endswith(".json")
                )
        except OSError:
            return []

    def _read(self, name: str) -> Trigger | None:
        """A file says ``{"room": 7719, "attempt": 0}`` or ``{"rid_hash": "..."}``, and a ``reason`` if it likes."""
        try:
            with (self._folder / name).open("rb") as file:
                body = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        return Trigger(
            reason=_text(body.get("reason"), "asked"),
            room=_integer(body.get("room"), -1),
            attempt=_integer(body.get("attempt"), 0),
            rid=_text(body.get("rid_hash"), ""),
        )


def _text(value: Any, default: str) -> str:
    return value[:200] if isinstance(value, str) else default


def _integer(value: Any, default: int) -> int:
    usable = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if usable else default
