"""How often requests are hit at which load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.diff import Rate, wilson
from analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rates(points: Sequence[Rate], title: str) -> Figure:
    """Draw the share of requests hit against the load, with its 95 % interval; ``title`` is one or two lines."""
    points = sorted(points, key=lambda point: (point.concurrency, point.requests))
    figure = style.empty(7.0, 4.2)
    ax = style.axes_at(figure, 0.85, 0.85, 5.8, 2.7)
    loads = [max(1, point.concurrency) for point in points]
    shares = [100 * point.hit / max(point.requests, 1) for point in points]
    bounds = [wilson(point.hit, point.requests) for point in points]
    below = [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)]
    above = [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)]
    ax.plot(loads, shares, color=style.BAD, linewidth=1.2, alpha=0.5, zorder=2)
    ax.errorbar(
        loads, shares, yerr=[below, above], fmt="o", color=style.BAD, ecolor=style.MUTED, capsize=4,
        markersize=6, elinewidth=1.2, zorder=3,
    )  # fmt: skip
    top = max(100 * high for _, high in bounds)
    for load, point, (_, high) in zip(loads, points, bounds, strict=True):
        ax.annotate(
            f"{point.hit:,} of {point.requests:,}",
            (load, 100 * high),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=style.INK,
        )
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(loads) / 1.5, max(loads) * 1.5)
    ax.set_xticks(sorted(set(loads)), [str(load) for load in sorted(set(loads))])
    ax.minorticks_off()
    ax.set_ylim(-0.02 * top, max(1.15 * top, 5))
    ax.grid(axis="y", color=style.LINE, linewidth=0.4, alpha=0.6)
    ax.tick_params(labelsize=8)
    ax.set_xlabel("requests at a time (logarithmic)", fontsize=8, color=style.INK)
    ax.set_ylabel("requests hit, %", fontsize=8, color=style.INK)
    for name in ("top", "right"):
        ax.spines[name].set_visible(False)
    style.title(figure, title)
    width, height = figure.get_size_inches()
    note = "dots: requests hit of those served; bars: 95 % confidence (Wilson)"
    figure.text(0.85 / width, 0.2 / height, note, fontsize=7, color=style.MUTED)
    return figure
