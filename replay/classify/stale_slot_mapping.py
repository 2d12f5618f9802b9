"""F17: rows are looked for, or put, where an earlier translation of the request's pages says.

Signature: right rows in wrong slots. A store names slots that are off by one constant from those of its rows, or that
lie in pages which an earlier version of the translation names; a read goes through a table of an earlier version. Told
apart from a torn table because the pages were the request's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replay.classify.base import Evidence, Kind, claims
from replay.classify.table_entries import listed, recorded, wrong_entries
from replay.findings import PageEvidence
from replay.ranges import ranges
from replay.slots import SlotCase
from replay.tables import TableCase
from replay.timeline import Timeline
from replay.verdict import Confidence, Donor, PageFinding, RunnerUp

KIND = Kind(
    code="F17",
    shows=(
        "a store's slots are off by a constant from those of its rows, or a table or slots are those of an "
        "earlier version of the request's own translation"
    ),
    certain=(
        "the allocation is ordered before the store or read; at the read: the version used is told and older than the "
        "last; at the store: all slots are those of an older version, or two rows and more are off by the same"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F18", "the pages named were the request's own before"),
        ("F20", "the slots are off by one number of rows, not by a factor"),
        ("F23", "the rows stored are rows of the request"),
    ),
)


class Versions:
    """The recorded translations of every request, by room."""

    def __init__(self, timeline: Timeline) -> None:
        """Read the mapping table."""
        self._table = timeline.trace.table("mapping")
        self._pages = self._table.ragged("pages")
        self._of: dict[tuple[int, int], list[int]] = {}
        columns = zip(self._table["process"].tolist(), self._table["room"].tolist(), strict=True)
        for row, key in enumerate(columns):
            self._of.setdefault(key, []).append(row)

    def page(self, row: int, logical: int) -> int:
        """Page of a logical page in one version, -1 where it does not say."""
        place = logical - int(self._table["logical"][row])
        pages = self._pages[row]
        return int(pages[place]) if 0 <= place < len(pages) else -1

    def earlier(
        self, process: int, room: int, seq: int, version: int, wrong: Iterable[tuple[int, int]]
    ) -> int:
        """A version of the room that was replaced before ``seq`` and names all of ``wrong`` (logical page, page).

        Its number, -1 where there is none. ``version`` is the one that the record says was used, -1 if it does not.
        """
        rows = [row for row in self._of.get((process, room), []) if int(self._table["seq"][row]) < seq]
        for row in reversed(rows[:-1]):
            number = int(self._table["version"][row])
            if version in (-1, number) and all(self.page(row, k) == page for k, page in wrong):
                return number
        return -1


def at_read(
    timeline: Timeline, evidence: Evidence, case: TableCase, versions: Versions
) -> list[PageEvidence]:
    """A table of an earlier version; nothing where the pages it names were never the request's own."""
    room = timeline.requests[case.request][0]
    table = timeline.trace.table("read")
    wrong = list(zip(case.logical, case.seen, strict=True))
    version = int(table["mapping"][case.read])
    found = versions.earlier(case.process, room, case.moment.seq, version, wrong)
    if found < 0 and not all(_held(timeline, case, room, k, page) for k, page in wrong):
        return []
    told = found >= 0 and version == found
    named = f"version {found} of the translation" if found >= 0 else "an earlier allocation"
    layer = timeline.buffers[case.buffer].layer
    return wrong_entries(
        timeline,
        case,
        "F17",
        sure=told and recorded(timeline, evidence, case),
        evidence=(
            f"entries {listed(case.logical)} of the table are those of {named}, which room {room} has replaced since",
            f"step {int(table['step'][case.read])}"
            + (
                f": the kernel was given version {version}"
                if told
                else ": which version was used is not told"
            ),
        ),
        rule=f"the table is that of {named}",
        runner_up=RunnerUp("F18", "the pages named were the request's own before"),
        donors=[Donor(room, layer, logical) for logical in case.logical],
    )


