"""What of a trace a verdict of some scope stands on: the scope's own records, and the evidence beside them.

Evidence beside the scope are the other owners of its pages on either side, the transfers that name them, the pages
these transfers read and wrote, the looks at one physical page by whoever held it, and every page of the trace that
shows a row which a page of the scope holds wrongly (a donor). Records that belong to nobody stay: buffers, hooks,
registrations, order edges, clocks, losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from replay.bisect import Case, climb
from replay.descriptors import DescriptorMap
from replay.page_columns import PageEvents, place, rows_in
from replay.rooms import WITH_ROOM
from replay.scope import Scope
from replay.timeline import Timeline
from replay.trace.reader import Table, Trace

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Progress = Callable[[str, int, int], None]

#: How much is kept: what the rules above say; every look at every request in reach; everything.
RULES, REACH, ALL = 0, 1, 2

#: Looks that a verdict on each stage asks for.
_BYTES = frozenset({"ST", "SE", "RC", "LT", "RD"})
LOOKS = {
    "store": frozenset({"ST"}),
    "source": _BYTES - {"RD"},
    "descriptor": _BYTES,
    "wire": _BYTES,
    "completion": _BYTES,
    "destination": _BYTES,
    "table": frozenset[str](),
    "read-kernel": frozenset({"RD"}),
    "top-k": frozenset({"RD"}),
}
#: Added to a process number, for places that are metadata slots and no pages.
_SLOTS = 1 << 20
#: Contents whose rows are looked through at once.
_SLAB = 4096
#: A row that more contents than this hold points at nobody.
_COMMON = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of a trace.

    Attributes:
        rows: for each table that loses records, those that stay.
        looks: which page looks of all snapshots stay, ``bool[page looks]``.
        payload: for each table whose payload is kept for some records only, ``bool[rows]``.
        requests: how many requests there is anything of.
        own: how many of them are in scope.
        known: how many requests the whole trace has.
    """

    rows: dict[str, I64]
    looks: Bool
    payload: dict[str, Bool] = field(default_factory=dict)
    requests: int = 0
    own: int = 0
    known: int = 0


def keep(
    trace: Trace, scope: Scope, level: int = RULES, *, alone: bool = False, progress: Progress | None = None
) -> Kept:
    """What of ``trace`` stays for a verdict on ``scope``.

    Args:
        trace: the whole trace.
        scope: the limits of the verdict.
        level: ``RULES``, or more where a verdict turned out to need more.
        alone: leave out all requests outside the scope, even where they are evidence.
        progress: called with what is being done.
    """
    timeline = Timeline(trace, scope)
    finder = _Finder(timeline, DescriptorMap(timeline), timeline.scope)
    mine = timeline.scope.rooms_in(np.array([room for room, _ in timeline.requests] + [-1], np.int64))
    mine[-1] = False
    counted, known = int(mine.sum()), len(timeline.requests)
    if level == ALL:
        return Kept(
            {}, np.ones(len(timeline.snapshots.event), bool), requests=known, own=counted, known=known
        )
    own = finder.own_looks(mine)
    if alone:
        return replace(finder.kept(mine, own, own), own=counted, known=known)
    cases = climb(timeline, progress).cases
    suspects = finder.suspect_pages(own, cases)
    linked = finder.linked(suspects) | finder.donors(cases, progress)
    reach = finder.reach(mine, linked)
    if level == REACH:
        linked |= reach[timeline.snapshots.request]
    return replace(finder.kept(reach, own | suspects | linked, suspects | linked), own=counted, known=known)


