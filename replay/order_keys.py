"""Keys of the order edges that the protocol makes about one request.

``ROOM.ATTEMPT``, and ``ROOM.ATTEMPT/WHO`` where an engine tells apart which rank told which: both ends make the same
``WHO``, and nobody else reads anything from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KEY = re.compile(r"(\d{1,20})\.(\d{1,10})(?:/(.+))?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A key's parts; ``who`` is empty where the key names the request alone."""

    room: int
    attempt: int
    who: str = ""

    def __str__(self) -> str:
        """The key as it is recorded."""
        return f"{self.room}.{self.attempt}" + (f"/{self.who}" if self.who else "")


def request_key(text: str) -> RequestKey | None:
    """The parts of ``text``, None where it is no key of a request (a hand-over between threads)."""
    found = _KEY.fullmatch(text)
    return RequestKey(int(found[1]), int(found[2]), found[3] or "") if found else None
