"""Reads of the same requests in two runs: their logits and top-k, read by read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay.align import Pair
from replay.comparison import Comparison, Difference
from replay.timeline import Timeline

#: Logits of two right runs may differ by about so much of the largest one.
LOGITS_TOLERANCE = 1e-3


def compare_reads(left: Timeline, right: Timeline, found: Comparison) -> None:
    """Lengths, logits and top-k of the reads of paired requests, read by read."""
    mine, theirs = _reads_of(left), _reads_of(right)
    for pair in found.pairs:
        for key in sorted(k for k in mine if k[0] == pair.good and (pair.bad, *k[1:]) in theirs):
            for number, (one, other) in enumerate(
                _same_length(left, right, mine[key], theirs[pair.bad, *key[1:]])
            ):
                _read(left, right, pair, key, number, one, other, found)


def _same_length(
    left: Timeline, right: Timeline, mine: list[int], theirs: list[int]
) -> Iterator[tuple[int, int]]:
    """Reads of equal length, one of each run: runs may read more or less often, and sample other steps."""
    lengths, others = left.trace.table("read")["rows"], right.trace.table("read")["rows"]
    waiting: dict[int, list[int]] = {}
    for row in theirs:
        waiting.setdefault(int(others[row]), []).append(row)
    for row in mine:
        partners = waiting.get(int(lengths[row]), [])
        if partners:
            yield row, partners.pop(0)


_ReadKey = tuple[tuple[int, int], str, int, str, int]


def _reads_of(timeline: Timeline) -> dict[_ReadKey, list[int]]:
    """(request, role, rank, buffer name, layer) -> rows of the read table, in sequence."""
    table = timeline.trace.table("read")
    requests, buffers = timeline.request_column("read"), timeline.buffer_column("read")
    late = timeline.owners.over(table["process"].astype(np.int64), requests, table["seq"]).tolist()
    found: dict[_ReadKey, list[int]] = {}
    for row, (request, buffer) in enumerate(zip(requests.tolist(), buffers.tolist(), strict=True)):
        if request < 0 or buffer < 0 or late[row]:
            continue  # an overshoot step is nobody's
        info, side = timeline.buffers[buffer], timeline.trace.processes[int(table["process"][row])]
        key = (timeline.requests[request], side.role, side.rank, info.name, info.layer)
        found.setdefault(key, []).append(row)
    return found


def _read(
    left: Timeline,
    right: Timeline,
    pair: Pair,
    key: _ReadKey,
    number: int,
    one: int,
    other: int,
    found: Comparison,
) -> None:
    mine, theirs = left.trace.table("read"), right.trace.table("read")

    def note(stage: str, detail: str) -> None:
        _, role, rank, buffer, layer = key
        where = (role, rank, buffer, layer, -1, -1, -1)
        found.differences.append(Difference(stage, "read", pair, *where, read=number, detail=detail))

    rows = int(mine["rows"][one])
    logits, others = (
        np.asarray(t.bulk("logits", r), np.float64)[:rows] for t, r in ((mine, one), (theirs, other))
    )
    if len(logits) != rows or len(others) != rows or not rows:
        return
    found.compared["read-kernel"] = found.compared.get("read-kernel", 0) + 1
    finite = np.isfinite(logits) & np.isfinite(others)
    scale = float(np.abs(logits[np.isfinite(logits)]).max(initial=0.0)) or 1.0
    gaps = np.abs(logits[finite] - others[finite])
    worst = float(gaps.max(initial=0.0)) / scale
    found.largest_logit_difference = max(found.largest_logit_difference, worst)
    odd = int((np.isfinite(logits) != np.isfinite(others)).sum())
    if worst > LOGITS_TOLERANCE or odd:
        bad = int((gaps > LOGITS_TOLERANCE * scale).sum()) + odd
        note(
            "read-kernel",
            f"logits of {bad} of {rows} rows differ by more than {LOGITS_TOLERANCE:g} of the largest",
        )
        return
    first, second = (np.asarray(t.bulk("top_k", r), np.int64) for t, r in ((mine, one), (theirs, other)))
    found.compared["top-k"] = found.compared.get("top-k", 0) + 1
    valid = (set(first[first >= 0].tolist()), set(second[second >= 0].tolist()))
    if len(valid[0]) != len(valid[1]):
        note("top-k", f"{len(valid[0])} valid entries in the good run, {len(valid[1])} in the bad one")
