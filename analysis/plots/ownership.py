"""The life of one physical page: a line a request, who owned it, whose write was in flight, who stored and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.diff import Ownership, Span
from analysis.plots import style
from replay.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour, how far above or below the line's middle, thickness and meaning of what lasts.
_SPANS = {
    "owned": (style.GOOD, 0.0, 0.62, "owns the page"),
    "write": (style.PURPLE, 0.0, 0.2, "its write into the page is in flight"),
    "send": (style.BLUE, 0.0, 0.2, "the page is being sent"),
}
#: Marker, colour, offset from the line's middle, and meaning of what happens at one position.
_MARKS = {
    "announce": (">", style.MUTED, -0.4, "announced to the sender"),
    "store": ("^", style.GREEN, -0.4, "stored into"),
    "copy": ("s", style.BAD, -0.4, "copied or cleared by its own process"),
    "look": ("d", style.MILD, -0.4, "looked at"),
    "read": ("o", style.BLUE, -0.4, "read"),
}


def ownership(page: Ownership, title: str) -> Figure:
    """Draw ``page``; ``title`` is one or two short lines."""
    positions, lanes = len(page.ms), len(page.lanes)
    names = [f"room {room}" + (f".{attempt}" if attempt else "") for room, attempt in page.lanes]
    across = float(np.clip(positions * 0.28, 5.5, 11.0))
    left, right, top, bottom = 1.15, 0.35, 0.8, 1.1
    tall = max(0.9, 0.5 * lanes)
    figure = style.empty(left + across + right, top + tall + bottom)
    ax = style.axes_at(figure, left, bottom, across, tall)
    ax.set_ylim(lanes - 0.3, -0.75)
    ax.set_xlim(-0.6, positions - 0.4)
    for number in range(lanes):
        ax.axhline(number, color=style.LINE, linewidth=0.4, zorder=0)
    for _, owner, begin, end in page.contested:
        ax.axvspan(begin, end, facecolor=style.BAD, alpha=0.18, linewidth=0, zorder=0.5)
        low, high = owner - 0.34, owner + 0.34
        ax.fill_between([begin, end], low, high, facecolor="none", edgecolor=style.BAD, hatch="////",
                        linewidth=0.0, zorder=2.5)  # fmt: skip
    for span in page.spans:
        _span(ax, span)
    for mark in page.marks:
        marker, color, offset, _ = _MARKS[mark.kind]
        ax.scatter([mark.at], [mark.lane + offset], marker=marker, s=26, c=color, linewidths=0, zorder=4)
        if mark.count > 1:
            ax.annotate(
                f"×{mark.count}",
                (mark.at, mark.lane + offset),
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=6,
                color=style.INK,
            )
    ax.set_yticks(range(lanes), names)
    ax.tick_params(labelsize=8)
    _times(ax, page, across)
    style.title(figure, title)
    style.legend(figure, _legend(page), columns=4)
    return figure


def _span(ax: Axes, span: Span) -> None:
    color, offset, thick, _ = _SPANS[span.kind]
    end = span.end + (0.45 if span.open else 0.0)
    y = span.lane + offset
    ax.fill_between(
        [span.begin, max(end, span.begin + 0.12)],
        y - thick / 2,
        y + thick / 2,
        facecolor=color,
        edgecolor="none",
        zorder=3 if span.kind != "owned" else 2,
    )
    if span.open:
        ax.annotate("...", (end, y), fontsize=8, color=style.INK, va="center", xytext=(2, 0),
                    textcoords="offset points")  # fmt: skip


def _times(ax: Axes, page: Ownership, across: float) -> None:
    """The order is the axis; where clocks compare, milliseconds stand below some of its places."""
    positions = len(page.ms)
    label = "events in the order that the trace proves, not to scale"
    if np.isnan(page.ms).any():
        ax.set_xticks([])
    else:
        # A number takes about 0.65 inches.
        step = max(1, int(np.ceil(positions * 0.65 / across)))
        shown = list(range(0, positions, step))
        ax.set_xticks(shown, [f"{page.ms[i]:,.1f}" for i in shown])
        ax.tick_params(axis="x", length=2, labelsize=7)
        label += "; below them milliseconds"
    if page.left_out:
        label += f"\n{counted(page.left_out, 'other request')} had the page at other times"
    ax.set_xlabel(label, fontsize=8, color=style.INK)


def _legend(page: Ownership) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {span.kind for span in page.spans}
    handles: list[Any] = style.patches([_SPANS[kind][::3] for kind in _SPANS if kind in kinds])
    if page.contested:
        handles.append(
            Patch(
                facecolor="none",
                edgecolor=style.BAD,
                hatch="////",
                linewidth=0,
                label="while another owns it",
            )
        )
    seen = {mark.kind for mark in page.marks}
    handles += [
        Line2D([], [], color=color, marker=marker, linestyle="none", markersize=5, label=text)
        for kind, (marker, color, _, text) in _MARKS.items()
        if kind in seen
    ]
    return handles
