"""The other pages and buffers of a case's request: what is told of one page often shows in its neighbours only."""

from __future__ import annotations

import numpy as np

from replay.bisect import Case, Ladder


class Siblings:
    """Cells and cases of a ladder, found by request."""

    def __init__(self, ladder: Ladder) -> None:
        """Remember the cells of ``ladder`` that matter, and its cases."""
        cells = ladder.cells
        self._cases: dict[tuple[int, int, int], list[Case]] = {}
        for case in ladder.cases:
            self._cases.setdefault((case.process, case.request, case.slot), []).append(case)
        suspects = {(process, request) for process, request, _ in self._cases}
        self._pages: dict[tuple[int, int], dict[int, int]] = {pair: {} for pair in suspects}
        seen = (cells.valid > 0) & ((cells.stage["RC"] >= 0) | (cells.stage["LT"] >= 0))
        for row in np.flatnonzero(
            seen & np.isin(cells.request, [request for _, request in suspects])
        ).tolist():
            counts = self._pages.get((int(cells.process[row]), int(cells.request[row])))
            if counts is not None:
                slot = int(cells.slot[row])
                counts[slot] = counts.get(slot, 0) + 1

    def pages(self, case: Case) -> list[Case]:
        """Cases of the same buffer and request, this one among them."""
        return self._cases.get((case.process, case.request, case.slot), [case])

    def buffers(self, case: Case) -> dict[int, tuple[int, list[Case]]]:
        """Slot -> (pages of the request that arrived in it, cases among them) on the case's side."""
        counts = self._pages.get((case.process, case.request), {})
        return {
            slot: (count, self._cases.get((case.process, case.request, slot), []))
            for slot, count in counts.items()
        }
