"""F05: the layers of the two sides are paired wrongly.

Signature: a descriptor brings a whole page of another layer, alone or after the right one; the offset between the
layers is the same for all that are written. Layers whose own pages went elsewhere keep their old bytes.

Chosen over F01, where the layer is sent nowhere; over F04, where the buffer is right and the page is not; over F31,
where nothing but the page's own source is brought to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves
from replay.classify.undelivered import Undelivered, look, still_old
from replay.units import units_of
from replay.verdict import Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F05",
    shows=(
        "a descriptor brings the same page of another layer, and the bytes are that layer's; or the page's own bytes "
        "went into another layer, and it is old"
    ),
    certain="nothing is left unexplained",
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F04", "the page id is right, the buffer is not"),
        ("F01", "the layer was sent, into another one"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that are those of the same logical page of another layer, as the descriptors say, or that are
    old because the page's own bytes went to another layer.
    """
    found = look(case, evidence)
    if found is None or not case.has("RC"):
        return None
    return _brought(case, evidence, found, bad) or _carried_away(case, evidence, found, bad)


def _brought(case: Case, evidence: Evidence, found: Undelivered, bad: Bool) -> Explanation | None:
    """Another layer's page was written here, alone or after the right one."""
    pieces, timeline, snaps = evidence.descriptors.pieces, case.timeline, case.timeline.snapshots
    for piece in found.here.tolist():
        source, page = int(pieces.source[piece]), int(pieces.source_page[piece])
        if source in (-1, found.source) or not _whole(case, evidence, piece):
            continue
        other = timeline.buffers[source]
        if other.name != case.buffer.name or other.layer == case.buffer.layer:
            continue
        looks = np.concatenate([snaps.at_place(name, source, page) for name in ("SE", "ST")])
        looks = looks[(snaps.request[looks] == case.request) & (snaps.content[looks] >= 0)]
        looks = looks[snaps.logical[looks] == case.logical]
        if not len(looks):
            continue
        donor = units_of(timeline, snaps.content[looks[:1]])[0]
        explained = bad & (case.units["RC"] == donor) if len(donor) == len(bad) else np.zeros(len(bad), bool)
        if not halves(explained)[0].any():
            continue
        offset = other.layer - case.buffer.layer
        return Explanation(
            code="F05",
            stage="descriptor",
            confidence="certain" if bool((explained == bad).all()) else "likely",
            explained=explained,
            expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
            observed="RC",
            evidence=(
                f"the descriptor brings the sender's layer {other.layer} into layer {case.buffer.layer} ({offset:+d})"
                + (", beside the right one" if len(found.here) > 1 else ""),
                "the page holds exactly that layer's bytes",
            ),
            donor=Donor(case.room, other.layer, case.logical),
            rule=f"layer L holds the sender's layer L{offset:+d}",
            runner_up=RunnerUp("F04", "the page id is right, the buffer is not"),
        )
    return None


def _carried_away(case: Case, evidence: Evidence, found: Undelivered, bad: Bool) -> Explanation | None:
    """Nothing is written here: the page went whole to the same request's page of another layer."""
    pieces, timeline = evidence.descriptors.pieces, case.timeline
    if len(found.here) or not len(found.leaving):
        return None
    layers = set()
    for piece in found.leaving.tolist():
        buffer = int(pieces.buffer[piece])
        if buffer < 0 or not _whole(case, evidence, piece) or int(pieces.page[piece]) != case.page:
            return None
        other = timeline.buffers[buffer]
        if other.name != case.buffer.name or other.layer == case.buffer.layer:
            return None
        layers.add(other.layer)
    if len(layers) != 1:
        return None
    layer = layers.pop()
    old = still_old(case, bad)
    offset = case.buffer.layer - layer
    return Explanation(
        code="F05",
        stage="descriptor",
        confidence="certain" if bool((old == bad).all()) else "likely",
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            f"the descriptors bring the sender's layer {case.buffer.layer} into layer {layer} and nothing into layer "
            f"{case.buffer.layer}",
            *(("the page holds what was there before the transfer",) if bool((old == bad).all()) else ()),
        ),
        rule=f"layer L holds the sender's layer L{offset:+d}",
        runner_up=RunnerUp("F01", "the layer was sent, into another one"),
    )


def _whole(case: Case, evidence: Evidence, piece: int) -> bool:
    pieces = evidence.descriptors.pieces
    whole = int(pieces.start[piece]) == 0 == int(pieces.source_start[piece])
    return whole and int(pieces.stop[piece]) == case.layout.page_bytes