class _Finder:
    """Finds evidence; page looks are rows of ``Timeline.snapshots``."""

    def __init__(self, timeline: Timeline, descriptors: DescriptorMap, scope: Scope) -> None:
        self.timeline = timeline
        self.descriptors = descriptors
        self.scope = scope
        self.layer_of_buffer = np.array([b.layer for b in timeline.buffers] or [0], np.int64)
        self.process_of_buffer = np.array([b.process for b in timeline.buffers] or [0], np.int64)
        self.request = self._owner("snapshot")[timeline.snapshots.event]  # of each page look
        self.looks = frozenset[str]().union(*(LOOKS[s] for s in LOOKS if scope.has_stage(s)))

    def own_looks(self, mine: Bool) -> Bool:
        """Looks at the scope's own pages, and at all pages of its reads whose logits were kept."""
        snaps, scope = self.timeline.snapshots, self.scope
        layer = self.layer_of_buffer[snaps.buffer]
        here = mine[self.request] & scope.layers_in(layer) & (snaps.buffer >= 0)
        table = self.timeline.trace.table("read")
        kept = table.bulk_size("logits") > 0
        steps = np.stack(
            [
                self.timeline.request_column("read"),
                self.timeline.buffer_column("read"),
                table["step"].astype(np.int64),
            ],
            1,
        )[kept]
        wanted = np.stack([snaps.request, snaps.buffer, snaps.step], 1)
        read = (snaps.stage == "RD")[snaps.event] & rows_in(wanted, steps)
        return np.asarray(here & (scope.places_in(layer, snaps.logical) | read), bool)

    def suspect_pages(self, own: Bool, cases: list[Case]) -> Bool:
        """Every look at the requests, layers and physical pages in which something differs, by whoever held them."""
        snaps, timeline = self.timeline.snapshots, self.timeline
        pairs = {(case.request, case.slot) for case in cases if self._said(case)}
        shape = (len(timeline.requests) + 1) * max(1, len(timeline.slots))
        hit = np.zeros(shape, bool)
        for request, slot in pairs:
            hit[request * len(timeline.slots) + slot] = True
        known = (snaps.request >= 0) & (snaps.slot >= 0)
        theirs = known & hit[np.where(known, snaps.request * len(timeline.slots) + snaps.slot, 0)]
        shared = timeline.owners.shared_pages
        if shared:  # a shared page was stored and sent once, for its first owner
            triples = np.array(sorted(shared), np.int64)
            theirs |= own & rows_in(np.stack([snaps.process, snaps.request, snaps.page], 1), triples)
        return theirs | self._at(self._places(theirs))

    def _said(self, case: Case) -> bool:
        layer = self.timeline.slots[case.slot][1]
        return bool(self.scope.places_in(np.array([layer]), np.array([case.logical]))[0])

    def _places(self, looks: Bool) -> I64:
        snaps = self.timeline.snapshots
        return np.unique(place(snaps.buffer[looks], snaps.page[looks]))

    def _at(self, places: I64) -> Bool:
        snaps = self.timeline.snapshots
        where = place(snaps.buffer, snaps.page)
        return np.isin(where, places) & (where >= 0)

    def linked(self, looks: Bool) -> Bool:
        """Looks at the pages that transfers from or to the pages of ``looks`` read or wrote."""
        pieces = self.descriptors.pieces
        here = self._places(looks)
        source = place(pieces.source, pieces.source_page)
        target = place(pieces.buffer, pieces.page)
        other = np.concatenate([source[np.isin(target, here)], target[np.isin(source, here)]])
        return self._at(np.unique(other[other >= 0]))

    def donors(self, cases: list[Case], progress: Progress | None) -> Bool:
        """Looks at pages that show a row which a page of the scope holds wrongly."""
        snaps, contents = self.timeline.snapshots, self.timeline.trace.contents
        wrong = [np.zeros(0, np.uint64)]
        for case in cases:
            if self._said(case):
                bad = case.source_bad | case.wire_bad | case.later_bad | case.appended_bad | case.read_bad
                rows = len(bad) // 2
                wrong += [units[:rows][bad[:rows]] for units in case.units.values()]
        wanted = np.unique(np.concatenate(wrong))
        found = np.zeros(len(contents) + 1, bool)
        if not len(wanted):
            return found[snaps.content]
        pairs: list[tuple[I64, U64]] = []
        with_rows = np.flatnonzero(contents.rows > 0)
        for start in range(0, len(with_rows), _SLAB):
            if progress is not None:
                progress("looking for donors, pages", start, len(with_rows))
            part = with_rows[start : start + _SLAB]
            for count in np.unique(contents.rows[part]).tolist():
                ids = part[contents.rows[part] == count]
                values = contents.row_values(ids)
                hit, column = np.nonzero(np.isin(values, wanted) & ~_repeated(values))
                pairs.append((ids[hit], values[hit, column]))
        ids, digest = (np.concatenate(side) for side in zip(*pairs, strict=True))
        _, number, count = np.unique(digest, return_inverse=True, return_counts=True)
        found[ids[(count <= _COMMON)[number]]] = True
        return found[snaps.content]

    def reach(self, mine: Bool, linked: Bool) -> Bool:
        """Requests of which there must be every small record: the scope's, and all who had to do with its pages."""
        timeline = self.timeline
        reach = mine.copy()
        reach[timeline.snapshots.request[linked]] = True
        holders = [self._holdings(events) for events in (timeline.owners.allocs, timeline.owners.frees)]
        holders += [self._received(), self._looked_at(), self._sent(), self._read_through(), *self._copied()]
        holders += self._metadata_slots()
        request = np.concatenate([one for one, _ in holders])
        where = np.concatenate([other for _, other in holders])
        request, where = request[where >= 0], where[where >= 0]
        reach[request[np.isin(where, where[mine[request]])]] = True
        reach[-1] = True  # what belongs to no request
        return reach

    def _holdings(self, events: PageEvents) -> tuple[I64, I64]:
        return events.request, place(events.process, events.page)

    def _received(self) -> tuple[I64, I64]:
        table = self.timeline.trace.table("receive")
        pages = table.ragged("pages")
        owner = pages.owner()
        request = self.timeline.request_column("receive")[owner]
        return request, place(table["process"].astype(np.int64)[owner], pages.values)

    def _looked_at(self) -> tuple[I64, I64]:
        snaps = self.timeline.snapshots
        return snaps.request, place(snaps.process, snaps.page)

    def _sent(self) -> tuple[I64, I64]:
        pieces = self.descriptors.pieces
        sides = [(pieces.source, pieces.source_page), (pieces.buffer, pieces.page)]
        places = [
            place(np.where(buffer >= 0, self.process_of_buffer[buffer], -1), page) for buffer, page in sides
        ]
        return np.tile(pieces.request, 2), np.concatenate(places)

    def _metadata_slots(self) -> list[tuple[I64, I64]]:
        """Metadata slots, which are numbered apart from pages."""
        table = self.timeline.trace.table("metadata")
        request, process = self.timeline.request_column("metadata"), table["process"].astype(np.int64)
        return [
            (request, place(side, slots))
            for side, slots in (
                (process + _SLOTS, table["slot"]),
                (np.full(len(request), 2 * _SLOTS), table["peer_slot"]),
            )
        ]

    def _copied(self) -> list[tuple[I64, I64]]:
        """Pages that were copied within a process; ids of rows are turned into those of their pages."""
        table = self.timeline.trace.table("copy")
        request, process = self.timeline.request_column("copy"), table["process"].astype(np.int64)
        rows = np.array([b.layout.rows for b in self.timeline.buffers] or [1], np.int64)
        found = []
        for ids, buffer in (("source_ids", "source_buffer"), ("ids", "buffer")):
            column = table.ragged(ids)
            owner = column.owner()
            number = np.array(
                [
                    self.timeline.buffer_number(*pair)
                    for pair in zip(process.tolist(), table[buffer].tolist(), strict=True)
                ],
                np.int64,
            )
            per_page = np.where(table["unit"] == "row", rows[number], 1)
            known = number[owner] >= 0  # other tiers have page numbers of their own
            page = column.values // per_page[owner]
            found.append((request[owner][known], place(process[owner], page)[known]))
        return found

    def _read_through(self) -> tuple[I64, I64]:
        table = self.timeline.trace.table("read")
        request, process = self.timeline.request_column("read"), table["process"].astype(np.int64)
        sides = []
        for name in ("table", "table_after"):
            pages = table.ragged(name)
            owner = pages.owner()
            sides.append((request[owner], place(process[owner], pages.values)))
        return np.concatenate([a for a, _ in sides]), np.concatenate([b for _, b in sides])

    def kept(self, reach: Bool, looks: Bool, evidence: Bool) -> Kept:
        """Records of the requests in ``reach`` and of nobody, page looks of ``looks``, stores into ``evidence``."""
        timeline, snaps = self.timeline, self.timeline.snapshots
        wanted = np.isin(snaps.stage.astype(str), sorted(self.looks))[snaps.event]
        looks = (looks | (self.request < 0)) & wanted
        rows = {name: np.flatnonzero(reach[self._owner(name)]) for name in WITH_ROOM}
        rows["snapshot"] = np.unique(snaps.event[looks])
        rows["content"] = self._contents(looks)
        mine = ~timeline.beside
        payload = {}
        for name, stages in (("store", ("store",)), ("read", ("read-kernel", "top-k"))):
            layer = self.layer_of_buffer[timeline.buffer_column(name)]
            inside = mine[timeline.request_column(name)] & self.scope.layers_in(layer)
            payload[name] = inside & self.scope.has_stage(*stages)
            if name == "read":
                rows[name] = rows[name][inside[rows[name]]]
        if not self.scope.has_stage("table", "destination", "read-kernel", "top-k"):
            rows["read"] = rows["read"][:0]
        places = np.unique(place(snaps.process[evidence], snaps.page[evidence]))
        rows["store"] = rows["store"][(payload["store"] | self._stores_into(places, mine))[rows["store"]]]
        return Kept(rows, looks, payload, int(reach[:-1].sum()))

    def _owner(self, name: str) -> I64:
        """Request of each record of ``name``; a sender's states and looks may name the transfer alone."""
        request = self.timeline.request_column(name)
        send = self.timeline.trace.table("send")
        if name not in ("transfer_state", "snapshot") or not len(send):
            return request
        keys, key = _transfer(send), _transfer(self.timeline.trace.table(name))
        order = np.argsort(keys, kind="stable")
        at = order[np.minimum(np.searchsorted(keys[order], key), len(keys) - 1)]
        theirs = self.timeline.request_column("send")[at]
        return np.where((request < 0) & (keys[at] == key), theirs, request)

    def _stores_into(self, places: I64, mine: Bool) -> Bool:
        """Stores of the scope's layers by its own requests, and all stores that wrote to a page of ``places``."""
        table = self.timeline.trace.table("store")
        buffer = self.timeline.buffer_column("store")
        slots = table.ragged("slots")
        owner = slots.owner()
        rows = np.array([b.layout.rows for b in self.timeline.buffers] or [1], np.int64)
        page = slots.values // rows[buffer[owner]]
        hit = np.zeros(len(table), bool)
        hit[owner[np.isin(place(table["process"].astype(np.int64)[owner], page), places)]] = True
        inside = self.scope.layers_in(self.layer_of_buffer[buffer])
        return hit | (mine[self.timeline.request_column("store")] & inside)

    def _contents(self, looks: Bool) -> I64:
        """Records of later written bytes that a look which stays refers to."""
        used = np.unique(self.timeline.snapshots.content[looks])
        content = self.timeline.trace.table("content").ragged("content")
        return np.unique(content.owner()[np.isin(content.values, used)])


def _repeated(values: U64) -> Bool:
    """Rows whose digest occurs more than once in their page (zeros, padding): they point at nobody."""
    order = np.argsort(values, axis=1, kind="stable")
    sorted_values = np.take_along_axis(values, order, 1)
    same = sorted_values[:, 1:] == sorted_values[:, :-1]
    twice = np.zeros(values.shape, bool)
    twice[:, 1:] |= same
    twice[:, :-1] |= same
    found = np.zeros(values.shape, bool)
    np.put_along_axis(found, order, twice, 1)
    return found


def _transfer(table: Table) -> I64:
    return np.asarray(table["process"].astype(np.int64) * (1 << 40) + table["transfer"], np.int64)
