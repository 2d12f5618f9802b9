"""Whose rows a page holds: a search over every page content of the trace, by row digest.

The index is made once, on first use, and only for the rows that are suspect: memory follows their number, not the
trace's. Only values count. Scales alone are never evidence: they are often powers of two, and repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import Layout
from replay.bisect import Case
from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

#: Most rows that are searched for, and most places that are kept of all of them (some 50 MB together).
MOST_ROWS = 1 << 20
MOST_PLACES = 1 << 21
#: Contents whose rows are read at once.
CHUNK = 8192
#: A row that stands in more contents than this (an empty row) tells nothing.
MOST_COMMON = 256


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a page that are those of another content: row r is row ``r + shift`` of snapshot ``look``."""

    rows: Bool
    look: int
    shift: int


@lru_cache(maxsize=16)
def _empty_row(layout: Layout) -> int:
    """Digest of a row of zeros: everybody has them."""
    return int(digest_pages(layout, np.zeros((1, layout.page_bytes), np.uint8)).row_values[0, 0])


class Donors:
    """Where else the suspect rows of a trace stand."""

    def __init__(self, timeline: Timeline, cases: Sequence[Case]) -> None:
        """Remember the cases; nothing is read yet."""
        self.timeline = timeline
        self._cases = cases

    @cached_property
    def _wanted(self) -> U64:
        """Digests of all value rows that differ somewhere, sorted."""
        parts: list[U64] = [np.zeros(0, np.uint64)]
        total = 0
        for case in self._cases:
            looks = (
                ("SE", case.source_bad),
                ("SE+", case.source_bad),
                ("RC", case.wire_bad),
                ("LT", case.later_bad),
                ("RD", case.read_bad | case.appended_bad),
            )
            for stage, bad in looks:
                if case.has(stage) and bad.any():
                    count = len(bad) // 2
                    parts.append(case.units[stage][:count][bad[:count]])
                    total += len(parts[-1])
            if total > MOST_ROWS:
                break
        return np.unique(np.concatenate(parts))[:MOST_ROWS]

    @cached_property
    def _places(self) -> tuple[I64, I64, I64]:
        """(index into the wanted digests, ascending; content; row) of every place where one of them stands."""
        contents, wanted = self.timeline.trace.contents, self._wanted
        columns: list[I64] = [np.zeros((3, 0), np.int64)]
        total = 0
        for width in np.unique(contents.rows[contents.rows > 0]).tolist():
            ids = np.flatnonzero(contents.rows == width)
            for start in range(0, len(ids), CHUNK):
                part = ids[start : start + CHUNK]
                values = contents.row_values(part)
                at = np.minimum(np.searchsorted(wanted, values), max(0, len(wanted) - 1))
                content, row = np.nonzero(wanted[at] == values) if len(wanted) else (part[:0], part[:0])
                columns.append(np.stack([at[content, row], part[content], row]).astype(np.int64))
                total += columns[-1].shape[1]
                if total > MOST_PLACES:
                    break
        table = np.concatenate(columns, axis=1)[:, :MOST_PLACES]
        table = table[:, np.argsort(table[0], kind="stable")]
        return table[0], table[1], table[2]

    @cached_property
    def _looks(self) -> tuple[I64, I64]:
        """Contents in ascending order, and the rows of ``Timeline.snapshots`` that show them, in sequence."""
        snaps = self.timeline.snapshots
        order = np.lexsort((snaps.seq, snaps.content))
        return snaps.content[order], order

    def best(self, case: Case, stage: str, bad: Bool) -> Found | None:
        """The other page whose rows explain most of the value rows of ``bad`` in ``stage``; None where none does."""
        count = len(bad) // 2
        rows = np.flatnonzero(bad[:count])
        if not len(rows) or stage not in case.rows:
            return None
        own = case.rows[stage]
        empty = _empty_row(case.layout)
        index, content, place = self._places
        votes: dict[tuple[int, int], list[int]] = {}
        for row in rows.tolist():
            digest = case.units[stage][row]
            if digest == empty:
                continue
            at = int(np.searchsorted(self._wanted, digest))
            if at >= len(self._wanted) or self._wanted[at] != digest:
                continue
            low, high = np.searchsorted(index, [at, at + 1])
            if high - low > MOST_COMMON:
                continue
            for there, inside in zip(content[low:high].tolist(), place[low:high].tolist(), strict=True):
                votes.setdefault((there, inside - row), []).append(row)
        for (there, shift), found in sorted(votes.items(), key=lambda vote: (-len(vote[1]), abs(vote[0][1]))):
            look = self._other_look(there, own, case)
            if look >= 0:
                mask = np.zeros(count, bool)
                mask[found] = True
                return Found(mask, look, shift)
        return None

    def _other_look(self, content: int, own: int, case: Case) -> int:
        """A look that shows a content and is not one at this very page since its bytes should have been there."""
        snaps = self.timeline.snapshots
        contents, looks = self._looks
        low, high = np.searchsorted(contents, [content, content + 1])
        for look in looks[low:high].tolist():
            here = int(snaps.buffer[look]) == int(snaps.buffer[own]) and int(snaps.page[look]) == int(
                snaps.page[own]
            )
            mine = int(snaps.request[look]) == case.request and int(snaps.logical[look]) == case.logical
            before = int(snaps.seq[look]) < int(snaps.seq[own]) and not mine
            if not here and not (mine and int(snaps.slot[look]) == case.slot):
                return int(look)
            if here and before:
                return int(look)
        return -1

    def words(self, case: Case, found: Found) -> str:
        """What was found, in words."""
        snaps, timeline = self.timeline.snapshots, self.timeline
        look = found.look
        request, slot = int(snaps.request[look]), int(snaps.slot[look])
        room = timeline.requests[request][0] if request >= 0 else -1
        layer = timeline.slots[slot][1] if slot >= 0 else -1
        whose = "the request's own" if request == case.request else f"room {room}'s"
        where = "" if slot == case.slot else f" in layer {layer}"
        moved = "" if found.shift == 0 else f", {abs(found.shift)} rows {'down' if found.shift < 0 else 'up'}"
        count = int(found.rows.sum())
        return (
            f"{count} row{'s' if count > 1 else ''} of it hold the values of {whose} logical page "
            f"{int(snaps.logical[look])}{where}{moved} (page {int(snaps.page[look])}, "
            f"{snaps.stage[snaps.event[look]]})"
        )
