"""Rows and bytes that differ, as ranges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.verdict import Ranges

Bool = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]

#: Equal bytes at the edge of a differing row are taken for a real border only from this many on: fewer agree by
#: chance (scale bytes and fp8 codes repeat).
CHANCE_BYTES = 8


def ranges(rows: Bool) -> Ranges:
    """Closed ranges of the set rows."""
    index = np.flatnonzero(rows)
    if not len(index):
        return ()
    cuts = np.flatnonzero(np.diff(index) > 1)
    starts = index[np.concatenate([[0], cuts + 1])].tolist()
    ends = index[np.concatenate([cuts, [len(index) - 1]])].tolist()
    return tuple(zip(starts, ends, strict=True))


def byte_ranges(
    layout: Layout, value_rows: Bool, scale_rows: Bool, expected: U8 | None = None, observed: U8 | None = None
) -> tuple[Ranges, int | None]:
    """Half-open byte ranges of the rows that differ, and how many bytes in them differ.

    With the bytes at hand a range is narrowed to where the difference begins and ends inside its first and last row;
    without them it covers whole rows and the count is None.
    """
    spans = [layout.value_range(first, last) for first, last in ranges(value_rows)]
    if layout.scale_bytes:
        spans += [layout.scale_range(first, last) for first, last in ranges(scale_rows)]
    count = None
    if expected is not None and observed is not None and len(expected) == len(observed) == layout.page_bytes:
        different = expected != observed
        count = sum(int(different[start:stop].sum()) for start, stop in spans)
        spans = [_narrow(different, start, stop) for start, stop in spans]
    return joined(tuple(spans), (), closed=False), count


def _narrow(different: Bool, start: int, stop: int) -> tuple[int, int]:
    inside = np.flatnonzero(different[start:stop])
    if not len(inside):
        return start, stop
    first, last = start + int(inside[0]), start + int(inside[-1]) + 1
    return (
        first if first - start >= CHANCE_BYTES else start,
        last if stop - last >= CHANCE_BYTES else stop,
    )


def joined(first: Ranges, second: Ranges, *, closed: bool) -> Ranges:
    """Both lists of ranges as one, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((*first, *second)):
        if merged and start <= merged[-1][1] + int(closed):
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
