"""Which process each transfer went to, and so which looks at a source page were taken for which receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

if TYPE_CHECKING:
    from replay.cells import Cells

I64 = npt.NDArray[np.int64]


def receivers(timeline: Timeline) -> I64:
    """Process that each record of the send table wrote to, -1 where it cannot be told."""
    trace = timeline.trace
    sends, registration = trace.table("send"), trace.table("registration")
    agents = {
        str(agent): int(process)
        for agent, process in zip(registration["agent"], registration["process"], strict=True)
    }
    decodes = [n for n, p in enumerate(trace.processes) if p.role == "decode"]
    result = np.full(len(sends), -1, np.int64)
    for row, (process, peer) in enumerate(
        zip(sends["process"].tolist(), sends["peer"].tolist(), strict=True)
    ):
        found = agents.get(str(peer), -1)
        others = [number for number in decodes if number != process]
        if found < 0 and len(others) == 1:
            found = others[0]
        result[row] = found
    return result


def keep_own_looks(timeline: Timeline, cells: Cells) -> None:
    """Leave each cell the last looks at its source that were taken for a transfer to its own side, or to nobody known.

    A page may be sent to several receivers one after the other, and be another by the time of the last look.
    """
    sends, to = timeline.trace.table("send"), receivers(timeline)
    if len(np.unique(to[to >= 0])) < 2:
        return
    pairs = zip(sends["process"].tolist(), sends["transfer"].tolist(), strict=True)
    peer_of = dict(zip(pairs, to.tolist(), strict=True))
    snaps, processes = timeline.snapshots, len(timeline.trace.processes)
    wanted = timeline.cell(cells.request, cells.slot, cells.logical)
    for name, moment in (("SE", "before"), ("SE+", "after")):
        rows = snaps.where("SE", moment)
        columns = zip(snaps.process[rows].tolist(), snaps.transfer[rows].tolist(), strict=True)
        peer = np.array([peer_of.get(pair, -1) for pair in columns], np.int64)
        key = timeline.cell(snaps.request[rows], snaps.slot[rows], snaps.logical[rows])
        known = cells.stage[name] >= 0
        best = np.full(len(cells), -1, np.int64)
        for process in range(processes):
            mine = np.flatnonzero(known & (cells.process == process))
            there = np.flatnonzero((key >= 0) & ((peer == process) | (peer < 0)))
            there = there[np.lexsort((snaps.seq[rows[there]], key[there]))]
            if len(mine) and len(there):
                at = np.maximum(np.searchsorted(key[there], wanted[mine], side="right") - 1, 0)
                best[mine] = np.where(key[there[at]] == wanted[mine], rows[there[at]], -1)
        cells.stage[name][:] = best
