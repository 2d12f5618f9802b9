"""How many requests are hit at which load: one point a trace, or a level of the demo."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.verdict import Verdict

if TYPE_CHECKING:
    from replay.trace.reader import Trace

#: Schema of the file that ``replay demo`` writes beside its trace.
SUMMARY = "kv-replay/demo/1"
_MAX_SUMMARY = 1 << 20
_Z = 1.959963984540054  # 95 %


@dataclass(frozen=True, slots=True)
class Rate:
    """One load.

    Attributes:
        concurrency: Requests at a time.
        requests: Requests that were served.
        hit: Of these, how many a finding names (or, from the demo's summary, how many replies were wrong).
    """

    concurrency: int
    requests: int
    hit: int


def wilson(hit: int, requests: int) -> tuple[float, float]:
    """Bounds of the true share with 95 % confidence (Wilson's score interval); (0, 1) without any request."""
    if requests <= 0:
        return 0.0, 1.0
    share, square = hit / requests, _Z**2 / requests
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / requests + square / (4 * requests))
    # Rounding must not leave the share itself outside.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def rate_of(trace: Trace, verdict: Verdict) -> Rate:
    """Requests that the reading side served, how many of them held pages at once at most, and how many were hit."""
    rooms = {(f.request.room, f.request.attempt) for f in verdict.findings}
    arrived = _served(trace)
    aliases = {(room, 0) for f in verdict.findings for room in f.request.aliases}
    hit = len((rooms | aliases) & arrived) if arrived else len(rooms)
    return Rate(_most_at_once(trace, arrived), max(len(arrived), hit), hit)


def _served(trace: Trace) -> set[tuple[int, int]]:
    table = trace.table("read")
    return set(zip(table["room"].tolist(), table["attempt"].tolist(), strict=True))


def _most_at_once(trace: Trace, served: set[tuple[int, int]]) -> int:
    """Most requests that held pages of the reading side at one place of its sequence."""
    reading = np.unique(trace.table("read")["process"])
    most = 0
    for process in reading.tolist():
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for name, into in (("alloc", first), ("free", last)):
            table = trace.table(name)
            mine = np.flatnonzero(table["process"] == process)
            for row in mine.tolist():
                key = (int(table["room"][row]), int(table["attempt"][row]))
                if name == "free" or key not in into:
                    into[key] = int(table["seq"][row])
        steps = [(seq, 1) for key, seq in first.items() if key in served]
        steps += [(last[key], -1) for key in first if key in served and key in last]
        now = 0
        for _, change in sorted(steps):
            now += change
            most = max(most, now)
    return most


def summary(levels: list[Rate], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's summary as plain JSON types."""
    points = [{"concurrency": r.concurrency, "requests": r.requests, "hit": r.hit} for r in levels]
    return {"schema": SUMMARY, **extra, "levels": points}


def rates_from_summary(path: Path) -> list[Rate]:
    """The levels of a demo's ``summary.json``.

    Raises:
        ValueError: It is no such file.
    """
    if path.stat().st_size > _MAX_SUMMARY:
        raise ValueError(f"'{path}' is too large for a summary of the demo")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SUMMARY:
            raise ValueError(body["schema"])
        found = [Rate(int(p["concurrency"]), int(p["requests"]), int(p["hit"])) for p in body["levels"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"'{path}' is no summary of the demo (schema {SUMMARY})") from error
    if not found or not all(0 <= r.hit <= r.requests and r.concurrency > 0 for r in found):
        raise ValueError(f"'{path}' has no levels, or levels that cannot be")
    return found
