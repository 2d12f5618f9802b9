"""One event of a trace in words, and which events belong to a physical page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from capture_hooks.events import BY_TABLE
from capture_hooks.records import schema
from replay.order import Moment, moment
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.reader import Trace
    from replay.trace.table import Table

I64 = npt.NDArray[np.int64]

#: The two ends of an edge in words.
TOLD, HEARD = " told ", " heard "


@dataclass(frozen=True, slots=True)
class Entry:
    """One event. ``layers`` are the layers it was recorded for; ``ordered``: proved to come after the entry above.

    ``room``, ``attempt``, ``transfer``, ``state``, ``req_pool_idx`` and ``generation`` are those of the record: -1, or
    0 of an attempt and "" of a state, where it has none.
    """

    moment: Moment
    begin_ns: int
    end_ns: int
    kind: str
    text: str
    buffer: str = ""
    layers: tuple[int, ...] = ()
    ordered: bool = True
    room: int = -1
    attempt: int = 0
    transfer: int = -1
    state: str = ""
    req_pool_idx: int = -1
    generation: int = -1


@dataclass(frozen=True, slots=True)
class BufferPage:
    """A physical page: of which process, buffer name and layer."""

    process: int
    name: str
    layer: int
    page: int

    def __str__(self) -> str:
        return f"page {self.page} of {self.name} layer {self.layer}"


class Events:
    """Turns rows of the tables into entries."""

    def __init__(self, trace: Trace, place: BufferPage | None = None) -> None:
        self._trace = trace
        self._place = place
        table = trace.table("buffer")
        columns = (table[name] for name in ("process", "buffer", "name", "layer", "format"))
        self._buffers = {
            (int(process), int(buffer)): (str(name), int(layer), str(format_))
            for process, buffer, name, layer, format_ in zip(*columns, strict=True)
        }

    def entries(self, name: str, rows: I64) -> Iterator[Entry]:
        """Entries of ``rows`` of the table ``name``."""
        table = self._trace.table(name)
        describe: Callable[[Table, int], str] = getattr(self, f"_{name}")
        room, attempt, transfer, state, place, generation = (
            table[key] if key in _columns(name) else None
            for key in ("room", "attempt", "transfer", "state", "req_pool_idx", "generation")
        )
        for number in rows:
            row = int(number)
            buffer, layer = "", -1
            if "buffer" in _columns(name):
                known = self._buffers.get((int(table["process"][row]), int(table["buffer"][row])))
                buffer, layer = known[:2] if known else (f"buffer {table['buffer'][row]}", -1)
            yield Entry(
                moment(table, row),
                int(table["begin_ns"][row]),
                int(table["end_ns"][row]),
                name,
                describe(table, row),
                buffer,
                (layer,) if layer >= 0 else (),
                room=-1 if room is None else int(room[row]),
                attempt=0 if attempt is None else int(attempt[row]),
                transfer=-1 if transfer is None else int(transfer[row]),
                state="" if state is None else str(state[row]),
                req_pool_idx=-1 if place is None else int(place[row]),
                generation=-1 if generation is None else int(generation[row]),
            )

    def buffers_like(self, place: BufferPage) -> list[int]:
        """Ids of the buffers of ``place``'s process with its name and layer."""
        return [
            buffer
            for (process, buffer), (name, layer, _) in self._buffers.items()
            if (process, name, layer) == (place.process, place.name, place.layer)
        ]

    def sends_touching(self, place: BufferPage, ids: Sequence[int]) -> I64:
        """Rows of sends that read the page in its own process or write it from another."""
        send, buffer = self._trace.table("send"), self._trace.table("buffer")
        mine = np.flatnonzero((buffer["process"] == place.process) & np.isin(buffer["buffer"], ids))
        owner = {agent: process for process, agent in self._agents()}
        hit = np.zeros(len(send), bool)
        for side, agents in (("source", send["agent"]), ("destination", send["peer"])):
            ranges = send.ragged(side)
            begin = ranges.values[:, 0].astype(np.int64)
            end = begin + ranges.values[:, 1].astype(np.int64)
            touched = np.zeros(len(send), bool)
            for row in mine:
                first = int(buffer["address"][row]) + place.page * int(buffer["pitch"][row])
                touched[ranges.owner()[(begin < first + int(buffer["pitch"][row])) & (end > first)]] = True
            at_home = send["process"] == place.process
            if side == "destination":
                at_home = np.array(
                    [owner.get(agent, place.process) == place.process for agent in agents], bool
                )
            hit |= touched & at_home
        return np.flatnonzero(hit)

    def _agents(self) -> Iterator[tuple[int, str]]:
        for name in ("registration", "send"):
            table = self._trace.table(name)
            yield from zip((int(process) for process in table["process"]), table["agent"], strict=True)

    def states_of(self, sends: I64, others: Callable[[Table], I64]) -> I64:
        """States of the transfers of ``sends``, and the rows that ``others`` picks."""
        send, table = self._trace.table("send"), self._trace.table("transfer_state")
        known = {(int(send["process"][row]), int(send["transfer"][row])) for row in sends}
        pairs = zip(table["process"], table["transfer"], strict=True)
        linked = [
            row for row, (process, transfer) in enumerate(pairs) if (int(process), int(transfer)) in known
        ]
        return np.union1d(np.array(linked, np.int64), others(table)).astype(np.int64)

    def _room(self, table: Table, row: int) -> str:
        """The request, where the listing is about a page."""
        if self._place is None or int(table["room"][row]) < 0:
            return ""
        attempt = int(table["attempt"][row])
        return f" room {table['room'][row]}" + (f" attempt {attempt}" if attempt else "")

    def _request(self, table: Table, row: int) -> str:
        parts = [f"request {table['phase'][row]}"]
        for noun in ("token", "row"):
            number = int(table[f"{noun}s"][row])
            parts += [counted(number, noun)] if number >= 0 else []
        place, generation = int(table["req_pool_idx"][row]), int(table["generation"][row])
        if place >= 0:
            parts.append(f"req_pool_idx {place}" + (f" (generation {generation})" if generation >= 0 else ""))
        return ", ".join(parts) + (f" ({table['mark'][row]})" if table["mark"][row] else "")

    def _alloc(self, table: Table, row: int) -> str:
        pages = table.ragged("pages")[row]
        logical = int(table["logical"][row]) + np.arange(len(pages))
        shared = ", shared" if table["shared"][row] else ""
        return f"alloc{self._room(table, row)}{self._paired(logical, pages)}{shared}"

    def _free(self, table: Table, row: int) -> str:
        pages = table.ragged("pages")[row]
        reason = f" ({table['reason'][row]})" if table["reason"][row] else ""
        return f"free{self._room(table, row)} pages {ids_text(pages)}{reason}"

    def _receive(self, table: Table, row: int) -> str:
        pages = table.ragged("pages")[row]
        logical = int(table["logical"][row]) + np.arange(len(pages))
        lengths = table.ragged("item_lengths")[row]
        return f"announce{self._room(table, row)}{self._paired(logical, pages)}{_lengths(lengths)}"

    def _store(self, table: Table, row: int) -> str:
        rows, slots = table.ragged("logical_rows")[row], table.ragged("slots")[row]
        inputs = ", inputs kept" if table.bulk_size("keys")[row] else ""
        return f"store{self._room(table, row)} rows {ids_text(rows)} in slots {ids_text(slots)}{inputs}"

    def _snapshot(self, table: Table, row: int) -> str:
        stage = f"{table['stage'][row]} {table['moment'][row]}".strip()
        logical, pages = table.ragged("logical")[row], table.ragged("pages")[row]
        step = f" step {table['step'][row]}" if table["step"][row] >= 0 else ""
        text = f"{stage}{self._room(table, row)}{step}{self._paired(logical, pages)}"
        if self._place is not None:
            content = table.ragged("content")[row][np.flatnonzero(pages == self._place.page)]
            digests = [
                f"{self._trace.contents.digests[number][0]:016x}"[:8] for number in content if number >= 0
            ]
            text += f" holds {', '.join(digests)}" if digests else ""
        return text

    def _send(self, table: Table, row: int) -> str:
        pages, destination = table.ragged("pages")[row], table.ragged("destination_pages")[row]
        text = f"send{self._room(table, row)} transfer {table['transfer'][row]}"
        if table["chunk"][row] >= 0:
            text += f" chunk {table['chunk'][row]}" + (" (last)" if table["last"][row] else "")
        text += f" pages {ids_text(pages)} -> {ids_text(destination)}" if len(pages) else ""
        text += f", {counted(len(table.ragged('source')[row]), 'descriptor')}"
        text += _lengths(table.ragged("item_lengths")[row])
        written = {0: ", its store was not finished", 1: ", its store was finished"}
        return text + written.get(int(table["written"][row]), "")

    def _transfer_state(self, table: Table, row: int) -> str:
        transfer = f"transfer {table['transfer'][row]}" if table["transfer"][row] >= 0 else "transfer"
        detail = f" ({table['detail'][row]})" if table["detail"][row] else ""
        return f"{transfer} {table['state'][row]}{self._room(table, row)}{detail}"

    def _read(self, table: Table, row: int) -> str:
        pages, after = table.ragged("table")[row], table.ragged("table_after")[row]
        text = f"read{self._room(table, row)} step {table['step'][row]} rows {table['rows'][row]}"
        text += f" table {ids_text(pages)}"
        changed = len(after) and not np.array_equal(pages, after)
        return text + (f", table afterwards {ids_text(after)}" if changed else "")

    def _copy(self, table: Table, row: int) -> str:
        source, ids = table.ragged("source_ids")[row], table.ragged("ids")[row]
        unit = table["unit"][row]
        text = f"{table['operation'][row]}{self._room(table, row)} {unit}s"
        text += f" {ids_text(source)} ->" if len(source) else ""
        length = int(table["length"][row])
        return f"{text} {ids_text(ids)}" + (f", {counted(length, 'byte')} a {unit}" if length >= 0 else "")

    def _mapping(self, table: Table, row: int) -> str:
        pages = table.ragged("pages")[row]
        logical = int(table["logical"][row]) + np.arange(len(pages))
        return f"mapping {table['version'][row]}{self._room(table, row)}{self._paired(logical, pages)}"

    def _metadata(self, table: Table, row: int) -> str:
        holds = f", holds room {table['holds'][row]}" if table["holds"][row] >= 0 else ""
        return f"metadata slot {table['slot'][row]} {table['moment'][row]}{holds}"

    def _trigger(self, table: Table, row: int) -> str:
        return f"trigger: {table['reason'][row]}"

    def _order(self, table: Table, row: int) -> str:
        return f"{table['what'][row]}{TOLD if table['end'][row] == 'tail' else HEARD}({table['key'][row]})"

    def _paired(self, logical: I64, pages: I64) -> str:
        """Logical and physical pages; only the one in question where the listing is about a page."""
        if self._place is not None:
            mine = np.flatnonzero(pages == self._place.page)
            logical, pages = logical[mine], pages[mine]
            return f" as logical {ids_text(logical)}"
        return f" logical {ids_text(logical)} = pages {ids_text(pages)}"


def _columns(table: str) -> frozenset[str]:
    return frozenset(spec.name for spec in schema(BY_TABLE[table]))


def ids_text(values: Iterable[int]) -> str:
    """Numbers in their order, with runs upwards joined, cut after eight pieces."""
    runs: list[list[int]] = []
    for value in values:
        number = int(value)
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs[:8])
    return (shown or "none") + (f" and {len(runs) - 8} more" if len(runs) > 8 else "")


def _lengths(item_lengths: I64) -> str:
    lengths = sorted({int(length) for length in item_lengths})
    return f", item length {'/'.join(map(str, lengths))}" if lengths else ""
