"""Destination pages and the snapshot of each stage that belongs to them, as columns.

A *cell* is one (process, request, layer and buffer name, logical page) of the side that reads. For each cell
:class:`Cells` holds the row of ``Timeline.snapshots`` that shows each stage, -1 where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.copies import Copies
from replay.page_columns import MAX_LOGICAL, column_at
from replay.receivers import keep_own_looks
from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

#: Stages of a cell in ladder order: name -> (stage, moment) of the snapshot record.
STAGE_KEYS = {
    "ST": ("ST", ""),
    "SE": ("SE", "before"),
    "SE+": ("SE", "after"),
    "RC-": ("RC", "before"),
    "RC": ("RC", ""),
    "LT": ("LT", None),
}


@dataclass(frozen=True, slots=True)
class Cells:
    """Columns, one row a cell. ``valid`` counts the prompt rows of the page that matter."""

    process: I64
    request: I64
    slot: I64
    logical: I64
    valid: I64
    rows_known: Bool  #: whether the request's length in rows was told
    expected: Bool  #: announced by a receiver and arrived: every stage should be there
    said: Bool  #: within the scope; the others are evidence
    stage: dict[str, I64]
    own_store: I64  #: last ST snapshot of the page made by the reading side itself
    own_rows: I64  #: rows of all ST snapshots of the reading side, by cell and sequence
    own_cell: I64  #: the cell of each of them, ascending
    reads: I64  #: rows of all RD snapshots that belong to a cell, in sequence
    read_cell: I64  #: the cell of each of them
    overshoot: int  #: snapshots left out because the request had been freed already

    def __len__(self) -> int:
        return len(self.process)


def build_cells(timeline: Timeline, copies: Copies | None = None) -> Cells:
    """Find all cells of a trace and the snapshots that belong to them."""
    snaps = timeline.snapshots
    processes = max(1, len(timeline.trace.processes))
    source_key = timeline.cell(snaps.request, snaps.slot, snaps.logical)
    key = np.where(source_key >= 0, source_key * processes + snaps.process, -1)

    key = np.where(
        timeline.beside[snaps.request], -1, key
    )  # request -1 is the spare last entry, never beside the scope
    late = _after_free(timeline)
    rows = {name: snaps.where(*wanted) for name, wanted in STAGE_KEYS.items()}
    copied = np.concatenate([snaps.where("ST", "copied"), snaps.where("LT", "copied")])
    rows["LT"] = rows["LT"][snaps.moment[snaps.event[rows["LT"]]] != "copied"]
    copied = copied[~late[copied]]
    reads = snaps.where("RD")
    overshoot = 0
    for name in ("RC", "LT"):
        overshoot += int(late[rows[name]].sum())
        rows[name] = rows[name][~late[rows[name]]]
    overshoot += int(late[reads].sum())
    # A read through a wrong table shows another page than the request's: that is the table rung's to say.
    given = timeline.owners.given_at(
        snaps.process[reads], snaps.request[reads], snaps.logical[reads], snaps.seq[reads]
    )
    own_page = (given < 0) | (given == snaps.page[reads])
    reads = reads[~late[reads] & (key[reads] >= 0) & own_page]

    expected_key = _announced(timeline, processes)
    own = [key[rows[name]] for name in ("RC", "LT")]
    universe = np.unique(np.concatenate([*own, key[reads], expected_key]))
    universe = universe[universe >= 0]
    cell_key, process = np.divmod(universe, processes)
    pair, logical = np.divmod(cell_key, MAX_LOGICAL)
    request, slot = np.divmod(pair, max(1, len(timeline.slots)))
    layers = np.array([layer for _, layer in timeline.slots] or [0], np.int64)

    stage: dict[str, I64] = {}
    for name in ("RC-", "RC", "LT"):
        stage[name] = _last(snaps.seq, key, rows[name], universe)
    for name in ("SE", "SE+"):
        stage[name] = _last(snaps.seq, source_key, rows[name], cell_key)
    keep_own_looks(timeline, cell_key, process, stage)
    # Taken alone, a look at the source after it was given back proves nothing about what the wire carried.
    alone = (stage["SE"] < 0) & (stage["SE+"] >= 0)
    stage["SE+"][alone & np.append(late, False)[stage["SE+"]]] = -1
    stage["ST"], own_store = _stores(timeline, key, rows["ST"], universe, cell_key, process, stage, processes)

    own_rows = rows["ST"][np.isin(key[rows["ST"]], universe)]
    own_cell = np.searchsorted(universe, key[own_rows])
    by_cell = np.lexsort((snaps.seq[own_rows], own_cell))
    own_rows, own_cell = own_rows[by_cell], own_cell[by_cell]
    reads = reads[np.lexsort((snaps.seq[reads], snaps.process[reads]))]
    read_cell = np.searchsorted(universe, key[reads])
    _adopt_shared(timeline, stage, reads, read_cell, universe)
    stage["CP"] = _last(snaps.seq, source_key, copied, cell_key)
    _follow_copies(timeline, copies or Copies(timeline), process, stage)
    rows_per_page = np.array([_rows_per_page(timeline, int(s)) for s in range(len(timeline.slots))] or [0])
    told = timeline.request_rows[request]
    capacity = rows_per_page[slot]
    valid = np.clip(told - logical * capacity, 0, capacity)
    return Cells(
        process=process,
        request=request,
        slot=slot,
        logical=logical,
        valid=np.where(told >= 0, valid, 0),
        rows_known=told >= 0,
        expected=np.isin(universe, expected_key),
        said=timeline.scope.places_in(layers[slot], logical),
        stage=stage,
        own_store=own_store,
        own_rows=own_rows,
        own_cell=own_cell,
        reads=reads,
        read_cell=read_cell,
        overshoot=overshoot,
    )


def _follow_copies(timeline: Timeline, copies: Copies, process: I64, stage: dict[str, I64]) -> None:
    """A page that was loaded back from a copy was stored, or arrived, for the page that it was copied from."""
    snaps = timeline.snapshots
    for number in np.flatnonzero(stage["CP"] >= 0).tolist():
        look = int(stage["CP"][number])
        name = "RC" if int(snaps.process[look]) == int(process[number]) else "ST"
        if stage[name][number] >= 0 or (name == "RC" and stage["ST"][number] >= 0 > stage["SE"][number]):
            continue
        origin = copies.origin(look)
        if origin is not None:
            stage[name][number] = origin.look


def _before(timeline: Timeline, stage: str, row: int) -> int:
    """The last snapshot of a stage of the same physical page before snapshot ``row``, -1 where there is none."""
    snaps = timeline.snapshots
    rows = snaps.at_place(stage, int(snaps.buffer[row]), int(snaps.page[row]))
    rows = rows[(snaps.seq[rows] < snaps.seq[row]) & (snaps.moment[snaps.event[rows]] != "before")]
    return int(rows[-1]) if len(rows) else -1


def _stored_before(timeline: Timeline, row: int) -> int:
    """The last ST of a shared page before snapshot ``row``, made since its owner was given it; -1 where there is none.

    An older one shows another request's rows: the owner's own may have been lost.
    """
    snaps = timeline.snapshots
    process, page = int(snaps.process[row]), int(snaps.page[row])
    mine = timeline.owners.alloc_row(process, int(snaps.request[row]), page, before=int(snaps.seq[row]))
    if mine is None:
        return -1
    found = _before(timeline, "ST", row)
    since = timeline.owners.owned_since(process, page, int(timeline.owners.allocs.seq[mine]))
    return found if found >= 0 and int(snaps.seq[found]) > since else -1


def _adopt_shared(
    timeline: Timeline, stage: dict[str, I64], reads: I64, read_cell: I64, universe: I64
) -> None:
    """A page shared on the reading side arrived once, for its first owner: take that RC (or ST) for the others."""
    snaps, shared = timeline.snapshots, timeline.owners.shared_pages
    if not shared or not len(reads):
        return
    first = np.full(len(stage["RC"]), -1, np.int64)
    first[read_cell[::-1]] = reads[::-1]
    numbers = np.flatnonzero((stage["RC"] < 0) & (first >= 0))
    # In order: an owner may have shared the page of another before it was given up and loaded back as its own.
    for number in numbers[np.argsort(snaps.seq[first[numbers]], kind="stable")].tolist():
        row = int(first[number])
        if (int(snaps.process[row]), int(snaps.request[row]), int(snaps.page[row])) in shared:
            stage["RC"][number] = _arrived_for_owner(timeline, row, universe, stage["RC"])
            if stage["ST"][number] < 0 and stage["SE"][number] < 0 and stage["SE+"][number] < 0:
                stage["ST"][number] = _stored_for_owner(timeline, row)


def _arrived_for_owner(timeline: Timeline, row: int, universe: I64, arrived: I64) -> int:
    """The RC before a read that shows what the page's owner, when the reader was given a share of it, received.

    Where nothing arrived for the owner in this page since it was given it, the owner brought the page from elsewhere
    (it was given up and loaded back): then what arrived for it as the same logical page, by ``arrived``, the RC of each
    cell of ``universe``.
    """
    snaps = timeline.snapshots
    last = _before(timeline, "RC", row)
    process, page = int(snaps.process[row]), int(snaps.page[row])
    mine = timeline.owners.alloc_row(process, int(snaps.request[row]), page, before=int(snaps.seq[row]))
    if mine is None:
        return last
    shared_at = int(timeline.owners.allocs.seq[mine])
    owner = timeline.owners.owner_before(process, page, shared_at)
    if owner < 0:
        return last
    rows = snaps.at_place("RC", int(snaps.buffer[row]), page)
    rows = rows[(snaps.seq[rows] < snaps.seq[row]) & (snaps.moment[snaps.event[rows]] != "before")]
    rows = rows[snaps.seq[rows] > timeline.owners.owned_since(process, page, shared_at)]
    others = rows[(snaps.request[rows] != owner) & (snaps.seq[rows] < shared_at)].tolist()
    for found in reversed(others):
        if (process, int(snaps.request[found]), page) not in timeline.owners.shared_pages:
            return int(found)  # the page had changed hands: that one's allocation was not seen
    rows = rows[snaps.request[rows] == owner]
    if len(rows):
        return int(rows[-1])
    own = timeline.cell(np.array([owner]), np.array([snaps.slot[row]]), snaps.logical[[row]])
    key = int(own[0]) * max(1, len(timeline.trace.processes)) + process
    number = min(int(np.searchsorted(universe, key)), len(universe) - 1)
    found = int(arrived[number]) if int(universe[number]) == key else -1
    return found if found >= 0 and int(snaps.seq[found]) < int(snaps.seq[row]) else -1


def _stored_for_owner(timeline: Timeline, row: int) -> int:
    """Where the other side shares the page of a read too: the last ST that the owner of its page made, -1 if none.

    What the request means by this logical page is what the sending side has there: nothing of it is sent.
    """
    snaps = timeline.snapshots
    request, logical, slot = int(snaps.request[row]), int(snaps.logical[row]), int(snaps.slot[row])
    for info in timeline.buffers:
        if info.process == int(snaps.process[row]) or int(timeline.slot_of_buffer[info.number]) != slot:
            continue
        there = (np.array([info.process]), np.array([request]), np.array([logical]))
        page = int(timeline.owners.given_pages(*there)[0])
        mine = timeline.owners.alloc_row(info.process, request, page) if page >= 0 else None
        if mine is None or (info.process, request, page) not in timeline.owners.shared_pages:
            continue
        owner = timeline.owners.owner_before(info.process, page, int(timeline.owners.allocs.seq[mine]))
        rows = snaps.at_place("ST", info.number, page)
        rows = rows[(snaps.request[rows] == owner) & (snaps.logical[rows] == logical)]
        if len(rows):
            return int(rows[-1])
    return -1


def _rows_per_page(timeline: Timeline, slot: int) -> int:
    name, layer = timeline.slots[slot]
    return next(b.layout.rows for b in timeline.buffers if (b.name, b.layer) == (name, layer))


def _after_free(timeline: Timeline) -> Bool:
    """Snapshots that ended after their request had given its pages back, or after the page was given to another.

    They may show the next owner, even where the free itself was not seen.

    An overlap scheduler launches one more step for a finished request (look-alike M11).
    """
    snaps = timeline.snapshots
    owners = timeline.owners
    late = owners.lost(snaps.process, snaps.request, snaps.page, snaps.seq)
    return late | owners.over(snaps.process, snaps.request, snaps.seq)


def _announced(timeline: Timeline, processes: int) -> I64:
    """Keys of the cells that a receiver announced for requests that arrived."""
    trace = timeline.trace
    receive = trace.table("receive")
    arrived = set(timeline.phases("arrived"))
    states = trace.table("transfer_state")
    told = np.flatnonzero(states["state"] == "arrived")
    numbers = timeline.request_column("transfer_state")
    arrived |= {(int(states["process"][row]), int(numbers[row])) for row in told}
    request = timeline.request_column("receive")
    pages, buffers = receive.ragged("pages"), receive.ragged("buffers")
    keys = [np.zeros(0, np.int64)]
    for row in range(len(receive)):
        process = int(receive["process"][row])
        if (process, int(request[row])) not in arrived or timeline.beside[request[row]]:
            continue
        numbers_of = [timeline.buffer_number(process, int(b)) for b in buffers[row]]
        slots = np.array([timeline.slot_of_buffer[n] for n in numbers_of if n >= 0], np.int64)
        logical = int(receive["logical"][row]) + np.arange(len(pages[row]))
        cell = timeline.cell(
            np.full(len(slots) * len(logical), request[row]),
            np.repeat(slots, len(logical)),
            np.tile(logical, len(slots)),
        )
        keys.append(np.where(cell >= 0, cell * processes + process, -1))
    return np.unique(np.concatenate(keys))


def _last(seq: I64, key: I64, rows: I64, wanted: I64) -> I64:
    """For each wanted key, the row with the highest sequence number that carries it; -1 where none does."""
    rows = rows[key[rows] >= 0]
    rows = rows[np.lexsort((seq[rows], key[rows]))]
    found = np.searchsorted(key[rows], wanted, side="right") - 1
    result = np.full(len(wanted), -1, np.int64)
    if len(rows):
        hit = (found >= 0) & (key[rows[np.maximum(found, 0)]] == wanted)
        result[hit] = rows[found[hit]]
    return result


def _stores(
    timeline: Timeline,
    key: I64,
    rows: I64,
    universe: I64,
    cell_key: I64,
    process: I64,
    stage: dict[str, I64],
    processes: int,
) -> tuple[I64, I64]:
    """ST of the source page, and ST of the reading side's own page, for each cell."""
    snaps = timeline.snapshots
    own_store = _last(snaps.seq, key, rows, universe)
    source = np.where(stage["SE"] >= 0, stage["SE"], stage["SE+"])
    has_source = source >= 0
    source_process = column_at(snaps.process, source)
    store = np.full(len(universe), -1, np.int64)
    for number in range(processes):
        # A side that reads its own stores (no transfer) has its own ST as the source.
        chosen = np.flatnonzero(
            np.where(has_source, source_process == number, number != process) & (store < 0)
        )
        store[chosen] = _last(snaps.seq, key, rows, cell_key[chosen] * processes + number)
    alone = (store < 0) & ~has_source & (stage["RC"] < 0)
    store[alone] = own_store[alone]
    # A shared prefix is stored once, by its first owner: fall back to the last ST of the physical page. The owner's
    # page may also have come in the place of one that the request had stored itself (two requests computed one prefix
    # at the same time): its bytes are right, and are not those that the request computed.
    shared = timeline.owners.shared_pages
    elsewhere = has_source & (store >= 0) & (column_at(snaps.page, store) != column_at(snaps.page, source))
    for number in np.flatnonzero((has_source & (store < 0)) | elsewhere).tolist() if shared else []:
        row = int(source[number])
        if (int(snaps.process[row]), int(snaps.request[row]), int(snaps.page[row])) in shared:
            store[number] = _stored_before(timeline, row)
    return store, own_store
