"""Who told whom that a request is complete: the ends of the "status" edges, by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replay.order import Moment, moment
from replay.order_keys import request_key

if TYPE_CHECKING:
    from replay.trace.reader import Trace


class Tellings:
    """The tellings of a trace. Each prefill rank tells each decode rank of its own part."""

    def __init__(self, trace: Trace) -> None:
        """Sort the "status" edges of ``trace`` by request."""
        self._order = order = trace.table("order")
        #: (room, attempt) -> key -> rows of its tails and of its heads
        self._of: dict[tuple[int, int], dict[str, tuple[list[int], list[int]]]] = {}
        for row in np.flatnonzero(order["what"] == "status").tolist():
            key = request_key(str(order["key"][row]))
            if key is not None:
                of = self._of.setdefault((key.room, key.attempt), {})
                tails, heads = of.setdefault(key.who, ([], []))
                (tails if order["end"][row] == "tail" else heads).append(row)

    def told(self, room: int, attempt: int, process: int) -> tuple[Moment, ...]:
        """When each sender told ``process`` that the request is complete; empty where that was not wholly seen.

        A telling that nobody was seen to hear may have been for ``process``, and is among them.
        """
        found: list[int] = []
        heard = False
        for tails, heads in self._of.get((room, attempt), {}).values():
            here = any(int(self._order["process"][row]) == process for row in heads)
            if here and not tails:
                return ()
            heard |= here
            found += tails if here or not heads else []
        return tuple(moment(self._order, row) for row in found) if heard else ()
