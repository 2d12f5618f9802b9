"""Whether anybody waits for an event that a sender was given, without asking anybody and without patching torch."""

from __future__ import annotations

import contextlib
from typing import Any

#: Methods of an event that wait for it.
_WAITS = ("synchronize", "wait")


class Watched:
    """One event (``torch.cuda.Event`` or alike): who waited for it, and whether it has happened.

    The waiting methods of this one object are replaced by ones that note the call; :meth:`release` takes that back.
    """

    def __init__(self, event: Any) -> None:
        self.event = event
        self._waited = False
        self._watching = True
        for name in _WAITS:
            original = getattr(event, name, None)
            if callable(original):
                try:
                    setattr(event, name, self._noting(original))
                except (AttributeError, TypeError):
                    self._watching = False

    def _noting(self, original: Any) -> Any:
        def waiting(*args: Any, **keywords: Any) -> Any:
            found = original(*args, **keywords)
            self._waited = True
            return found

        return waiting

    @property
    def awaited(self) -> int:
        """1: somebody has waited for it; 0: nobody has; -1: it cannot be watched."""
        return 1 if self._waited else 0 if self._watching else -1

    def happened(self) -> int:
        """1: it has happened; 0: it has not; -1: it cannot be asked. Never blocks."""
        query = getattr(self.event, "query", None)
        if not callable(query):
            return -1
        return int(bool(query()))

    def release(self) -> None:
        """Give the event its own methods back."""
        for name in _WAITS:
            with contextlib.suppress(AttributeError, TypeError):
                delattr(self.event, name)
