"""What all pictures share: colours, an empty figure, its title, and how it is written.

matplotlib is imported when a picture is drawn, and only through its objects: no state of it is changed.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that stay apart for colour-blind eyes and on grey paper (after Okabe and Ito).
INK, MUTED, LINE, PAPER = "#1F2937", "#6B7280", "#9CA3AF", "#FFFFFF"
GOOD, BAD, MILD, UNKNOWN = "#8CC9EE", "#C2410C", "#F2A65A", "#D4D4D4"
PURPLE, BLUE, GREEN = "#8347A8", "#0072B2", "#009E73"
#: For what lies on a coloured box, on light and on dark pages alike.
ON_LIGHT, ON_DARK = "#000000", "#FEFEFE"
#: Cells above this number are drawn as one picture in an SVG, not one shape each.
RASTER_FROM = 3000

_DPI = 120
#: What of a picture follows the page that it stands in: its ink and its paper.
_THEMED = {INK: "ink", MUTED: "muted", LINE: "line", PAPER: "paper"}


def empty(width: float, height: float) -> Figure:
    """A figure of ``width`` x ``height`` inches that belongs to nobody."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    across, up = figure.get_size_inches()
    ax = figure.add_axes((left / across, bottom / up, width / across, height / up), facecolor=PAPER)
    ax.tick_params(length=0, labelsize=7, colors=INK)
    for spine in ax.spines.values():
        spine.set_color(LINE)
        spine.set_linewidth(0.6)
    return ax


def title(figure: Figure, text: str) -> None:
    """One or two lines at the top left; the first is bold. Longer lines are cut."""
    width, height = figure.get_size_inches()
    lines = [textwrap.shorten(line, int(width * 11), placeholder=" ...") for line in text.splitlines()[:2]]
    for number, (line, weight) in enumerate(zip(lines, ("bold", "normal"), strict=False)):
        place = 0.12 / width, 1 - (0.14 + 0.2 * number) / height
        figure.text(*place, plain(line), weight=weight, ha="left", va="top", fontsize=10, color=INK)


def plain(text: str) -> str:
    """``text`` as it is: no dollar sign of it begins a formula, no character of it controls anything."""
    return printable(text).replace("$", r"\$")


def colormap(colors: Sequence[str]) -> Any:
    """One colour a state, 0 upwards; what has the paper's colour is left open, on whatever paper."""
    from matplotlib.colors import ListedColormap, to_rgba

    return ListedColormap([(1.0, 1.0, 1.0, 0.0) if color == PAPER else to_rgba(color) for color in colors])


def one_buffer(layers: Sequence[tuple[str, int]]) -> bool:
    """Whether all layers are of one cache."""
    return len({name for name, _ in layers}) <= 1


def layer_names(layers: Sequence[tuple[str, int]]) -> list[str]:
    """Names of layers, with the cache where there are several."""
    return [str(k) if one_buffer(layers) else plain(f"{name[:16]}/{k}") for name, k in layers]


def legend(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    """A legend at the lower edge."""
    found = figure.legend(
        handles=list(handles),
        loc="lower center",
        bbox_to_anchor=(0.5, 0.08 / figure.get_size_inches()[1]),
        ncols=columns or len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.4,
    )
    for text in found.get_texts():
        text.set_color(INK)


def patches(colors: Sequence[tuple[str, str]]) -> list[Any]:
    """Legend entries, one box for each (colour, text)."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=color, edgecolor=LINE, linewidth=0.6, label=text) for color, text in colors]


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as PNG or SVG, by the ending of ``path``; the same figure gives the same bytes.

    Raises:
        ValueError: For another ending.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"'{path.name}' does not end in .png or .svg")
    path.write_bytes(rendered(figure, kind))


def rendered(figure: Figure, kind: str, salt: str = "kv-replay") -> bytes:
    """``figure`` as the bytes of a "png" or "svg" file."""
    from matplotlib import rc_context

    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def inline_svg(figure: Figure, name: str) -> str:
    """``figure`` as an SVG element for an HTML page.

    Its ids begin with ``name``, so that several fit into one page, and its ink and paper are the page's CSS variables
    ``--ink``, ``--muted``, ``--line`` and ``--paper`` where the page has them.
    """
    text = rendered(figure, "svg", salt=name).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, count=1, flags=re.DOTALL)
    # Nothing refers to pictures inside it, and equal ones would share an id.
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
    text = re.sub(r' width="[0-9.]+pt"| height="[0-9.]+pt"', "", text, count=2)
    # As wide as it was drawn, or as the page where that is narrower.
    text = text.replace("<svg", f'<svg style="width: 100%; max-width: {figure.get_figwidth():.2f}in"', 1)
    for color, variable in _THEMED.items():
        text = re.sub(rf"{color}\b", f"var(--{variable}, {color.lower()})", text, flags=re.IGNORECASE)
    return text
