"""Pictures of what was found: each takes plain arrays of ``analysis.diff`` and returns a figure for :func:`save`."""

from analysis.plots.grid import stage_grid
from analysis.plots.ownership import ownership
from analysis.plots.page_bytes import page_bytes
from analysis.plots.rates import rates
from analysis.plots.reads import read_grid
from analysis.plots.rows import row_grid
from analysis.plots.style import inline_svg, save

__all__ = [
    "inline_svg",
    "ownership",
    "page_bytes",
    "rates",
    "read_grid",
    "row_grid",
    "save",
    "stage_grid",
]
