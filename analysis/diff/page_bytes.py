"""One page at two stages, byte by byte: where it was right, and where it was seen wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff.seen import SNAPSHOTS, Seen, is_step, prompt_rows, references, snapshots_of
from capture_hooks.layouts import LAYOUTS, Layout

if TYPE_CHECKING:
    from replay.trace.reader import Trace

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class ByteState(IntEnum):
    """What is known of one byte of a page."""

    EQUAL = 0
    FEW_BITS = 1  #: 1 or 2 bits differ
    MANY_BITS = 2  #: 3 bits or more differ
    ZEROED = 3  #: differs, and is 0 where it was not
    ROW_DIFFERS = 4  #: it lies in a row whose digest differs; its own value was not kept
    OUTSIDE = 5  #: in a row that the prompt does not fill: nobody's claim


_BITS = np.array([number.bit_count() for number in range(256)], np.uint8)
#: States that count as a difference.
DIFFERENT = (ByteState.FEW_BITS, ByteState.MANY_BITS, ByteState.ZEROED)


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Two looks at one page of a request.

    Attributes:
        room: The request.
        attempt: Its attempt.
        buffer: Name of the cache.
        layer: Global layer id.
        logical: Index of the page within the request.
        pages: Page ids of the two looks.
        stages: Labels of the two looks, as in ``SNAPSHOTS``.
        layout: Format of the page.
        rows: Rows that the prompt fills.
        states: uint8[page_bytes] of :class:`ByteState`.
    """

    room: int
    attempt: int
    buffer: str
    layer: int
    logical: int
    pages: tuple[int, int]
    stages: tuple[str, str]
    layout: Layout
    rows: int
    states: U8

    @property
    def differing(self) -> int | None:
        """Bytes that differ; None where the bytes were not kept."""
        if (self.states == ByteState.ROW_DIFFERS).any():
            return None
        return int(np.isin(self.states, DIFFERENT).sum())


def compare_pages(layout: Layout, right: U8, seen: U8, rows: int) -> U8:
    """State of each byte of ``seen`` against ``right``, both uint8[page_bytes]; the first ``rows`` rows count."""
    bits = _BITS[right ^ seen]
    states = np.select(
        [bits == 0, (seen == 0) & (right != 0), bits <= 2],
        [ByteState.EQUAL, ByteState.ZEROED, ByteState.FEW_BITS],
        ByteState.MANY_BITS,
    ).astype(np.uint8)
    states[_row_of_byte(layout) >= rows] = ByteState.OUTSIDE
    return states


def compare_rows(layout: Layout, values: npt.NDArray[np.bool_], scales: tuple[U8, U8], rows: int) -> U8:
    """The same where only row digests were kept: ``values`` bool[rows] differ, ``scales`` are the scale bytes."""
    states = np.full(layout.page_bytes, ByteState.EQUAL, np.uint8)
    states[: layout.scale_base] = np.where(
        np.repeat(values, layout.value_bytes), ByteState.ROW_DIFFERS, ByteState.EQUAL
    )
    if layout.scale_bytes:
        right = np.zeros(layout.page_bytes, np.uint8)
        seen = right.copy()
        right[layout.scale_base :], seen[layout.scale_base :] = scales
        known = compare_pages(layout, right, seen, layout.rows)
        states[layout.scale_base :] = known[layout.scale_base :]
    states[_row_of_byte(layout) >= rows] = ByteState.OUTSIDE
    return states


def _row_of_byte(layout: Layout) -> I64:
    rows = np.arange(layout.rows)
    return np.concatenate([np.repeat(rows, layout.value_bytes), np.repeat(rows, layout.scale_bytes)])


def page_bytes(
    trace: Trace, room: int, attempt: int, buffer: str, layer: int, logical: int
) -> PageBytes | None:
    """The page where it was first seen, against the first later look that differs from it.

    Where no look differs the last one is taken; None where there are no two looks to compare.
    """
    looks = wrong_look(trace, room, attempt, buffer, layer, logical)
    if looks is None:
        return None
    seen, first, look = looks
    layout = LAYOUTS[seen.format[first]]
    rows = _rows_of_page(trace, room, attempt, logical, layout)
    states = _states(trace, layout, int(seen.content[first]), int(seen.content[look]), rows)
    if states is None:
        return None
    return _between(seen, first, look, (room, attempt, buffer, layer, logical), layout, rows, states)


def wrong_look(
    trace: Trace, room: int, attempt: int, buffer: str, layer: int, logical: int
) -> tuple[Seen, int, int] | None:
    """All looks at a request, where the page was first seen, and the first later look that differs (else the last)."""
    seen = snapshots_of(trace, room, attempt)
    here = np.array([name == (buffer, layer) for name in seen.slot], bool) & (seen.logical == logical)
    known = np.isin(seen.format, list(LAYOUTS)) & (seen.content >= 0)
    looks = np.flatnonzero(here & known)
    looks = looks[np.argsort(seen.stage[looks], kind="stable")]
    first = references(seen, looks).get(logical, -1)
    later = [look for look in looks.tolist() if look != first and not is_step(seen, look, first)]
    later = [look for look in later if seen.format[look] == seen.format[first]]
    if not later:
        return None
    layout = LAYOUTS[seen.format[first]]
    rows = _rows_of_page(trace, room, attempt, logical, layout)
    for look in later:
        states = _states(trace, layout, int(seen.content[first]), int(seen.content[look]), rows)
        if states is not None and np.isin(states, (*DIFFERENT, ByteState.ROW_DIFFERS)).any():
            return seen, first, look
    return seen, first, later[-1]


def _rows_of_page(trace: Trace, room: int, attempt: int, logical: int, layout: Layout) -> int:
    """Rows of the page that the prompt fills."""
    told = prompt_rows(trace, room, attempt)
    return layout.rows if told < 0 else max(0, min(layout.rows, told - logical * layout.rows))


def _between(
    seen: Seen,
    first: int,
    look: int,
    name: tuple[int, int, str, int, int],
    layout: Layout,
    rows: int,
    states: U8,
) -> PageBytes:
    pages = int(seen.page[first]), int(seen.page[look])
    stages = SNAPSHOTS[int(seen.stage[first])][0], SNAPSHOTS[int(seen.stage[look])][0]
    return PageBytes(*name, pages=pages, stages=stages, layout=layout, rows=rows, states=states)


def _states(trace: Trace, layout: Layout, right: int, seen: int, rows: int) -> U8 | None:
    contents = trace.contents
    ids = np.array([right, seen])
    if contents.has_data[ids].all():
        one, two = contents.data(ids)
        return compare_pages(layout, one, two, rows)
    if (contents.rows[ids] != layout.rows).any():
        return None
    values, words = contents.row_values(ids), contents.row_scales(ids)
    raw = [np.ascontiguousarray(word, "<u4").view(np.uint8) for word in words]
    scales = (raw[0], raw[1]) if layout.scale_bytes else (np.zeros(0, np.uint8),) * 2
    return compare_rows(layout, values[0] != values[1], scales, rows)
