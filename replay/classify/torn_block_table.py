"""F18: the block table that the kernel read was stale or torn.

Signature: the pages are right, and the table at the read names other pages than the allocator gave the
request, as a rule pages of another request. Told apart from content faults because the bytes of the named pages are
their owners' own.
"""

from __future__ import annotations

from replay.classify.base import Evidence, Kind, claims
from replay.classify.table_entries import listed, recorded, wrong_entries
from replay.findings import PageEvidence
from replay.tables import TableCase
from replay.timeline import Timeline
from replay.verdict import Donor, RunnerUp
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
        owner is not None or not timeline.owners.allocs_of_page(case.process, page)
        for owner, page in zip(owners, case.seen, strict=True)
    )
    # One entry alone may be torn as well as taken at another stride.
    multiple = len(case.given) == 1 and case.given[0] > 0 and case.seen[0] in _multiples(case.given[0])
    rooms = sorted({timeline.requests[owner[0]][0] for owner in owners if owner is not None})
    step, rows = (int(timeline.trace.table("read")[name][case.read]) for name in ("step", "rows"))
    rest = tuple(range(case.logical[0], -(-rows // info.layout.rows)))
    lines = [
        f"entries {listed(case.logical)} of the table were {listed(case.seen)}; the allocator gave "
        f"{listed(case.given)}",
        f"step {step}, {counted(rows, 'row')}"
        + ("; the table changed while the kernel ran" if case.during else ""),
    ]
    if rooms:
        lines.append(f"the pages named belong to room{'s' if len(rooms) > 1 else ''} {listed(rooms)}")
    return wrong_entries(
        timeline,
        case,
        "F18",
        sure=known and not multiple and recorded(timeline, evidence, case),
        evidence=tuple(lines),
        rule=f"entries from {case.logical[0]} on" if len(rest) > 1 and case.logical == rest else None,
        runner_up=RunnerUp(
            "F20" if multiple else "F17",
            "one entry alone is a multiple of its page, which may be chance"
            if multiple
            else "the pages named were never the request's own",
        ),
        donors=[owner and Donor(timeline.requests[owner[0]][0], info.layer, owner[1]) for owner in owners],
    )


def _multiples(page: int) -> range:
    """Pages that a wrong stride could have led to."""
    return range(2 * page, 129 * page, page)


def _owner(timeline: Timeline, case: TableCase, page: int) -> tuple[int, int] | None:
    """(request, logical page) that held ``page`` when the read was launched, or that held it last before."""
    before = [
        row
        for row in timeline.owners.allocs_of_page(case.process, page)
        if int(timeline.owners.allocs.seq[row]) < case.moment.seq
        and int(timeline.owners.allocs.request[row]) != case.request
    ]
    if not before:
        return None
    row = before[-1]
    return int(timeline.owners.allocs.request[row]), int(timeline.owners.allocs.logical[row])
