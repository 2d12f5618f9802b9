"""Which rows of a request differ, along its sequence, with the borders of its pages and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff.grid import MAX_PAGES
from analysis.diff.seen import SNAPSHOTS, Seen, is_step, prompt_rows, references, snapshots_of
from capture_hooks.layouts import LAYOUTS

if TYPE_CHECKING:
    from replay.trace.reader import Trace

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class RowState(IntEnum):
    """What is known of one row at one stage; the larger wins where several looks disagree."""

    NOT_SEEN = 0
    NOT_JUDGED = 1
    EQUAL = 2
    SCALES = 3  #: its scales differ
    VALUES = 4  #: its values differ
    BOTH = 5


@dataclass(frozen=True, slots=True)
class RowGrid:
    """States of the prompt rows of one request.

    Attributes:
        room: The request.
        attempt: Its attempt.
        stages: Labels of the S stages at which a row was seen, in the order of the ladder.
        layers: (buffer name, layer id) of the L layers, sorted.
        page_rows: Rows a page.
        chunks: int64[C], first row of each chunk that was sent, ascending; empty where nobody told.
        states: uint8[S, L, R] of :class:`RowState` for rows 0 .. R - 1.
    """

    room: int
    attempt: int
    stages: tuple[str, ...]
    layers: tuple[tuple[str, int], ...]
    page_rows: int
    chunks: I64
    states: U8


def row_grid(trace: Trace, room: int, attempt: int = 0) -> RowGrid | None:
    """Compare every row with the first stage at which its page was seen; None without any page with row digests."""
    seen = snapshots_of(trace, room, attempt)
    contents = trace.contents
    usable = (seen.content >= 0) & np.isin(seen.format, list(LAYOUTS)) & (seen.logical >= 0)
    usable &= seen.logical < MAX_PAGES
    usable[usable] = contents.rows[seen.content[usable]] > 0
    if not usable.any():
        return None
    per_page = max(LAYOUTS[name].rows for name in set(seen.format[usable]))
    told = prompt_rows(trace, room, attempt)
    rows = told if told >= 0 else int(seen.logical[usable].max() + 1) * per_page
    rows = min(rows, MAX_PAGES * per_page)
    layers = tuple(sorted(set(seen.slot[usable])))
    states = np.zeros((len(SNAPSHOTS), len(layers), rows), np.uint8)
    for number, slot in enumerate(layers):
        mine = np.flatnonzero(usable & np.array([name == slot for name in seen.slot], bool))
        _fill(trace, seen, mine, states[:, number], per_page)
    shown = np.flatnonzero((states != RowState.NOT_SEEN).any(axis=(1, 2)))
    return RowGrid(
        room=room,
        attempt=attempt,
        stages=tuple(SNAPSHOTS[stage][0] for stage in shown),
        layers=layers,
        page_rows=per_page,
        chunks=_chunks(trace, room, attempt, per_page, rows),
        states=states[shown],
    )


def _fill(trace: Trace, seen: Seen, looks: I64, states: U8, per_page: int) -> None:
    """The states of one layer, uint8[S, R]."""
    contents = trace.contents
    reference = references(seen, looks)
    for look in looks.tolist():
        logical = int(seen.logical[look])
        first = reference[logical]
        place = slice(logical * per_page, min((logical + 1) * per_page, states.shape[1]))
        count = place.stop - place.start
        if count <= 0:
            continue
        stage = states[int(seen.stage[look]), place]
        if look == first or is_step(seen, look, first):
            np.maximum(stage, np.uint8(RowState.EQUAL), out=stage)
            continue
        if seen.format[look] != seen.format[first]:
            np.maximum(stage, np.uint8(RowState.NOT_JUDGED), out=stage)
            continue
        ids = np.array([seen.content[first], seen.content[look]], np.int64)
        values, scales = contents.row_values(ids), contents.row_scales(ids)
        state = RowState.EQUAL + (scales[0] != scales[1]) + 2 * (values[0] != values[1])
        np.maximum(stage, state[:count].astype(np.uint8), out=stage)


def _chunks(trace: Trace, room: int, attempt: int, per_page: int, rows: int) -> I64:
    """First row of each chunk."""
    send = trace.table("send")
    mine = (send["room"] == room) & (send["attempt"] == attempt) & (send["logical"] >= 0)
    first = np.unique(send["logical"][mine].astype(np.int64)) * per_page
    return np.asarray(first[first < rows], np.int64)
