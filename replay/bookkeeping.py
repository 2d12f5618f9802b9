"""The rungs that need no page bytes: tables, lengths, slots of stores and metadata slots against the records.

A read's table is compared with what the allocator gave, its length with the rows that exist, a store's slots with the
pages of its rows, and the metadata that was taken with the room it was taken for.
"""

from __future__ import annotations

from dataclasses import dataclass

from replay.classify import (
    drafted_rows_read,
    length_off_by_one,
    metadata_mix_up,
    stale_slot_mapping,
    torn_block_table,
    wrong_stride,
)
from replay.classify.base import Evidence
from replay.findings import PageEvidence
from replay.lengths import judge_lengths
from replay.slots import SlotCase, judge_slots
from replay.tables import TableCase, TableRung, judge_tables
from replay.timeline import Timeline
from replay.verdict import Hazard


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What the records alone show."""

    tables: TableRung
    pages: list[PageEvidence]
    hazards: list[Hazard]


def judge_bookkeeping(timeline: Timeline, evidence: Evidence) -> Bookkeeping:
    """Judge tables, lengths, slots and metadata of a trace."""
    tables = judge_tables(timeline)
    versions = stale_slot_mapping.Versions(timeline)
    pages: list[PageEvidence] = []
    proven = {(case.process, case.request, case.buffer) for case in tables.cases if not case.during}
    for case in tables.cases:
        if not case.during or (case.process, case.request, case.buffer) not in proven:
            pages += _table(timeline, evidence, case, versions)
    for lengths in judge_lengths(timeline):
        found = drafted_rows_read.explain(timeline, evidence, lengths)
        pages += found or length_off_by_one.explain(timeline, evidence, lengths)
    stores: dict[tuple[int, int, int], list[SlotCase]] = {}
    for slots in judge_slots(timeline):
        stores.setdefault((slots.process, slots.request, slots.buffer), []).append(slots)
    for cases in stores.values():
        pages += stale_slot_mapping.at_store(timeline, evidence, cases, versions)
    hazards = []
    given_up = timeline.phases("abort")
    for mixed in metadata_mix_up.explain(timeline, evidence):
        # The first token comes from the slot: one that ended with it has a wrong reply though nobody read its pages.
        if (mixed.process, mixed.request) in given_up and evidence.never_read(mixed.process, mixed.request):
            hazards.append(_harmless(timeline, mixed))
        else:
            pages.append(mixed)
    return Bookkeeping(tables, pages, hazards)


def _harmless(timeline: Timeline, page: PageEvidence) -> Hazard:
    """What concerns a request that was given up before anybody read it."""
    return Hazard(
        f"{page.code} {page.kind}, harmless this time: {page.evidence[0]}",
        f"room {timeline.requests[page.request][0]}, which was given up unread",
    )


def _table(
    timeline: Timeline, evidence: Evidence, case: TableCase, versions: stale_slot_mapping.Versions
) -> list[PageEvidence]:
    """The kind of one wrong table: a factor, an earlier version of the request's own, or foreign entries."""
    return (
        wrong_stride.at_table(timeline, evidence, case)
        or stale_slot_mapping.at_read(timeline, evidence, case, versions)
        or torn_block_table.explain(timeline, evidence, case)
    )