def _held(timeline: Timeline, case: TableCase, room: int, logical: int, page: int) -> bool:
    """Whether the room was given ``page`` for this logical page before, in this attempt or an earlier one."""
    allocs = timeline.owners.allocs
    return any(
        timeline.requests[int(allocs.request[row])][0] == room
        and int(allocs.logical[row]) == logical
        and int(allocs.seq[row]) < case.moment.seq
        for row in timeline.owners.allocs_of_page(case.process, page)
        if int(allocs.request[row]) >= 0
    )


def at_store(
    timeline: Timeline, evidence: Evidence, cases: list[SlotCase], versions: Versions
) -> list[PageEvidence]:
    """The misplaced rows of all stores of one request into one buffer."""
    first = cases[0]
    offsets = np.unique(np.concatenate([case.slots - case.right for case in cases]))
    info = timeline.buffers[first.buffer]
    table = timeline.trace.table("store")
    room = timeline.requests[first.request][0]
    count = sum(len(case.logical) for case in cases)
    olds = {_old_version(timeline, case, versions, room, info.layout.rows) for case in cases}
    code, rule, sure = "unclassified", None, False
    if -1 not in olds:
        named = " and ".join(map(str, sorted(olds)))
        code, rule, sure = "F17", f"the slots are those of version {named} of the translation", True
    elif len(offsets) == 1 and abs(int(offsets[0])) < 4 * info.layout.rows:
        code, rule = (
            "F17",
            f"the slots are {abs(int(offsets[0]))} rows {'past' if offsets[0] > 0 else 'before'} their own",
        )
        sure = count >= 2
    sure = sure and all(_given_before(timeline, case) for case in cases)
    sure = sure and evidence.covers(first.process, "alloc", "store")
    confidence: Confidence = "certain" if sure and code == "F17" else "likely"
    lines = (
        f"{count} rows of {len(cases)} stores went to other slots than the allocator's record says",
        f"step {int(table['step'][first.store])}: row {int(first.logical[0])} went to slot {int(first.slots[0])}, its "
        f"own is {int(first.right[0])}",
    )
    logical = np.concatenate([case.logical for case in cases])
    slots = np.concatenate([case.slots for case in cases])
    found = []
    for page in np.unique(logical // info.layout.rows).tolist():
        mine = logical // info.layout.rows == page
        rows = np.zeros(info.layout.rows, bool)
        rows[logical[mine] % info.layout.rows] = True
        found.append(
            PageEvidence(
                code=code,
                stage="table",
                confidence=confidence,
                process=first.process,
                request=first.request,
                buffer=info.name,
                layer=info.layer,
                page=PageFinding(
                    logical=page,
                    physical=int(slots[mine][0]) // info.layout.rows,
                    value_rows=ranges(rows),
                    scale_rows=ranges(rows) if info.layout.scale_bytes else (),
                ),
                evidence=lines,
                rule=rule,
                runner_up=RunnerUp("F20", "the slots are off by one number of rows, not by a factor"),
            )
        )
    return found


def _old_version(timeline: Timeline, case: SlotCase, versions: Versions, room: int, per_page: int) -> int:
    """The earlier version whose pages the slots of a store lie in, each in its own row; -1 where there is none."""
    if not np.array_equal(case.slots % per_page, case.logical % per_page):
        return -1
    table = timeline.trace.table("store")
    wrong = {(int(k), int(p)) for k, p in zip(case.logical // per_page, case.slots // per_page, strict=True)}
    seq, version = int(table["seq"][case.store]), int(table["mapping"][case.store])
    return versions.earlier(case.process, room, seq, version, sorted(wrong))


def _given_before(timeline: Timeline, case: SlotCase) -> bool:
    per_page = timeline.buffers[case.buffer].layout.rows
    pages = np.unique(case.right // per_page).tolist()
    return timeline.given_before(case.process, case.request, pages, timeline.moment("store", case.store))
