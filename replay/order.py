"""Happens-before: the only place that may say that one record came before another.

What orders (docs/order.md has the reasons):

* the sequence of one thread: a record that ended before another began, on the same thread;
* the launch order of one device stream, for records that carry a stream;
* edges: everything up to an ``Order`` record with end "tail", on its line, happened before everything that began
  after the "head" record of the same ``what`` and ``key`` on its own line. The protocol makes them (destination
  announced -> posted, done -> status seen, abort -> acknowledged, hand-overs between threads).

Clocks do not order. Where this module answers no, there is no proof of order, which is not a proof of the
contrary.

A *line* is one thread or one stream of one process. Each edge gets a vector clock: for every line, the last
sequence number known to have happened before its head. A query is then one binary search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from replay.trace.reader import Table, Trace

I64 = npt.NDArray[np.int64]

#: Most (edges x lines) that get vector clocks; beyond it a trace is refused edges rather than memory.
MAX_CLOCK_CELLS = 400_000_000


@dataclass(frozen=True, slots=True)
class Moment:
    """The interval of one record: process, line within it, and the sequence numbers at its begin and end."""

    process: int
    line: int
    begin_seq: int
    seq: int


def line_numbers(table: Table) -> I64:
    """Line of each record of ``table``: its thread, or ``-1 - stream`` for work put on a device stream."""
    stream = table["stream"]
    return np.where(stream >= 0, -1 - stream, table["thread"]).astype(np.int64)


def moment(table: Table, row: int) -> Moment:
    """The moment of record ``row`` of ``table``."""
    stream = int(table["stream"][row])
    line = -1 - stream if stream >= 0 else int(table["thread"][row])
    return Moment(int(table["process"][row]), line, int(table["begin_seq"][row]), int(table["seq"][row]))


class HappensBefore:
    """Order between the records of a trace.

    ``edges`` counts the edges used; ``dropped`` the ``Order`` records that found no partner or are part of
    a contradiction (a cycle), which orders nothing.
    """

    def __init__(self, trace: Trace) -> None:
        """Build the vector clocks of all edges of ``trace``."""
        self._lines: dict[tuple[int, int], int] = {}
        order = trace.table("order")
        tails, heads, self.dropped = _pair(order)
        lines = line_numbers(order)
        process = order["process"].astype(np.int64)
        seq = order["seq"].astype(np.int64)
        keys = [self._line(int(p), int(n)) for p, n in zip(process, lines, strict=True)]
        line = np.array(keys, np.int64) if keys else np.zeros(0, np.int64)
        if len(tails) * max(1, len(self._lines)) > MAX_CLOCK_CELLS:
            self.dropped += len(tails)
            tails, heads = tails[:0], heads[:0]
        self._build(line[tails], seq[tails], line[heads], seq[heads])

    def _line(self, process: int, number: int) -> int:
        return self._lines.setdefault((process, number), len(self._lines))

    def _build(self, tail_line: I64, tail_seq: I64, head_line: I64, head_seq: I64) -> None:
        count = len(tail_line)
        by_head = np.lexsort((head_seq, head_line))
        tail_line, tail_seq = tail_line[by_head], tail_seq[by_head]
        head_line, head_seq = head_line[by_head], head_seq[by_head]
        starts = np.searchsorted(head_line, np.arange(len(self._lines) + 1))
        # What each edge builds on: the head before it on its own line, and the last head before its tail.
        previous = np.arange(count) - 1
        previous[starts[:-1][starts[:-1] < starts[1:]]] = -1
        source = np.empty(count, np.int64)
        for number in range(len(self._lines)):
            low, high = starts[number], starts[number + 1]
            chosen = np.flatnonzero(tail_line == number)
            found = low + np.searchsorted(head_seq[low:high], tail_seq[chosen], side="left") - 1
            source[chosen] = np.where(found >= low, found, -1)
        clocks = np.full((count, len(self._lines)), -1, np.int64)
        done = np.zeros(count, bool)
        for edge in _topological(previous, source):
            for base in (previous[edge], source[edge]):
                if base >= 0 and done[base]:
                    np.maximum(clocks[edge], clocks[base], out=clocks[edge])
            own = clocks[edge, tail_line[edge]]
            clocks[edge, tail_line[edge]] = max(own, tail_seq[edge])
            done[edge] = True
        self.dropped += int(count - done.sum())
        # An edge in a cycle still has its place on the line, with a clock that orders nothing by itself.
        self._clocks, self._starts, self._head_seq = clocks, starts, head_seq
        self.edges = int(done.sum())

    def before(self, first: Moment, second: Moment) -> bool:
        """Whether ``first`` provably ended before ``second`` began."""
        if (first.process, first.line) == (second.process, second.line):
            return first.seq < second.begin_seq
        from_line = self._lines.get((first.process, first.line))
        to_line = self._lines.get((second.process, second.line))
        if from_line is None or to_line is None:
            return False
        low, high = self._starts[to_line], self._starts[to_line + 1]
        last = low + int(np.searchsorted(self._head_seq[low:high], second.begin_seq, side="left")) - 1
        return bool(last >= low and self._clocks[last, from_line] >= first.seq)

    def ordered(self, first: Moment, second: Moment) -> bool:
        """Whether the two are ordered either way."""
        return self.before(first, second) or self.before(second, first)


def _pair(order: Table) -> tuple[I64, I64, int]:
    """Rows of tails and heads that belong together, and how many records stayed alone.

    Records of one (what, key) are paired in sequence; one tail may have several heads (a broadcast). Any other
    unequal count is ambiguous for the surplus, which is dropped.
    """
    tails: dict[tuple[str, str], list[int]] = {}
    heads: dict[tuple[str, str], list[int]] = {}
    for row, (what, key, end) in enumerate(zip(order["what"], order["key"], order["end"], strict=True)):
        side = tails if end == "tail" else heads
        side.setdefault((what, key), []).append(row)
    left: list[int] = []
    right: list[int] = []
    alone = sum(len(rows) for name, rows in heads.items() if name not in tails)
    for name, sources in tails.items():
        targets = heads.get(name, [])
        if len(sources) == 1:
            left += sources * len(targets)
            right += targets
            alone += not targets
        else:
            paired = min(len(sources), len(targets))
            left += sources[:paired]
            right += targets[:paired]
            alone += len(sources) + len(targets) - 2 * paired
    return np.array(left, np.int64), np.array(right, np.int64), alone


def _topological(previous: I64, source: I64) -> list[int]:
    """Edges in an order in which each comes after the ones it builds on; edges of a cycle are left out."""
    count = len(previous)
    waiting = np.zeros(count, np.int64)
    dependents: list[list[int]] = [[] for _ in range(count)]
    for edge in range(count):
        for base in {int(previous[edge]), int(source[edge])} - {-1}:
            waiting[edge] += 1
            dependents[base].append(edge)
    ready = [edge for edge in range(count) if waiting[edge] == 0]
    result = []
    while ready:
        edge = ready.pop()
        result.append(edge)
        for other in dependents[edge]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    return result
