"""Named points of the engine where a test can hold a thread until something else has happened.

Without a folder every point does nothing. With one, each point that is passed leaves a flag (an empty file), and a rule
``point -> flag`` makes that point wait for the flag, or for several with ", " between them. So a test forces one
interleaving of the very code that races freely in the demo. Points are named ``place:room`` or ``place:room.chunk``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

_NAP = 0.001


class Barriers:
    """Barriers of one process."""

    def __init__(
        self, folder: str = "", rules: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> None:
        self._folder = Path(folder) if folder else None
        self._rules = dict(rules or {})
        self._timeout = timeout
        self._since: dict[str, float] = {}

    def at(self, place: str, *ids: int) -> None:
        """Pass the point ``place:ids``: wait for its flag if there is a rule, then raise its own."""
        if self._folder is None:
            return
        name = f"{place}:{'.'.join(map(str, ids))}"
        flag = self._rules.get(name)
        if flag is not None:
            self.touch(f"held {name}")
            if not self.wait(flag):
                self.touch(f"timeout {name}")
        self.touch(name)

    def open(self, place: str, *ids: int) -> bool:
        """As :meth:`at` for a thread that has other work meanwhile: whether the point was passed now."""
        if self._folder is None:
            return True
        name = f"{place}:{'.'.join(map(str, ids))}"
        flag = self._rules.get(name)
        if flag is not None and not self.up(flag):
            if name not in self._since:
                self._since[name] = time.monotonic()
                self.touch(f"held {name}")
            if time.monotonic() - self._since[name] < self._timeout:
                return False
            self.touch(f"timeout {name}")
        self.touch(name)
        return True

    def wait(self, flag: str) -> bool:
        """Wait for ``flag``; ``False`` once the timeout is over."""
        end = time.monotonic() + self._timeout
        while not self.up(flag):
            if time.monotonic() > end:
                return False
            time.sleep(_NAP)
        return True

    def touch(self, flag: str) -> None:
        """Raise ``flag``."""
        assert self._folder is not None
        (self._folder / flag).touch()

    def up(self, flag: str) -> bool:
        """Whether ``flag`` was raised; of several with ", " between them: whether all were."""
        folder = self._folder
        return folder is not None and all((folder / name).exists() for name in flag.split(", "))


def timeouts(folder: Path) -> list[str]:
    """Points whose flag did not come in time: the interleaving was not forced."""
    return sorted(path.name.removeprefix("timeout ") for path in folder.glob("timeout *"))
