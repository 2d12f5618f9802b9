"""F05: the layers of the two sides are paired wrongly.

Signature: a descriptor brings a whole page from the right page id of another layer; the offset between the layers
is the same for all that are written. Layers that nobody writes are left with their old bytes (F01 by themselves).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims
from replay.classify.undelivered import look
from replay.units import units_of
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F05",
    shows="a descriptor brings the same page of another layer, and the bytes are that layer's",
    certain="nothing is left unexplained",
    best=claims(digest="certain", pages="certain"),
    rivals=(("F04", "the page id is right, the buffer is not"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that are those of the same logical page of another layer, as the descriptors say."""
    found = look(case, evidence)
    if found is None or len(found.here) != 1:
        return None
    pieces, timeline = evidence.descriptors.pieces, case.timeline
    piece = int(found.here[0])
    source, page = int(pieces.source[piece]), int(pieces.source_page[piece])
    whole = int(pieces.start[piece]) == 0 == int(pieces.source_start[piece])
    if source < 0 or source == found.source or page != found.source_page or not whole:
        return None
    if int(pieces.stop[piece]) != case.layout.page_bytes:
        return None
    other = timeline.buffers[source]
    snaps = timeline.snapshots
    looks = snaps.at_place("SE", source, page)
    looks = looks[(snaps.request[looks] == case.request) & (snaps.content[looks] >= 0)]
    if not len(looks) or not case.has("RC"):
        return None
    donor = units_of(timeline, snaps.content[looks[:1]])[0]
    explained = bad & (case.units["RC"] == donor) if len(donor) == len(bad) else np.zeros(len(bad), bool)
    if not explained.any():
        return None
    confidence: Confidence = "certain" if bool((explained == bad).all()) else "likely"
    offset = other.layer - case.buffer.layer
    return Explanation(
        code="F05",
        stage="descriptor",
        confidence=confidence,
        explained=explained,
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"the descriptor brings the sender's layer {other.layer} into layer {case.buffer.layer} ({offset:+d})",
            "the page holds exactly that layer's bytes",
        ),
        donor=Donor(case.room, other.layer, case.logical),
        rule=f"layer L holds the sender's layer L{offset:+d}",
        runner_up=RunnerUp("F04", "the page id is right, the buffer is not"),
    )
