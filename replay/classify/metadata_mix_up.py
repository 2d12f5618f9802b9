"""F28: the metadata that decode took for a request is another request's.

Signature: the room id in the slot, when decode takes it, is not that of the request it was taken for. A slot that was
given back keeps its old id until it is written anew (look-alike M9): only the moment at which decode reads it counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay.classify.base import Evidence, Kind, claims
from replay.findings import PageEvidence
from replay.timeline import Timeline
from replay.verdict import Confidence, RunnerUp

KIND = Kind(
    code="F28",
    shows="the metadata slot held another room's id when decode took it for a request",
    certain="the other room is a request of the trace",
    best=claims(digest="certain", pages="certain"),
    rivals=(("F09", "the pages are judged by themselves: it is the slot beside them that is another's"),),
)


def explain(timeline: Timeline, evidence: Evidence) -> Iterator[PageEvidence]:
    """One entry for each slot that was taken with another room's id in it."""
    table = timeline.trace.table("metadata")
    wrong = (table["moment"] == "read") & (table["holds"] >= 0) & (table["room"] >= 0)
    wrong &= table["holds"] != table["room"]
    numbers = timeline.request_column("metadata")
    rooms = {room for room, _ in timeline.requests}
    for row in np.flatnonzero(wrong & (numbers >= 0)).tolist():
        room, holds, slot = int(table["room"][row]), int(table["holds"][row]), int(table["slot"][row])
        process = int(table["process"][row])
        confidence: Confidence = "certain" if holds in rooms else "likely"
        yield PageEvidence(
            code="F28",
            stage="completion",
            confidence=confidence,
            process=process,
            request=int(numbers[row]),
            buffer="metadata",
            layer=-1,
            page=None,
            evidence=(
                f"slot {slot} held room {holds} when it was taken for room {room}",
                _way(timeline, row),
                "a page, row or table of the request is not concerned",
            ),
            rule=f"the slot is room {holds}'s",
            runner_up=RunnerUp("F09", "it is the slot beside the pages that is another's"),
        )


def _way(timeline: Timeline, row: int) -> str:
    """How the other room's id came into the slot that record ``row`` took, as far as the records tell."""
    table = timeline.trace.table("metadata")
    room, holds, slot = (int(table[name][row]) for name in ("room", "holds", "slot"))
    sent = (table["moment"] == "sent") & (table["room"] == room) & (table["attempt"] == table["attempt"][row])
    for source in np.flatnonzero(sent & (table["peer_slot"] == slot) & (table["holds"] == holds)).tolist():
        return f"the sender's slot {int(table['slot'][source])} held room {holds} when it was sent for room {room}"
    if holds in _before(timeline, row):
        return f"room {holds} had the slot before"
    return f"room {holds} never had the slot"


def _before(timeline: Timeline, row: int) -> set[int]:
    """Rooms that were given the slot of record ``row`` before it."""
    table = timeline.trace.table("metadata")
    earlier = (table["process"] == table["process"][row]) & (table["slot"] == table["slot"][row])
    earlier &= (table["seq"] < table["seq"][row]) & (table["room"] != table["room"][row])
    return set(table["room"][np.flatnonzero(earlier)].tolist())
