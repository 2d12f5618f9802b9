"""Trimming: a trace is cut down to some requests, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Loss, Stamp
from replay.trace.errors import TraceError
from replay.trace.merge import Progress, Selection, copy
from replay.trace.reader import Table, Trace, open_trace
from replay.trace.schema import TABLES
from replay.trace.writer import TraceWriter

I64 = npt.NDArray[np.int64]

#: Stage of the loss records that tell what was left out.
STAGE = "trim"
_WITH_ROOM = tuple(
    table for table, columns in TABLES.items() if "room" in {column.name for column in columns}
)
#: Tables whose records give pages to a request.
_PAGES_OF = ("alloc", "receive", "snapshot")


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What stayed: rooms, and records of those that there were."""

    rooms: tuple[int, ...]
    records: int
    of: int


def trim(
    paths: Sequence[Path],
    out: Path,
    rooms: Sequence[int],
    *,
    neighbours: bool = True,
    payload: bool = True,
    replace: bool = False,
    progress: Progress | None = None,
) -> Trimmed:
    """Write the records of ``rooms`` and all that belongs to no request into ``out``.

    Args:
        paths: traces, journals, folders.
        out: the file to write.
        rooms: rooms to keep; ``TraceError`` if one is not there.
        neighbours: keep the requests too that had a page of theirs at any time: who wrote into it is found there.
        payload: keep page bytes, keys, queries and logits.
        replace: replace an existing file.
        progress: called with what is being done.

    What was left out is in the new trace as losses, so that nobody takes its absence for evidence.
    """
    with open_trace(*paths) as trace:
        known = np.unique(np.concatenate([trace.table(name)["room"] for name in _WITH_ROOM]))
        lacking = [room for room in rooms if room not in known]
        if lacking:
            raise TraceError(
                f"room {lacking[0]} is not in it", ", ".join(map(str, paths)), "`replay info` counts them"
            )
        kept = _neighbours(trace, rooms) if neighbours else np.unique(np.array(rooms, np.int64))
        stay = {name: _stay(trace, trace.table(name), kept) for name in _WITH_ROOM}
        stay["content"] = _contents_stay(trace, stay["snapshot"])
        with TraceWriter(out, replace) as writer:
            copy(trace, writer, progress, Selection(stay, payload))
            _tell_losses(trace, writer, stay)
            records = writer.events
        total = sum(len(trace.table(name)) for name in TABLES)
        return Trimmed(tuple(kept.tolist()), records, total)


def _neighbours(trace: Trace, rooms: Sequence[int]) -> I64:
    """``rooms`` and every room that held one of their pages in the same process."""
    held: list[tuple[I64, I64]] = []
    for name in _PAGES_OF:
        table = trace.table(name)
        pages = table.ragged("pages")
        owner = pages.owner()
        place = table["process"].astype(np.int64)[owner] * (1 << 40) + pages.values
        held.append((table["room"][owner], place))
    room = np.concatenate([part for part, _ in held])
    place = np.concatenate([part for _, part in held])
    mine = np.isin(room, np.array(rooms, np.int64))
    sharing = room[np.isin(place, place[mine])]
    found = np.unique(np.concatenate([sharing, np.array(rooms, np.int64)]))
    return found[found >= 0]


def _stay(trace: Trace, table: Table, rooms: I64) -> I64:
    """Rows of ``table`` that stay: those of ``rooms``, of their transfers, and of no request at all."""
    room = table["room"]
    keep = np.isin(room, rooms)
    nobody = room == -1
    if table.name in ("transfer_state", "snapshot"):
        # A sender's states name the transfer and not always the room.
        send = trace.table("send")
        mine = np.isin(send["room"], rooms) | (send["room"] == -1)
        known = _transfer_key(send)
        key = _transfer_key(table)
        nobody &= np.isin(key, known[mine]) | ~np.isin(key, known)
    return np.flatnonzero(keep | nobody)


def _transfer_key(table: Table) -> I64:
    return table["process"].astype(np.int64) * (1 << 40) + table["transfer"]


def _contents_stay(trace: Trace, snapshots: I64) -> I64:
    """Records of later written bytes that a snapshot which stays refers to."""
    used = np.unique(trace.table("snapshot").ragged("content").take(snapshots).values)
    content = trace.table("content").ragged("content")
    return np.unique(content.owner()[np.isin(content.values, used)])


def _tell_losses(trace: Trace, writer: TraceWriter, stay: dict[str, I64]) -> None:
    last = np.full(len(trace.processes), -1, np.int64)
    for name in TABLES:
        table = trace.table(name)
        np.maximum.at(last, table["process"], table["seq"])
    for name, rows in stay.items():
        table = trace.table(name)
        gone = np.setdiff1d(np.arange(len(table)), rows)
        process, seq = table["process"][gone], table["seq"][gone]
        for number in np.unique(process):
            mine = seq[process == number]
            last[number] += 1
            at = int(last[number])
            loss = Loss(STAGE, name, len(mine), int(mine.min()), int(mine.max()), "left out by replay trim")
            writer.add(int(number), Stamp(seq=at, begin_seq=at), loss)
