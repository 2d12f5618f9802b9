"""F18: the block table that the kernel read was stale or torn.

Signature: the pages are right, and the table at the read names other pages than the allocator gave the
request, as a rule pages of another request. Told apart from content faults because the bytes of the named pages are
their owners' own.
"""

from __future__ import annotations

from replay.classify.base import Evidence, Kind, claims
from replay.findings import PageEvidence
from replay.tables import TableCase
from replay.timeline import Timeline
from replay.verdict import Confidence, Donor, PageFinding, RunnerUp
from replay.words import counted

KIND = Kind(
    code="F18",
    shows="entries differ from the allocator's record",
    certain="the allocation is ordered before the read, and every foreign page has a known owner",
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F14", "the bytes of the pages named are their owners' own"),
        ("F17", "the pages named were never the request's own"),
        ("F20", "no factor leads from the allocator's pages to the entries"),
    ),
)


def explain(timeline: Timeline, evidence: Evidence, case: TableCase) -> list[PageEvidence]:
    """One entry for each wrong table entry of one read."""
    info = timeline.buffers[case.buffer]
    owners = [_owner(timeline, case, page) for page in case.seen]
    # A page that nobody was ever given (the reserved one) has no owner to know.
    known = any(owner is not None for owner in owners) and all(
        owner is not None or not timeline.allocs_of_page(case.process, page)
        for owner, page in zip(owners, case.seen, strict=True)
    )
    given_before = all(
        row is not None and timeline.order.before(timeline.allocs.moment_of(row), case.moment)
        for row in (timeline.alloc_row(case.process, case.request, page) for page in case.given)
    )
    # Right before the kernel and wrong after it: what the kernel itself saw is not proven.
    # One entry alone may be torn as well as taken at another stride.
    multiple = len(case.given) == 1 and case.given[0] > 0 and case.seen[0] in _multiples(case.given[0])
    sure = not case.during and known and given_before and evidence.covers(case.process, "alloc", "read")
    sure = sure and not multiple
    confidence: Confidence = "certain" if sure else "likely"
    rooms = sorted({timeline.requests[owner[0]][0] for owner in owners if owner is not None})
    table = timeline.trace.table("read")
    lines = [
        f"entries {_list(case.logical)} of the table were {_list(case.seen)}; the allocator gave {_list(case.given)}",
        f"step {int(table['step'][case.read])}, {counted(int(table['rows'][case.read]), 'row')}"
        + ("; the table changed while the kernel ran" if case.during else ""),
    ]
    if rooms:
        lines.append(f"the pages named belong to room{'s' if len(rooms) > 1 else ''} {_list(rooms)}")
    found = []
    for logical, seen, owner in zip(case.logical, case.seen, owners, strict=True):
        donor = None
        if owner is not None:
            donor = Donor(timeline.requests[owner[0]][0], info.layer, owner[1])
        found.append(
            PageEvidence(
                code="F18",
                stage="table",
                confidence=confidence,
                process=case.process,
                request=case.request,
                buffer=info.name,
                layer=info.layer,
                page=PageFinding(logical=logical, physical=seen, donor=donor),
                evidence=tuple(lines),
                runner_up=RunnerUp(
                    "F20" if multiple else "F17",
                    "one entry alone is a multiple of its page, which may be chance"
                    if multiple
                    else "the pages named were never the request's own",
                ),
                rule=f"entries from {case.logical[0]} on" if len(case.logical) > 1 else None,
            )
        )
    return found


def _multiples(page: int) -> range:
    """Pages that a wrong stride could have led to."""
    return range(2 * page, 129 * page, page)


def _owner(timeline: Timeline, case: TableCase, page: int) -> tuple[int, int] | None:
    """(request, logical page) that held ``page`` when the read was launched, or that held it last before."""
    before = [
        row
        for row in timeline.allocs_of_page(case.process, page)
        if int(timeline.allocs.seq[row]) < case.moment.seq
        and int(timeline.allocs.request[row]) != case.request
    ]
    if not before:
        return None
    row = before[-1]
    return int(timeline.allocs.request[row]), int(timeline.allocs.logical[row])


def _list(items: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown + (", ..." if len(items) > 6 else "")
