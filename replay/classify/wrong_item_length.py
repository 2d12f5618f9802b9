"""F03: the transfer was set up with another item length or page pitch than the pages have.

Signature: the descriptors themselves. (a) Addresses computed with a wrong pitch displace page i by i * delta;
(b) a right pitch with a short length leaves the tail of every page old. The bytes that differ are those which no
descriptor of the request brings from the right place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, unit_mask
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F03",
    shows=(
        "descriptors of another length or pitch than the page has; every differing row is one "
        "they do not bring"
    ),
    certain=(
        "nothing is left unexplained; the sender's descriptors are all recorded, or (of another request's that hit the "
        "page) the bytes are those that they bring"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(("F06", "the item lengths themselves disagree with the page size"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (RC differs from the source) that the request's descriptors do not bring."""
    descriptors, timeline = evidence.descriptors, case.timeline
    source_stage = "SE" if case.has("SE") else "SE+"
    if not case.has(source_stage):
        return None
    snaps = timeline.snapshots
    source_buffer = int(snaps.buffer[case.rows[source_stage]])
    source_page = int(snaps.page[case.rows[source_stage]])
    if not len(descriptors.sends_of(case.request)) or source_buffer < 0:
        return None
    source = timeline.buffers[source_buffer]
    size = case.layout.page_bytes
    lengths = descriptors.lengths_to(case.request, case.buffer)
    # Engines join neighbouring pages to one descriptor; what they call an item tells a double length from two pages.
    told = descriptors.told_lengths(case.request, case.process)
    joined = not told or size in told
    wrong = [
        length for length in lengths if length != size and not (joined and length % case.buffer.pitch == 0)
    ]
    same_format = source.layout == case.layout
    if not wrong and same_format:
        return None
    right = descriptors.own_bytes(
        case.request, case.buffer.number, case.page, source_buffer, source_page, case.logical
    )
    if not same_format:
        right[:] = False  # the bytes of another format are right nowhere
    delivered = unit_mask(case.layout, right)
    explained = bad & ~delivered
    foreign = _displaced_foreign(case, evidence)
    explained |= bad & delivered & unit_mask(case.layout, foreign, some=True)
    values, scales = halves(explained)
    if not explained.any():
        return None
    covered = evidence.covers_sends_to(case.buffer.number, source.process)
    shift = _displacement(case, evidence, source_buffer, source_page)
    if same_format and size in told and not shift:
        return None  # the lengths told are right: parts are left out or repeated, or a rank's slice was not recorded
    sure = covered and bool((explained == bad).all())
    confidence: Confidence = "certain" if sure else "likely"
    used = ", ".join(str(length) for length in wrong) or str(source.layout.page_bytes)
    lines = [
        f"the descriptors move {used} bytes a page; a page of {case.buffer.name} here has {size} ({case.layout.name})",
        f"{in_words(values, scales)} are what no descriptor brings from the right place",
    ]
    if not same_format:
        lines.append(
            f"the sides hold different formats: {source.layout.name} ({source.layout.page_bytes} bytes a page) "
            f"and {case.layout.name} ({size})"
        )
    rule = None
    if shift:
        rule = f"page {case.logical} lands displaced by {shift:+d} bytes"
        lines.append(f"logical page {case.logical} was written {shift:+d} bytes away from its place")
    return Explanation(
        code="F03",
        stage="descriptor",
        confidence=confidence,
        explained=explained,
        expected=source_stage,
        observed="RC",
        evidence=tuple(lines),
        rule=rule,
        runner_up=RunnerUp("F06", "the item lengths themselves disagree with the page size"),
    )


