"""Which rows differ along a request's sequence: one band a stage, one line a layer inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff import RowGrid, RowState
from analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour and meaning of each state.
COLORS = {
    RowState.NOT_SEEN: (style.PAPER, "not seen"),
    RowState.NOT_JUDGED: (style.UNKNOWN, "not judged"),
    RowState.EQUAL: (style.GOOD, "as first seen"),
    RowState.SCALES: (style.MILD, "scales differ"),
    RowState.VALUES: (style.BAD, "values differ"),
    RowState.BOTH: (style.PURPLE, "values and scales differ"),
}
#: Columns of the picture; longer requests show the worst row of each column.
_COLUMNS = 1200


def row_grid(grid: RowGrid, title: str) -> Figure:
    """Draw ``grid``; ``title`` is one or two short lines."""
    stages, layers, rows = grid.states.shape
    line = 0.3 if layers == 1 else min(0.16, 1.2 / layers)
    band = max(0.3, line * layers)
    left = 1.1 + (0 if layers == 1 else 0.6 if style.one_buffer(grid.layers) else 1.2)
    across, right, top, bottom, gap = 8.5, 0.3, 1.0, 0.95, 0.1
    height = top + stages * band + (stages - 1) * gap + bottom
    figure = style.empty(left + across + right, height)
    columns, step = shrunk(grid.states)
    names = style.layer_names(grid.layers)
    for number, stage in enumerate(grid.stages):
        y = height - top - (number + 1) * band - number * gap
        ax = style.axes_at(figure, left, y, across, band)
        _band(ax, columns[number], step, rows)
        _borders(ax, grid, rows, named=number == 0)
        shown = [] if layers == 1 else list(range(layers)) if layers <= 6 else [0, layers - 1]
        ax.set_yticks([i + 0.5 for i in shown], [f"layer {names[i]}" for i in shown])
        ax.tick_params(labelbottom=number == stages - 1)
        middle = (y + band / 2) / height
        figure.text(0.12 / (left + across + right), middle, stage, va="center", fontsize=9, color=style.INK)
        if number == stages - 1:
            text = "row of the request" + (f"; a column shows the worst of {step} rows" if step > 1 else "")
            ax.set_xlabel(text, fontsize=8, color=style.INK)
    style.title(figure, title)
    used = [state for state in RowState if (grid.states == state).any()]
    style.legend(figure, style.patches([COLORS[state] for state in used]))
    return figure


def shrunk(states: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], int]:
    """States of at most ``_COLUMNS`` columns, and how many rows each stands for (the worst of them)."""
    rows = states.shape[-1]
    step = max(1, -(-rows // _COLUMNS))
    padded = np.zeros((*states.shape[:-1], -(-rows // step) * step), np.uint8)
    padded[..., :rows] = states
    return padded.reshape(*states.shape[:-1], -1, step).max(axis=-1), step


def _band(ax: Axes, states: npt.NDArray[np.uint8], step: int, rows: int) -> None:
    layers, columns = states.shape
    ax.pcolormesh(
        np.minimum(np.arange(columns + 1) * step, rows),
        np.arange(layers + 1),
        states,
        cmap=style.colormap([COLORS[state][0] for state in RowState]),
        vmin=-0.5,
        vmax=len(RowState) - 0.5,
        rasterized=True,
    )
    ax.set_ylim(layers, 0)
    ax.set_xlim(0, rows)


def _borders(ax: Axes, grid: RowGrid, rows: int, *, named: bool) -> None:
    """Pages as thin lines, chunks as thick dashed ones; above the first band their numbers, or how many there are."""
    pages = np.arange(grid.page_rows, rows, grid.page_rows)
    if len(pages) <= 64:
        for row in pages.tolist():
            ax.axvline(row, color="#374151", linewidth=0.4)
    for row in grid.chunks[grid.chunks > 0].tolist():
        ax.axvline(row, color="black", linewidth=1.4, linestyle=(0, (3, 1.5)))
    if not named:
        return
    if 1 < len(grid.chunks) <= 16:
        for number, row in enumerate(grid.chunks.tolist()):
            ax.text(row, 1.06, f"chunk {number}", fontsize=7, color=style.INK, va="bottom", ha="left",
                    transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    else:
        text = "sent in one chunk" if len(grid.chunks) == 1 else f"sent in {len(grid.chunks)} chunks"
        ax.set_title(
            text if len(grid.chunks) else "no record of how it was sent",
            loc="left",
            fontsize=7,
            color=style.MUTED,
            pad=3,
        )
