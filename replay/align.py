"""Which request of one trace is which request of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Pair:
    """One request in both runs; ``by`` is "room", "rid" or "order"."""

    good: tuple[int, int]
    bad: tuple[int, int]
    by: str
    rows: int


def align(left: Timeline, right: Timeline) -> tuple[list[Pair], list[tuple[int, int]], list[tuple[int, int]]]:
    """Pair requests: by room and length, then by the hash of the client's id, then in order of equal lengths."""
    mine, theirs = _requests(left), _requests(right)
    pairs: list[Pair] = []

    def match(by: str, key: Callable[[tuple[int, int], _Request], Any]) -> None:
        index: dict[Any, list[tuple[int, int]]] = {}
        for name, request in theirs.items():
            index.setdefault(key(name, request), []).append(name)
        counts: dict[Any, int] = {}
        for name, request in mine.items():
            counts[key(name, request)] = counts.get(key(name, request), 0) + 1
        for name, request in list(mine.items()):
            wanted = key(name, request)
            others = index.get(wanted, [])
            if wanted is None or not others or (by != "order" and (len(others) > 1 or counts[wanted] > 1)):
                continue
            other = others.pop(0)
            pairs.append(Pair(name, other, by, request.rows))
            del mine[name], theirs[other]

    match("room", lambda name, request: (name, request.rows) if request.rows >= 0 else None)
    match("rid", lambda _, request: request.rid or None)
    match("order", lambda _, request: request.rows if request.rows >= 0 else None)
    return pairs, list(mine), list(theirs)


@dataclass(frozen=True, slots=True)
class _Request:
    rows: int
    rid: str


def _requests(timeline: Timeline) -> dict[tuple[int, int], _Request]:
    """Requests that nobody marked as warm-up, health check or fake, in the order of their first record."""
    table = timeline.trace.table("request")
    rids: dict[int, str] = {}
    for number, rid in zip(timeline.request_column("request").tolist(), table["rid"].tolist(), strict=True):
        if rid:
            rids[number] = str(rid)
    first = np.full(len(timeline.requests) + 1, np.iinfo(np.int64).max, np.int64)
    for name in ("request", "alloc", "snapshot"):
        np.minimum.at(
            first, timeline.request_column(name), timeline.trace.table(name)["seq"].astype(np.int64)
        )
    order = np.argsort(first[:-1], kind="stable")
    return {
        timeline.requests[number]: _Request(int(timeline.request_rows[number]), rids.get(number, ""))
        for number in order.tolist()
        if not timeline.beside[number]
    }
