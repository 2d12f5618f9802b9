"""The requests that a trace knows, for those who ask for one by its room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.trace.schema import TABLES

if TYPE_CHECKING:
    from replay.trace.reader import Trace

I64 = npt.NDArray[np.int64]

WITH_ROOM = tuple(name for name, columns in TABLES.items() if "room" in {column.name for column in columns})
#: Rooms, nearest first, that the message about another one names.
_SHOWN = 5


class NotInTraceError(Exception):
    """Something was asked for by its number that is not in the trace; for a room the message names the nearest."""


def rooms_of(trace: Trace) -> I64:
    """Every room that any record names, in ascending order."""
    rooms = np.unique(np.concatenate([trace.table(name)["room"].astype(np.int64) for name in WITH_ROOM]))
    return rooms[rooms >= 0]


def check_request(trace: Trace, room: int, attempt: int | None = None) -> None:
    """Raise :class:`NotInTraceError` unless the trace has a record of this room, and of this attempt of it."""
    known = rooms_of(trace)
    if room not in known:
        near = known[np.argsort(np.abs(known - room), kind="stable")[:_SHOWN]]
        raise NotInTraceError(f"there is no room {room} in this trace; {_told('room', np.sort(near), known)}")
    if attempt is None:
        return
    attempts = np.unique(np.concatenate(list(_attempts(trace, room))))
    if attempt not in attempts:
        raise NotInTraceError(
            f"room {room} has no attempt {attempt} in this trace; {_told('attempt', attempts[:_SHOWN], attempts)}"
        )


def _attempts(trace: Trace, room: int) -> Iterable[I64]:
    for name in WITH_ROOM:
        table = trace.table(name)
        if "attempt" in {column.name for column in TABLES[name]}:
            yield table["attempt"].astype(np.int64)[table["room"] == room]


def _told(noun: str, shown: I64, known: I64) -> str:
    if not len(known):
        return f"it has no {noun} at all"
    names = ", ".join(map(str, shown.tolist()))
    if len(shown) < len(known):
        return f"the nearest of its {len(known):,} are {names}"
    return f"it has {names}"
