"""What the request's own descriptors do with a page that they do not deliver: shared by F01, F02, F04 and F05."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Pieces (rows of ``DescriptorMap.pieces``) of the request's sends to one receiver, seen from one of its pages.

    ``here`` write to this page, ``buffer`` to its buffer, ``leaving`` carry its source page away. ``source`` and
    ``source_page`` are where the page lies at the sender.
    """

    here: I64
    buffer: I64
    leaving: I64
    every: I64
    source: int
    source_page: int
    sender: int


def look(case: Case, evidence: Evidence) -> Undelivered | None:
    """The request's descriptors around one page, None where they are not known whole or the page's source is not."""
    row = next((case.rows[stage] for stage in ("SE", "SE+", "ST") if stage in case.rows), -1)
    snaps, descriptors = case.timeline.snapshots, evidence.descriptors
    if row < 0 or int(snaps.buffer[row]) < 0 or int(snaps.process[row]) == case.process:
        return None
    sender, source, source_page = int(snaps.process[row]), int(snaps.buffer[row]), int(snaps.page[row])
    pieces, every = descriptors.pieces, descriptors.pieces_of(case.request, case.process)
    if not len(every) or not evidence.covers_sends_to(case.buffer.number, sender):
        return None
    into = every[pieces.buffer[every] == case.buffer.number]
    carried = (pieces.source[every] == source) & (pieces.source_page[every] == source_page)
    return Undelivered(
        here=into[pieces.page[into] == case.page],
        buffer=into,
        leaving=every[carried],
        every=every,
        source=source,
        source_page=source_page,
        sender=sender,
    )


def still_old(case: Case, bad: Bool) -> Bool:
    """Units of ``bad`` that hold what was there before the transfer."""
    return bad & case.same("RC", "RC-") if case.has("RC", "RC-") else np.zeros(len(bad), bool)
