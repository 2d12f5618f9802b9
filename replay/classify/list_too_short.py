"""F02: a page list is too short: the last logical pages are not sent.

Signature: in every layer the first pages (of the request, or of each chunk) are delivered and no descriptor touches
the last ones, nor carries their source pages anywhere; they keep their old bytes. Or: the sender named more pages of
the request than its receiver announced, and the request was reported complete all the same; then no page of the
receiver is known to look at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims
from replay.classify.undelivered import look, still_old
from replay.findings import PageEvidence
from replay.ranges import byte_ranges
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding, RunnerUp
from replay.words import counted

Bool = npt.NDArray[np.bool_]

KIND = Kind(
    code="F02",
    shows=(
        "the first pages of the request or of a chunk are brought, none from some page on; or the sender "
        "named pages that the receiver never announced"
    ),
    certain=(
        "the sender's descriptors are all recorded, the old bytes are still there, the allocation "
        "of every page is known"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(("F01", "the first pages of the same buffer were sent"),),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the request's page list ends before this page."""
    found = look(case, evidence)
    if found is None or len(found.here) or len(found.leaving) or not len(found.buffer):
        return None
    pieces = evidence.descriptors.pieces
    sent = np.unique(pieces.page[found.buffer])
    rows, per_page = int(case.timeline.request_rows[case.request]), case.layout.rows
    count = max(case.logical + 1, -(-rows // per_page))
    given = case.timeline.owners.given_pages(
        np.full(count, case.process), np.full(count, case.request), np.arange(count)
    )
    inside = np.isin(given, sent)
    missing = _left_out(inside, _chunks(case, evidence)) if (given >= 0).all() else None
    if not missing:
        return None
    old = still_old(case, bad)
    confidence: Confidence = "certain" if bool((old == bad).all()) else "likely"
    return Explanation(
        code="F02",
        stage="descriptor",
        confidence=confidence,
        explained=bad.copy(),
        expected=next(stage for stage in ("SE", "SE+", "ST") if case.has(stage)),
        observed="RC",
        evidence=(
            _how(missing, len(inside)),
            *(("the pages hold what was there before the transfer",) if confidence == "certain" else ()),
        ),
        runner_up=RunnerUp("F01", "the first pages of the same buffer were sent"),
    )


def _chunks(case: Case, evidence: Evidence) -> dict[int, int]:
    """First logical page -> number of the chunk, of all chunks of the request that were sent to this receiver.

    Empty where a page begins several chunks: then it is not known which list is meant.
    """
    descriptors = evidence.descriptors
    rows = descriptors.sends_to(case.request, case.process)
    sends = descriptors.sends
    told = {(int(sends["logical"][row]), int(sends["chunk"][row])) for row in rows}
    found = dict(told)
    return found if len(found) == len(told) else {}


def _left_out(inside: Bool, chunks: dict[int, int]) -> list[tuple[int, int]] | None:
    """Runs [start, stop) of logical pages that were not sent, where short lists explain them all.

    The pages that were sent are the first ones, and from some page on none is; or the first ones of each chunk: then a
    run ends where the very next chunk begins (none was left out whole), and the chunk that it is cut from brought its
    first page.
    """
    edges = np.flatnonzero(np.diff(inside, prepend=True, append=True)).tolist()
    found = list(zip(edges[::2], edges[1::2], strict=True))
    for start, stop in found:
        if start == 0:
            return None
        if stop < len(inside):
            first = max((page for page in chunks if page <= start), default=-1)
            if first in (-1, start) or stop not in chunks or not 0 <= chunks[first] == chunks[stop] - 1:
                return None
    return found


def _how(missing: list[tuple[int, int]], count: int) -> str:
    first, stop = missing[0]
    if len(missing) == 1 and stop == count:
        return f"the descriptors bring {counted(first, 'page')} and none from logical page {first} on"
    pages = [page for run in missing for page in range(*run)]
    named = ", ".join(map(str, pages[:8])) + (", ..." if len(pages) > 8 else "")
    noun = "page" if len(pages) == 1 else "pages"
    return (
        f"the descriptors bring the first pages of each chunk and leave out its last: logical {noun} {named}"
    )


def unannounced(timeline: Timeline, evidence: Evidence) -> list[PageEvidence]:
    """Pages with valid rows that a sender named, of requests that arrived without their receiver announcing them."""
    found: list[PageEvidence] = []
    for (process, request), announced in _announced(timeline).items():
        rows = int(timeline.request_rows[request])
        if rows < 0 or timeline.marked[request] or not evidence.covers(process, "receive"):
            continue
        if (process, request) in timeline.owners.ended and _unread(timeline, evidence, process, request):
            continue
        for sender, named in _named(timeline, evidence, process, request).items():
            if not evidence.covers(sender, "send"):
                continue
            more = {page for page in named - announced if page > max(announced, default=-1)}
            # Few requests have such pages, and looking for their looks goes through all looks of the trace.
            lost = sorted(more - _looked_at(timeline, process, request)) if more else []
            lines = (
                f"the sender named {len(named)} pages of the request, its receiver announced {len(announced)}",
                "the request was reported complete all the same",
            )
            found += _lost(timeline, process, request, lost, rows, lines)
    return found


def _announced(timeline: Timeline) -> dict[tuple[int, int], set[int]]:
    """(process, request) that arrived -> logical pages that it announced."""
    arrived = set(timeline.phases("arrived"))
    states = timeline.trace.table("transfer_state")
    numbers = timeline.request_column("transfer_state")
    for row in np.flatnonzero(states["state"] == "arrived").tolist():
        arrived.add((int(states["process"][row]), int(numbers[row])))
    receive, request = timeline.trace.table("receive"), timeline.request_column("receive")
    pages = receive.ragged("pages")
    found: dict[tuple[int, int], set[int]] = {}
    for row in range(len(receive)):
        owner = int(receive["process"][row]), int(request[row])
        if owner in arrived:
            first = int(receive["logical"][row])
            found.setdefault(owner, set()).update(range(first, first + len(pages[row])))
    return found


def _named(timeline: Timeline, evidence: Evidence, process: int, request: int) -> dict[int, set[int]]:
    """Sending process -> logical pages that it named for the request in transfers to ``process``."""
    sends, peers = evidence.descriptors.sends, evidence.descriptors.peers
    pages = sends.ragged("pages")
    found: dict[int, set[int]] = {}
    for row in evidence.descriptors.sends_of(request).tolist():
        first = int(sends["logical"][row])
        if int(peers[row]) == process and first >= 0:
            found.setdefault(int(sends["process"][row]), set()).update(range(first, first + len(pages[row])))
    return found


def _unread(timeline: Timeline, evidence: Evidence, process: int, request: int) -> bool:
    return evidence.covers(process, "read", "alloc") and (process, request) not in timeline.readers


def _looked_at(timeline: Timeline, process: int, request: int) -> set[int]:
    """Logical pages of which the receiver has a look of its own: the ladder judges those."""
    snaps = timeline.snapshots
    mine = (snaps.process == process) & (snaps.request == request)
    return set(snaps.logical[mine].tolist())


def _lost(
    timeline: Timeline, process: int, request: int, lost: list[int], rows: int, lines: tuple[str, ...]
) -> list[PageEvidence]:
    found = []
    for buffer in timeline.buffers if lost else ():
        if buffer.process != process:
            continue
        count = buffer.layout.rows
        for logical in lost:
            valid = min(count, rows - logical * count)
            if valid <= 0:
                continue
            mask = np.arange(count) < valid
            given = timeline.owners.given_pages(np.array([process]), np.array([request]), np.array([logical]))
            found.append(
                PageEvidence(
                    code="F02",
                    stage="descriptor",
                    confidence="certain",
                    process=process,
                    request=request,
                    buffer=buffer.name,
                    layer=buffer.layer,
                    page=PageFinding(
                        logical=logical,
                        physical=int(given[0]),
                        value_rows=((0, valid - 1),),
                        scale_rows=((0, valid - 1),) if buffer.layout.scale_bytes else (),
                        byte_ranges=byte_ranges(buffer.layout, mask, mask)[0],
                    ),
                    evidence=lines,
                )
            )
    return found
