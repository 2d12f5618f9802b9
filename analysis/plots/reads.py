"""Logits and top-k of a request's reads: one box a layer and step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.diff import ReadGrid
from analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Panels: label, and what its colours say.
_ERROR = "largest error of a logit, as a fraction of its bound (above 1: the kernel is wrong)"
_OVERLAP = "share of the top-k that the bytes as first seen give too"
_KERNEL = "share of the top-k that the bytes read give too"


def read_grid(grid: ReadGrid, title: str) -> Figure:
    """Draw ``grid``; ``title`` is one or two short lines."""
    from matplotlib.colors import LogNorm, Normalize

    panels: list[tuple[str, Any, str, Any]] = [
        (_ERROR, np.where(grid.error > 0, grid.error, np.where(np.isnan(grid.error), np.nan, 1e-4)),
         "cividis", LogNorm(1e-3, 1e3)),
        (_OVERLAP, grid.overlap, "cividis_r", Normalize(0, 1)),
        (_KERNEL, grid.kernel_overlap, "cividis_r", Normalize(0, 1)),
    ]  # fmt: skip
    panels = [panel for panel in panels if not np.isnan(panel[1]).all()] or panels[:1]
    layers, steps = grid.error.shape
    line = 0.34 if layers == 1 else min(0.22, 2.0 / layers)
    tall, across = max(0.34, line * layers), float(np.clip(steps * 0.55, 5.0, 10.0))
    left, right, top, bottom, gap = 1.0 + (0 if style.one_buffer(grid.layers) else 0.8), 1.0, 0.75, 0.6, 0.5
    height = top + len(panels) * (tall + gap) - gap + bottom + 0.25
    figure = style.empty(left + across + right, height)
    names = style.layer_names(grid.layers)
    for number, (label, values, colors, norm) in enumerate(panels):
        y = height - top - 0.25 - (number + 1) * tall - number * gap
        ax = style.axes_at(figure, left, y, across, tall)
        ax.set_facecolor(style.UNKNOWN)
        drawn = ax.pcolormesh(
            np.arange(steps + 1) - 0.5,
            np.arange(layers + 1) - 0.5,
            np.ma.masked_invalid(values),
            cmap=colors,
            norm=norm,
            edgecolors="white" if steps <= 40 else "none",
            linewidth=0.5 if steps <= 40 else 0,
            rasterized=values.size > style.RASTER_FROM,
        )
        ax.invert_yaxis()
        if steps <= 14 and line >= 0.16:
            _numbers(ax, grid.error if label == _ERROR else values, drawn, error=label == _ERROR)
        shown = list(range(layers)) if layers <= 8 else [0, layers - 1]
        ax.set_yticks(shown, [f"layer {names[i]}" for i in shown])
        step = max(1, -(-steps // 14))
        ticks = list(range(0, steps, step))
        ax.set_xticks(ticks, [str(grid.steps[i]) for i in ticks])
        ax.set_title(label, loc="left", fontsize=8, color=style.INK, pad=3)
        bar = figure.colorbar(drawn, cax=style.axes_at(figure, left + across + 0.12, y, 0.12, tall))
        bar.outline.set_linewidth(0)
        bar.ax.tick_params(length=0, labelsize=7, colors=style.INK)
        bar.ax.minorticks_off()
        bar.set_ticks([1e-3, 1, 1e3] if label == _ERROR else [0, 1])
        if label == _ERROR:
            bar.set_ticklabels(["≤ 0.001", "1", "≥ 1000"])
        if number == len(panels) - 1:
            ax.set_xlabel(f"step of the read{_asked(grid)}; grey: not recorded", fontsize=8, color=style.INK)
    style.title(figure, title)
    return figure


def _asked(grid: ReadGrid) -> str:
    return f" (k = {grid.k})" if grid.k > 0 else ""


def _numbers(ax: Axes, values: Any, drawn: Any, *, error: bool) -> None:
    """Each box's number, dark on light and light on dark."""
    for (layer, step), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = drawn.cmap(drawn.norm(max(value, 1e-4) if error else value))
        light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        text = short(value) if error else f"{100 * value:.0f} %"
        ax.text(
            step,
            layer,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color=style.ON_LIGHT if light else style.ON_DARK,
        )


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(value: float) -> str:
    """A number that is not negative with two digits that count, in seven characters at most."""
    if 0 < value < 1e-3:
        return "<0.001"
    if value < 99.5:
        return f"{value:.2g}"
    rounded = float(f"{value:.1e}")
    if rounded < 1e6 or not np.isfinite(value):
        return f"{rounded:,.0f}"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}×10{str(int(exponent)).translate(_RAISED)}"
