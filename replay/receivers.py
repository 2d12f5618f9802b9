"""Which process each transfer went to, and so which looks at a source page were taken for which receiver."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

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


def keep_own_looks(timeline: Timeline, cell: I64, process: I64, stage: dict[str, I64]) -> None:
    """Leave in ``stage`` the last looks at each source that were taken for a transfer to its side, or to nobody known.

    ``cell`` and ``process`` are the columns of the cells whose looks "SE" and "SE+" are in ``stage``. A page may be
    sent to several receivers one after the other, and be another by the time of the last look.
    """
    sends, to = timeline.trace.table("send"), receivers(timeline)
    if len(np.unique(to[to >= 0])) < 2:
        return
    pairs = zip(sends["process"].tolist(), sends["transfer"].tolist(), strict=True)
    peer_of = dict(zip(pairs, to.tolist(), strict=True))
    snaps = timeline.snapshots
    for name, moment in (("SE", "before"), ("SE+", "after")):
        rows = snaps.where("SE", moment)
        columns = zip(snaps.process[rows].tolist(), snaps.transfer[rows].tolist(), strict=True)
        peer = np.array([peer_of.get(pair, -1) for pair in columns], np.int64)
        key = timeline.cell(snaps.request[rows], snaps.slot[rows], snaps.logical[rows])
        best = np.full(len(cell), -1, np.int64)
        for number in range(len(timeline.trace.processes)):
            mine = np.flatnonzero((stage[name] >= 0) & (process == number))
            there = np.flatnonzero((key >= 0) & ((peer == number) | (peer < 0)))
            there = there[np.lexsort((snaps.seq[rows[there]], key[there]))]
            if len(mine) and len(there):
                at = np.maximum(np.searchsorted(key[there], cell[mine], side="right") - 1, 0)
                best[mine] = np.where(key[there[at]] == cell[mine], rows[there[at]], -1)
        stage[name] = best
