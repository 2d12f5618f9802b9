"""The bytes of one page: a line a row, values and scales apart, and below them the page as it lies in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff import ByteState, PageBytes
from analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour and meaning of each state.
COLORS = {
    ByteState.EQUAL: (style.GOOD, "equal"),
    ByteState.FEW_BITS: (style.MILD, "1 or 2 bits differ"),
    ByteState.MANY_BITS: (style.BAD, "more bits differ"),
    ByteState.ZEROED: (style.PURPLE, "is zero and was not"),
    ByteState.ROW_DIFFERS: (style.BAD, "in a row that differs (bytes not kept)"),
    ByteState.OUTSIDE: (style.UNKNOWN, "behind the prompt"),
}
_LINE = 0.062  # inches a row
_VALUES, _GAP, _SCALES, _MEMORY = 5.2, 0.16, 0.55, 0.3


def page_bytes(page: PageBytes, title: str) -> Figure:
    """Draw ``page``; ``title`` is one or two short lines."""
    layout = page.layout
    tall = _LINE * layout.rows
    left, right, top, bottom = 0.75, 0.85, 0.85, 1.5
    scales = _SCALES if layout.scale_bytes else 0.0
    across = _VALUES + (_GAP + scales if scales else 0.0)
    figure = style.empty(left + across + right, top + tall + bottom)
    states = page.states
    values = states[: layout.scale_base].reshape(layout.rows, layout.value_bytes)
    ax = style.axes_at(figure, left, bottom, _VALUES, tall)
    _map(ax, values, layout.rows)
    marks = list(range(0, layout.rows, 8))
    ax.set_yticks([row + 0.5 for row in marks], [f"row {row}" for row in marks])
    # Beside the scales' 0 there is no room for the last number.
    steps = list(range(0, layout.value_bytes + (0 if scales else 1), 32))
    ax.set_xticks(steps, [str(step) for step in steps])
    ax.tick_params(axis="x", length=2)
    ax.set_title(f"values, {layout.value_bytes} bytes a row", loc="left", fontsize=8, color=style.INK, pad=4)
    last = ax
    if scales:
        last = style.axes_at(figure, left + _VALUES + _GAP, bottom, _SCALES, tall)
        _map(last, states[layout.scale_base :].reshape(layout.rows, layout.scale_bytes), layout.rows)
        last.set_yticks([])
        last.set_xticks([0, layout.scale_bytes], ["0", str(layout.scale_bytes)])
        last.tick_params(length=2)
        last.set_title("scales", loc="left", fontsize=8, color=style.INK, pad=4)
    side = last.twinx()
    side.set_ylim(layout.rows, 0)
    side.set_yticks(
        [row + 0.5 for row in marks],
        [f"byte {row * layout.value_bytes:,}" for row in marks],
    )
    side.tick_params(length=0, labelsize=7, colors=style.MUTED)
    for spine in side.spines.values():
        spine.set_visible(False)
    _memory(style.axes_at(figure, left, bottom - 0.85, across, _MEMORY), page)
    style.title(figure, title)
    used = [state for state in ByteState if (states == state).any() or state == ByteState.EQUAL]
    style.legend(figure, style.patches([COLORS[state] for state in used]))
    return figure


def _map(ax: Axes, states: npt.NDArray[np.uint8], rows: int) -> None:
    """One cell a byte, a line between rows."""
    ax.pcolormesh(
        np.arange(states.shape[1] + 1),
        np.arange(rows + 1),
        states,
        cmap=style.colormap([COLORS[state][0] for state in ByteState]),
        vmin=-0.5,
        vmax=len(ByteState) - 0.5,
        rasterized=True,
    )
    ax.hlines(np.arange(1, rows), 0, states.shape[1], colors="white", linewidth=0.35)
    ax.hlines(np.arange(8, rows, 8), 0, states.shape[1], colors="#374151", linewidth=0.5)
    ax.set_ylim(rows, 0)
    ax.set_xlim(0, states.shape[1])


def _memory(ax: Axes, page: PageBytes) -> None:
    """The page from its first byte to its last; each column shows the worst of its bytes."""
    size, border = page.layout.page_bytes, page.layout.scale_base
    width = -(-size // 512)
    padded = np.zeros(-(-size // width) * width, np.uint8)
    padded[:size] = _ranked(page.states)
    columns = padded.reshape(-1, width).max(axis=1)
    ax.pcolormesh(
        np.arange(len(columns) + 1) * width,
        [0, 1],
        columns[None],
        cmap=style.colormap([COLORS[state][0] for state in _RANK]),
        vmin=-0.5,
        vmax=len(_RANK) - 0.5,
        rasterized=True,
    )
    ax.set_xlim(0, size)
    ax.set_yticks([])
    # The border's own number is told below; a tick beside it would overlap.
    ticks = [byte for byte in range(0, size + 1, 2048) if page.layout.scale_bytes == 0 or byte < border]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.tick_params(length=2)
    ax.set_title("the same bytes as they lie in memory", loc="left", fontsize=8, color=style.INK, pad=3)
    if page.layout.scale_bytes:
        ax.axvline(border, color="black", linewidth=1.2)
        ax.annotate(
            f"scales from byte {border:,}",
            (border, 0),
            xytext=(6, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7,
            color=style.INK,
        )


#: From the least to the most telling, for columns that stand for several bytes.
_RANK = (
    ByteState.OUTSIDE,
    ByteState.EQUAL,
    ByteState.FEW_BITS,
    ByteState.ZEROED,
    ByteState.ROW_DIFFERS,
    ByteState.MANY_BITS,
)


def _ranked(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    place = np.zeros(len(ByteState), np.uint8)
    for rank, state in enumerate(_RANK):
        place[state] = rank
    return place[states]