def overwritten(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (a page that changed after it had arrived) that another request's displaced descriptors hit.

    A transfer with a wrong pitch writes outside its own pages as well, whenever it runs.
    """
    descriptors, size = evidence.descriptors, case.layout.page_bytes
    pieces = descriptors.pieces
    rooms, hit, proven = set(), np.zeros(size, bool), np.zeros(size, bool)
    for row in descriptors.touching(case.buffer.number, case.page).tolist():
        other = int(pieces.request[row])
        if other in (case.request, -1) or descriptors.lengths_to(other, case.buffer) == [size]:
            continue
        whole = int(pieces.start[row]) == 0 and int(pieces.stop[row]) == size
        in_place = int(pieces.source_start[row]) == int(pieces.start[row])
        if whole or (in_place and size in descriptors.told_lengths(other, case.process)):
            continue  # the page, or a rank's slice of it
        begin = case.moment("RC") if case.has("RC") else None
        if not descriptors.may_run(int(pieces.send[row]), begin, case.moment(stage)):
            continue
        rooms.add(case.timeline.requests[other][0])
        hit[int(pieces.start[row]) : int(pieces.stop[row])] = True
        proven |= _brought(case, evidence, row, stage)
    explained = bad & unit_mask(case.layout, hit, some=True)
    before, now = case.data("RC" if case.has("RC") else "SE"), case.data(stage)
    # Without RC the source stands for it, whose pages may have another size.
    same = before is not None and now is not None and len(before) == len(now)
    if before is not None and now is not None and same:
        # What changed must be what they bring, byte for byte: a page may change for another reason.
        explained &= unit_mask(case.layout, proven | (before == now))
    if not explained.any():
        return None
    values, scales = halves(explained)
    return Explanation(
        code="F03",
        stage="descriptor",
        confidence="certain" if same and bool((explained == bad).all()) else "likely",
        explained=explained,
        expected="RC" if case.has("RC") else "SE",
        observed=stage,
        evidence=(
            f"{in_words(values, scales)} lie where descriptors of room "
            f"{', '.join(str(room) for room in sorted(rooms))} write, whose item length is not this page's ({size})",
            *(("the bytes there are those which these descriptors bring",) if same else ()),
        ),
        aliases=tuple(sorted(rooms)),
        runner_up=RunnerUp("F14", "the writer never owned this page: its addresses are displaced"),
    )


def _brought(case: Case, evidence: Evidence, row: int, stage: str) -> Bool:
    """Bytes of the page that hold exactly what one piece brings from its source (where the bytes were kept)."""
    pieces, snaps = evidence.descriptors.pieces, case.timeline.snapshots
    found = np.zeros(case.layout.page_bytes, bool)
    observed = case.data(stage)
    contents = case.timeline.trace.contents
    start, stop, at = int(pieces.start[row]), int(pieces.stop[row]), int(pieces.source_start[row])
    for look in snaps.at_place("SE", int(pieces.source[row]), int(pieces.source_page[row])).tolist():
        content = int(snaps.content[look])
        if observed is None or content < 0 or not contents.has_data[content]:
            continue
        source = np.asarray(contents.data(np.array([content]))[0])[at : at + stop - start]
        found[start : start + len(source)] |= observed[start : start + len(source)] == source
    return found


def _displaced_foreign(case: Case, evidence: Evidence) -> Bool:
    """Bytes of the page that other requests' descriptors of a wrong length write to."""
    pieces = evidence.descriptors.pieces
    hit = np.zeros(case.layout.page_bytes, bool)
    for row in evidence.descriptors.touching(case.buffer.number, case.page).tolist():
        whole = int(pieces.start[row]) == 0 and int(pieces.stop[row]) == case.layout.page_bytes
        if int(pieces.request[row]) == case.request and int(pieces.source_start[row]) == int(
            pieces.start[row]
        ):
            continue
        if not whole:
            hit[int(pieces.start[row]) : int(pieces.stop[row])] = True
    return hit


def _displacement(case: Case, evidence: Evidence, source_buffer: int, source_page: int) -> int | None:
    """How far from its place the first byte of the page was written, None where it was not sent at all."""
    pieces = evidence.descriptors.pieces
    chosen = np.flatnonzero(
        (pieces.request == case.request)
        & (pieces.source == source_buffer)
        & (pieces.source_page == source_page)
        & (pieces.buffer == case.buffer.number)
    )
    for row in chosen.tolist():
        landed = int(pieces.page[row]) * case.buffer.pitch + int(pieces.start[row])
        wanted = case.page * case.buffer.pitch + int(pieces.source_start[row])
        return landed - wanted
    return None
