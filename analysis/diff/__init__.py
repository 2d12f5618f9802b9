"""What the pictures show, as plain arrays: nothing here draws, and nothing here needs matplotlib."""

from analysis.diff.grid import JUDGED, StageGrid, State, busiest_request, stage_grid
from analysis.diff.ownership import Ownership, Span, ownership
from analysis.diff.page_bytes import ByteState, PageBytes, page_bytes
from analysis.diff.rates import Rate, rate_of, rates_from_summary, wilson
from analysis.diff.reads import ReadGrid, read_grid
from analysis.diff.rows import RowGrid, RowState, row_grid
from analysis.diff.seen import SNAPSHOTS

__all__ = [
    "JUDGED",
    "SNAPSHOTS",
    "ByteState",
    "Ownership",
    "PageBytes",
    "Rate",
    "ReadGrid",
    "RowGrid",
    "RowState",
    "Span",
    "StageGrid",
    "State",
    "busiest_request",
    "ownership",
    "page_bytes",
    "rate_of",
    "rates_from_summary",
    "read_grid",
    "row_grid",
    "stage_grid",
    "wilson",
]
