"""The stage x page grid of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.diff import SNAPSHOTS, StageGrid, State
from analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour and meaning of each state.
COLORS = {
    State.EQUAL: (style.GOOD, "as stored"),
    State.DIFFERS: (style.BAD, "differs"),
    State.NOT_JUDGED: (style.UNKNOWN, "not judged"),
    State.NOT_SEEN: (style.PAPER, "not seen"),
}
#: Row of the grid -> the look that it shows, as verdicts name it; the rows that only they tell show none.
_LOOKS = {label: f"{stage}+" if moments == ("after",) else stage for label, stage, moments in SNAPSHOTS}


def stage_grid(grid: StageGrid, title: str) -> Figure:
    """One row of boxes a stage, one column a page, one line a layer inside each row.

    Args:
        grid: States from ``analysis.diff.stage_grid``.
        title: The verdict, one or two short lines.

    Returns:
        A figure that belongs to nobody; pass it to :func:`save`.
    """
    stages, layers, pages = grid.states.shape
    # All in inches: a line a layer, a block a stage, the whole on one screen whatever the request.
    line = 0.3 if layers == 1 else min(0.2, 1.2 / layers)
    block = max(0.3, line * layers)
    across = min(12.0, max(5.0, pages * 0.3))
    margins = {
        "left": 1.4 + (0 if layers == 1 else 0.6 if style.one_buffer(grid.layers) else 1.2),
        "right": 0.3,
        "top": 0.72,
        "bottom": 0.95,
    }
    width = margins["left"] + margins["right"] + across
    height = margins["top"] + margins["bottom"] + stages * (block + 0.08)
    cross = float(np.clip(72 * 0.5 * min(block / layers, across / pages), 1.5, 6.5))
    figure = style.empty(width, height)
    axes = figure.subplots(stages, 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(
        left=margins["left"] / width,
        right=1 - margins["right"] / width,
        top=1 - margins["top"] / height,
        bottom=margins["bottom"] / height,
        hspace=0.08 / block,
    )
    for number, ax in enumerate(axes):
        _draw_stage(ax, grid, number, cross)
        box = ax.get_position()
        middle = (box.y0 + box.y1) / 2
        figure.text(
            0.12 / width, middle, _label(grid.stages[number]), va="center", fontsize=9, color=style.INK
        )
    _label_pages(axes[-1], grid)
    style.title(figure, title)
    _legend(figure, bool(grid.found.any()))
    return figure


def _draw_stage(ax: Axes, grid: StageGrid, number: int, cross: float) -> None:
    """The boxes of one stage: layers downwards, pages to the right. ``cross`` is the size of a mark in points."""
    states, found = grid.states[number], grid.found[number]
    layers, pages = states.shape
    gap = min(0.8, cross / 6) if pages <= 60 else 0.0
    ax.pcolormesh(
        np.arange(pages + 1) - 0.5,
        np.arange(layers + 1) - 0.5,
        states,
        cmap=style.colormap([COLORS[state][0] for state in State]),
        vmin=-0.5,
        vmax=len(State) - 0.5,
        edgecolors=style.PAPER if gap else "none",
        linewidth=gap,
        rasterized=grid.states.size > style.RASTER_FROM,
    )
    ax.invert_yaxis()
    layer, page = np.nonzero(found)
    if len(layer):
        ax.scatter(page, layer, s=cross**2, marker="x", c="black", linewidths=min(1.6, cross / 4), zorder=3)
    ax.tick_params(length=0, labelsize=7, colors=style.INK, labelbottom=False)
    names = style.layer_names(grid.layers)
    ends = [] if layers == 1 else [0, layers - 1]
    shown = list(range(layers)) if 1 < layers <= 8 else ends
    ax.set_yticks(shown, [f"layer {names[i]}" if layers <= 4 or i in ends else names[i] for i in shown])
    for spine in ax.spines.values():
        spine.set_color(style.LINE)
        spine.set_linewidth(0.6)


def _label_pages(ax: Axes, grid: StageGrid) -> None:
    """Logical page numbers, and the physical ones below them where there is room."""
    pages = len(grid.logical)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**6) if pages <= 26 * step)
    shown = list(range(0, pages, step))
    with_physical = pages <= 24 and bool((grid.physical >= 0).all())
    labels = [
        f"{grid.logical[i]}\n{grid.physical[i]}" if with_physical else str(grid.logical[i]) for i in shown
    ]
    ax.set_xticks(shown, labels)
    ax.tick_params(labelbottom=True, labelsize=7)
    ax.set_xlabel(
        "logical page, and below it the page id on the reading side" if with_physical else "logical page",
        fontsize=8,
        color=style.INK,
    )


def _legend(figure: Figure, found: bool) -> None:
    from matplotlib.lines import Line2D

    handles = style.patches(list(COLORS.values()))
    if found:
        handles.append(
            Line2D([], [], color=style.INK, marker="x", linestyle="none", markersize=5, label="finding")
        )
    style.legend(figure, handles)


def _label(stage: str) -> str:
    """A row's name, and the look that it shows where it shows one."""
    return f"{stage} ({_LOOKS[stage]})" if stage in _LOOKS else stage
