"""Recorded logits and top-k of one request against references, for each layer and decode step.

Two references: the bytes that the read saw (is the kernel right?), and the bytes that the prompt's pages held when
they were first seen (what would a right cache have selected?).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff.seen import prompt_rows, references, snapshots_of
from capture_hooks.layouts import LAYOUTS
from replay.kernels.reference import logits_reference
from replay.recorded import ReadCase, Skipped, read_case, read_snapshots
from replay.timeline import Timeline

if TYPE_CHECKING:
    from replay.trace.reader import Trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: Reads that are done again for one picture: (layers) x (steps) of a long request is no picture any more.
MAX_READS = 4096


@dataclass(frozen=True, slots=True)
class ReadGrid:
    """One value a layer and step; NaN where the read was not recorded in full.

    Attributes:
        room: The request.
        attempt: Its attempt.
        layers: (buffer name, layer id) of the L layers, sorted.
        steps: int64[T], step numbers, ascending.
        k: the top-k asked for, -1 where no read told.
        error: float64[L, T], largest error of a logit as a fraction of its bound, on the bytes that the read saw.
        overlap: float64[L, T], share of the recorded top-k that the right bytes give as well.
        kernel_overlap: float64[L, T], the same with the bytes that the read saw.
    """

    room: int
    attempt: int
    layers: tuple[tuple[str, int], ...]
    steps: I64
    k: int
    error: F64
    overlap: F64
    kernel_overlap: F64


def read_grid(trace: Trace, room: int, attempt: int = 0) -> ReadGrid | None:
    """Do the request's recorded reads again; None where none was recorded with its logits and page bytes."""
    timeline = Timeline(trace)
    request = timeline.request_number(room, attempt)
    table = trace.table("read")
    chosen = (table["room"] == room) & (table["attempt"] == attempt) & (table.bulk_size("logits") > 0)
    looks, skipped = read_snapshots(timeline), Skipped({})
    right = _RightPages(trace, room, attempt)
    found: dict[tuple[tuple[str, int], int], tuple[float, float, float]] = {}
    largest = -1
    for read in np.flatnonzero(chosen)[:MAX_READS].tolist():
        case = read_case(timeline, read, int(table["process"][read]), request, looks, skipped)
        if case is None:
            continue
        buffer = timeline.buffers[case.buffer]
        slot = (buffer.name, buffer.layer)
        found[slot, int(table["step"][read])] = _values(case, right.put_into(case, slot))
        largest = max(largest, case.k)
    if not found:
        return None
    layers = tuple(sorted({slot for slot, _ in found}))
    steps = sorted({step for _, step in found})
    values = np.full((3, len(layers), len(steps)), np.nan)
    for (slot, step), three in found.items():
        values[:, layers.index(slot), steps.index(step)] = three
    return ReadGrid(room, attempt, layers, np.array(steps, np.int64), largest, *values)


def _values(case: ReadCase, right: U8 | None) -> tuple[float, float, float]:
    """(error, overlap, kernel overlap) of one read."""
    logits, bound = read_reference(case, case.pages)
    judged = np.isfinite(bound) & (bound > 0)
    with np.errstate(invalid="ignore"):
        excess = np.abs(case.logits[: case.rows].astype(np.float64) - logits)[judged] / bound[judged]
    error = float(np.nan_to_num(excess, nan=np.inf).max()) if len(excess) else np.nan
    wanted = min(case.k, case.rows)
    if wanted <= 0 or not len(case.top_k):
        return error, np.nan, np.nan
    seen = _overlap(case.top_k[:wanted], logits)
    return (
        error,
        np.nan if right is None else _overlap(case.top_k[:wanted], read_reference(case, right)[0]),
        seen,
    )


def read_reference(case: ReadCase, pages: U8) -> tuple[F64, F64]:
    """Logits of the read on ``pages``, and how far an fp32 kernel may be off, each float64[rows]."""
    return logits_reference(
        case.layout, pages, case.rows, case.query, case.weights, accumulator_bits=case.accumulator_bits
    )


def _overlap(top_k: npt.NDArray[np.int32], logits: F64) -> float:
    """Share of ``top_k`` whose logit is among the largest; equal logits may stand for each other."""
    wanted = len(top_k)
    threshold = np.partition(logits, len(logits) - wanted)[len(logits) - wanted]
    valid = np.unique(top_k[(top_k >= 0) & (top_k < len(logits))])
    return float((logits[valid] >= threshold).sum()) / wanted


class _RightPages:
    """The prompt rows of a request as they were first seen."""

    def __init__(self, trace: Trace, room: int, attempt: int) -> None:
        self._trace = trace
        self._seen = snapshots_of(trace, room, attempt)
        self._rows = prompt_rows(trace, room, attempt)
        known = (self._seen.content >= 0) & np.isin(self._seen.format, list(LAYOUTS))
        known[known] = trace.contents.has_data[self._seen.content[known]]
        self._known = known
        self._references: dict[tuple[str, int], dict[int, int]] = {}

    def put_into(self, case: ReadCase, slot: tuple[str, int]) -> U8 | None:
        """The pages of ``case`` with their prompt rows as they were first seen; None where one is not known."""
        if slot not in self._references:
            mine = np.array([name == slot for name in self._seen.slot], bool)
            self._references[slot] = references(self._seen, np.flatnonzero(mine & self._known))
        layout, pages = case.layout, case.pages.copy()
        for logical in range(len(pages)):
            rows = max(0, min(layout.rows, self._rows - logical * layout.rows))
            look = self._references[slot].get(logical)
            if rows == 0:
                continue
            if look is None or self._seen.format[look] != layout.name:
                return None
            first = self._trace.contents.data(self._seen.content[[look]])
            layout.values(pages)[logical, :rows] = layout.values(first)[0, :rows]
            if layout.scale_bytes:
                layout.scales(pages)[logical, :rows] = layout.scales(first)[0, :rows]
        return pages
