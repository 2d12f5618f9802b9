"""What a side's own stores and copies wrote to a page between two looks at it: shared by F15, F20, F22, F23 and F29."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.bisect import Case
from replay.classify.base import Evidence
from replay.local_writes import LocalWrite
from replay.order import Moment

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A page, and the two looks between which it changed."""

    process: int
    buffer: int
    page: int
    earlier: str  #: the look from before the change
    expected: str  #: the look that shows what should be there
    begin: Moment
    end: Moment
    at_source: bool


def place_of(case: Case, stage: str) -> Place | None:
    """Where and since when the page of ``stage`` differs: since ST at the source, since RC at the destination, and for
    RC itself since the look before the transfer.

    None where there is no look from before the change, or the look is proven to be the older one.
    """
    snaps = case.timeline.snapshots
    at_source = stage in ("SE", "SE+")
    earlier = "ST" if at_source else next((name for name in ("RC", "OWN", "ST") if case.has(name)), "")
    expected = earlier
    if stage == "RC":
        earlier = "RC-"
        expected = next((name for name in ("SE+", "SE", "ST") if case.has(name)), "RC-")
    if stage not in case.rows or earlier not in case.rows:
        return None
    row, before = case.rows[stage], case.rows[earlier]
    buffer, page = int(snaps.buffer[row]), int(snaps.page[row])
    if buffer < 0 or buffer != int(snaps.buffer[before]) or page != int(snaps.page[before]):
        return None
    begin, end = snaps.moment_of(before), snaps.moment_of(row)
    if case.timeline.order.before(end, begin):
        return None
    return Place(
        int(snaps.process[row]),
        buffer,
        page,
        earlier,
        expected,
        begin,
        end,
        at_source,
    )


def writes(evidence: Evidence, place: Place) -> Iterator[tuple[LocalWrite, bool]]:
    """Own writes between the two looks, and whether order proves that they lie there."""
    yield from evidence.local.between(place.buffer, place.page, place.begin, place.end)


def quiet(evidence: Evidence, place: Place) -> bool:
    """Whether no transfer can have written the page between the looks, as far as complete hooks can tell."""
    if evidence.descriptors.may_write(place.buffer, place.page, place.begin, place.end):
        return False
    return evidence.covers_sends() and evidence.covers(place.process, "alloc")


def rows_mask(layout: Layout, rows: I64) -> Bool:
    """Units of ``rows`` of a page, values and scales."""
    mask = np.zeros(layout.rows, bool)
    mask[rows] = True
    return np.concatenate([mask, mask])
