"""Where pages that a process copied came from: off to a host tier and back, or from page to page.

A page that is loaded back was stored for another page, often for another request (a prefix cache). What it should hold
is what its origin held when the copy was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

#: Most copies in a row that one page is followed through.
MOST_HOPS = 4

#: Looks that show what a page held before a copy was taken of it.
_LOOKS = ("ST", "SE", "RC", "LT", "RD")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the content of a page came from.

    ``copies`` are rows of the copy table, the last one first; ``look`` is the row of ``Timeline.snapshots`` that last
    showed the origin before the first copy was taken; ``covered`` are the bytes of the page that every copy carried.
    """

    copies: tuple[int, ...]
    look: int
    covered: Bool


@dataclass(frozen=True, slots=True)
class _Entry:
    row: int
    source: tuple[int, int, int]  #: (process, buffer number, page), or (process, a tier's number below 0, id)
    length: int
    step: int  #: bytes that belong to one id, where the copy goes and comes from
    rowwise: bool
    begin_seq: int
    seq: int


class Copies:
    """The copy records of a trace, found by where they wrote."""

    def __init__(self, timeline: Timeline) -> None:
        """Remember ``timeline``; the records are read on first use."""
        self.timeline = timeline

    @cached_property
    def _into(self) -> dict[tuple[int, int, int], list[_Entry]]:
        table, timeline = self.timeline.trace.table("copy"), self.timeline
        ids, source_ids = table.ragged("ids"), table.ragged("source_ids")
        found: dict[tuple[int, int, int], list[_Entry]] = {}
        for row in range(len(table)):
            process = int(table["process"][row])
            targets, sources = ids[row].tolist(), source_ids[row].tolist()
            if len(sources) != len(targets):
                continue  # a clear, or a list that says nothing
            here = timeline.buffer_number(process, int(table["buffer"][row]))
            there = timeline.buffer_number(process, int(table["source_buffer"][row]))
            length = int(table["length"][row])
            strides = [int(table[name][row]) for name in ("stride", "source_stride")]
            step = min([stride for stride in strides if stride > 0], default=length)
            if here < 0 and there < 0:
                continue  # within the host tier: between pages of no buffer that was declared
            # Each device buffer has its own ids at the host tier.
            here, there = (here if here >= 0 else -2 - there), (there if there >= 0 else -2 - here)
            rowwise = str(table["unit"][row]) == "row"
            begin, seq = int(table["begin_seq"][row]), int(table["seq"][row])
            if rowwise:
                # Rows of whole pages: the host tier counts rows as well.
                rows = next((timeline.buffers[b].layout.rows for b in (here, there) if b >= 0), 1)
                pages = {t // rows: s // rows for t, s in zip(targets, sources, strict=True)}
                targets, sources = list(pages), list(pages.values())
            for target, source in zip(targets, sources, strict=True):
                entry = _Entry(row, (process, there, source), length, step, rowwise, begin, seq)
                found.setdefault((process, here, target), []).append(entry)
        return found

    def origin(self, look: int) -> Origin | None:
        """The origin of the page that snapshot ``look`` shows after a copy; None where no record leads to it."""
        snaps, timeline = self.timeline.snapshots, self.timeline
        buffer, page = int(snaps.buffer[look]), int(snaps.page[look])
        if buffer < 0:
            return None
        layout = timeline.buffers[buffer].layout
        place, until = (int(snaps.process[look]), buffer, page), int(snaps.seq[look])
        covered = np.ones(layout.page_bytes, bool)
        copies: list[int] = []
        for _ in range(MOST_HOPS):
            entries = [entry for entry in self._into.get(place, ()) if entry.seq <= until]
            if not entries:
                return None
            entry = max(entries, key=lambda entry: entry.seq)
            copies.append(entry.row)
            size = min(size for size in (entry.length, entry.step) if size > 0) if entry.length > 0 else 0
            if entry.rowwise:
                _cut_rows(covered, layout.value_bytes, layout.scale_base, layout.scale_bytes, size)
            else:
                covered[size:] = False
            place, until = entry.source, entry.begin_seq
            if place[1] < 0:
                continue  # a host tier: go on to what wrote it
            row = self._last_look(place[1], place[2], until)
            if row >= 0:
                return Origin(tuple(copies), row, covered)
        return None

    def _last_look(self, buffer: int, page: int, until: int) -> int:
        snaps = self.timeline.snapshots
        found = np.concatenate([snaps.at_place(stage, buffer, page) for stage in _LOOKS])
        moment = snaps.moment[snaps.event[found]]
        # What was seen before the page was given to its owner is another's: the owner's own look may have been lost.
        since = self.timeline.owners.owned_since(self.timeline.buffers[buffer].process, page, until)
        known = (snaps.content[found] >= 0) & (snaps.seq[found] <= until) & (snaps.seq[found] > since)
        found = found[known & ~((snaps.stage[snaps.event[found]] == "RC") & (moment == "before"))]
        return int(found[int(np.argmax(snaps.seq[found]))]) if len(found) else -1


def _cut_rows(covered: Bool, value_bytes: int, scale_base: int, scale_bytes: int, size: int) -> None:
    """Rows were copied one by one, ``size`` bytes of each: what is past them was not carried."""
    values = covered[:scale_base].reshape(-1, value_bytes)
    values[:, size:] = False
    if scale_bytes and size < value_bytes + scale_bytes:
        covered[scale_base:].reshape(-1, scale_bytes)[:, max(0, size - value_bytes) :] = False
