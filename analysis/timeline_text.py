"""What happened to a request or to a physical page, in order and in words that fit an issue.

The order is that of ``replay.order``: lines that it cannot order against the line above carry a ``~``. Clocks only
choose between lines whose order is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from analysis.event_text import HEARD, BufferPage, Entry, Events, ids_text
from analysis.printable import printable
from replay.descriptors import DescriptorMap
from replay.local_writes import LocalWrites
from replay.order import HappensBefore
from replay.order_keys import request_key
from replay.timeline import Timeline
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.reader import Trace
    from replay.trace.table import Table

I64 = npt.NDArray[np.int64]

#: Columns of a line.
WIDTH = 80

#: Tables whose records name the request; the states of its transfers and its order edges are found besides.
REQUEST_TABLES = (
    "request", "alloc", "free", "mapping", "receive", "store", "copy", "snapshot", "send", "metadata",
    "read", "trigger",
)  # fmt: skip


def request_entries(trace: Trace, room: int, attempt: int | None = None) -> list[Entry]:
    """Every event of request ``room``, of one attempt or of all, in order and with its layers joined."""

    def ours(table: Table) -> I64:
        chosen = table["room"] == room
        if attempt is not None:
            chosen &= table["attempt"] == attempt
        return np.flatnonzero(chosen)

    events = Events(trace)
    found: list[Entry] = []
    for name in REQUEST_TABLES:
        found += events.entries(name, ours(trace.table(name)))
    found += events.entries("transfer_state", events.states_of(ours(trace.table("send")), ours))
    order = trace.table("order")
    wanted = [key for key in dict.fromkeys(order["key"]) if _is_key_of(str(key), room, attempt)]
    found += events.entries("order", np.flatnonzero(np.isin(order["key"], wanted)))
    sends = foreign_sends(trace, room, attempt)
    states = events.states_of(sends, lambda table: np.zeros(0, np.int64))
    strangers = [*events.entries("send", sends), *events.entries("transfer_state", states)]
    found += [replace(entry, text=f"foreign, room {entry.room}: {entry.text}") for entry in strangers]
    return in_order(trace, found)


def foreign_sends(trace: Trace, room: int, attempt: int | None) -> I64:
    """Sends of other requests that may have written into pages while this request owned them.

    What is proved to have been over before the request got the page, or posted after it gave the page back, is none.
    """
    timeline = Timeline(trace)
    descriptors = DescriptorMap(timeline)
    order, allocs, pieces = timeline.order, timeline.owners.allocs, descriptors.pieces
    mine = {
        number
        for number, (other, tried) in enumerate(timeline.requests)
        if other == room and attempt in (None, tried)
    }
    found = set()
    for row in np.flatnonzero(np.isin(allocs.request, list(mine))).tolist():
        process, page = int(allocs.process[row]), int(allocs.page[row])
        got = allocs.moment_of(row)
        back = timeline.owners.free_row(process, int(allocs.request[row]), page, since=int(allocs.seq[row]))
        for buffer in timeline.buffers:
            if buffer.process != process:
                continue
            for piece in descriptors.touching(buffer.number, page).tolist():
                send, owner = int(pieces.send[piece]), int(pieces.request[piece])
                if owner < 0 or owner in mine or send in found:
                    continue
                done = descriptors.completion(send)
                if done is not None and order.before(done, got):
                    continue
                posted = timeline.moment("send", send)
                if back is not None and order.before(timeline.owners.frees.moment_of(back), posted):
                    continue
                found.add(send)
    return np.array(sorted(found), np.int64)


def page_entries(trace: Trace, place: BufferPage) -> list[Entry]:
    """Every event that touched the physical page ``place``, in order.

    Allocations name pages and no buffers, so they count for every layer. A send is found by the addresses it writes.
    """
    events = Events(trace, place)
    ids = events.buffers_like(place)

    def here(table: Table, column: str, buffers: bool = True) -> I64:
        pages = table.ragged(column)
        hit = np.zeros(len(table), bool)
        hit[pages.owner()[pages.values == place.page]] = True
        hit &= table["process"] == place.process
        if buffers:
            hit &= np.isin(table["buffer"], ids)
        return np.flatnonzero(hit)

    found: list[Entry] = []
    for name, column, buffers in (
        ("alloc", "pages", False),
        ("free", "pages", False),
        ("receive", "pages", False),
        ("snapshot", "pages", True),
        ("read", "table", True),
    ):
        found += events.entries(name, here(trace.table(name), column, buffers))
    stores, copies = _local(trace, place, ids)
    found += events.entries("store", stores)
    found += events.entries("copy", copies)
    sends = events.sends_touching(place, ids)
    found += events.entries("send", sends)
    found += events.entries("transfer_state", events.states_of(sends, lambda table: np.zeros(0, np.int64)))
    return in_order(trace, found)


def _local(trace: Trace, place: BufferPage, ids: Sequence[int]) -> tuple[I64, I64]:
    """Stores that land in the page, and copies that do or that read it."""
    timeline = Timeline(trace)
    numbers = [timeline.buffer_number(place.process, buffer) for buffer in ids]
    writes = LocalWrites(timeline)
    # A padding row is no row of the page: a right kernel skips it.
    landed = [write for n in numbers for write in writes.of_page(n, place.page) if not write.padding]
    rows = {name: [write.row for write in landed if write.table == name] for name in ("store", "copy")}
    table = trace.table("copy")
    source = table.ragged("source_ids")
    page = source.values.astype(np.int64)
    by_row = (table["unit"] == "row")[source.owner()]
    page[by_row] //= max((timeline.buffers[n].layout.rows for n in numbers), default=1)
    read = np.zeros(len(table), bool)
    read[source.owner()[page == place.page]] = True
    read &= (table["process"] == place.process) & np.isin(table["source_buffer"], ids)
    return np.unique(np.array(rows["store"], np.int64)), np.union1d(
        rows["copy"], np.flatnonzero(read)
    ).astype(np.int64)


def in_order(trace: Trace, entries: Iterable[Entry]) -> list[Entry]:
    """``entries`` in an order that happens-before allows; neighbours that differ in their layer only are joined."""
    order = HappensBefore(trace)
    lines: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        lines.setdefault((entry.moment.process, entry.moment.line), []).append(entry)
    queues = [sorted(line, key=lambda entry: (entry.moment.seq, entry.layers)) for line in lines.values()]
    one_host = len({process.host for process in trace.processes}) == 1
    result: list[Entry] = []
    while queues:
        heads = [queue[0] for queue in queues]
        free = [
            number
            for number, head in enumerate(heads)
            if not any(_before(order, other, head) for other in heads if other is not head)
        ]
        number = min(free or range(len(heads)), key=lambda i: _preference(heads[i], one_host, result))
        head = queues[number].pop(0)
        if not queues[number]:
            queues.pop(number)
        if result and _joins(result[-1], head):
            layers = tuple(sorted({*result[-1].layers, *head.layers}))
            result[-1] = replace(result[-1], layers=layers, end_ns=head.end_ns, moment=head.moment)
            continue
        proved = not result or _before(order, result[-1], head)
        result.append(replace(head, ordered=proved))
    return result


def _before(order: HappensBefore, first: Entry, second: Entry) -> bool:
    """Happens-before; the end of an edge itself comes after all that its beginning comes after."""
    later = second.moment
    if second.kind == "order" and HEARD in second.text:
        later = replace(later, begin_seq=later.begin_seq + 1)
    return order.before(first.moment, later)


def _preference(entry: Entry, one_host: bool, result: Sequence[Entry]) -> tuple[Any, ...]:
    """Which of the entries that may come next does: the earlier by the clock where clocks compare, else no change."""
    if one_host:
        return entry.end_ns, entry.moment.process, entry.moment.seq
    stays = bool(result) and result[-1].moment.process == entry.moment.process
    return not stays, entry.moment.process, entry.moment.seq


def _joins(last: Entry, entry: Entry) -> bool:
    same_line = (last.moment.process, last.moment.line) == (entry.moment.process, entry.moment.line)
    same = (last.kind, last.text, last.buffer) == (entry.kind, entry.text, entry.buffer)
    return same_line and same and bool(entry.layers) and not set(entry.layers) & set(last.layers)


def _is_key_of(text: str, room: int, attempt: int | None) -> bool:
    """Whether an order key is the request's."""
    key = request_key(text)
    return key is not None and key.room == room and attempt in (None, key.attempt)


def page_title(trace: Trace, place: BufferPage) -> str:
    """The page, and whose it is."""
    owner = trace.processes[place.process]
    return f"{place}, {owner.role} rank {owner.rank}"


def timeline_text(trace: Trace, title: str, entries: Sequence[Entry], *, place_told: bool = False) -> str:
    """``entries`` as lines: proof of order, process, sequence number, milliseconds, layers, and what it was.

    Where all are of the same layers these stand beside the title, unless it tells them itself (``place_told``).
    """
    names = [_process_name(trace, number) for number in range(len(trace.processes))]
    wide = max((len(names[entry.moment.process]) for entry in entries), default=0)
    told = ", ".join(
        f"{name} is {p.role} rank {p.rank}" for name, p in zip(names, trace.processes, strict=True)
    )
    places = {(entry.buffer, entry.layers) for entry in entries if entry.layers}
    common = [
        f" [{name} {ids_text(layers)}]" for name, layers in places if len(places) == 1 and not place_told
    ]
    lines = _wrapped(f"{title}: {counted(len(entries), 'line')}; {told}", "  ", "".join(common))
    lines += ["~ not ordered against the line above; ms only compares within one host", ""]
    origin = _origins(trace, entries)
    for entry in entries:
        when = (entry.begin_ns - origin[trace.processes[entry.moment.process].host]) / 1e6
        layers = f"  [{entry.buffer} {ids_text(entry.layers)}]" if entry.layers and len(places) > 1 else ""
        proof = " " if entry.ordered else "~"
        head = f"{proof} {names[entry.moment.process]:{wide}} {entry.moment.seq:>8} {when:>10.3f}  "
        lines += _wrapped(f"{head}{entry.text}", " " * (len(head) + 2), layers)
    return "\n".join(lines)


def _wrapped(text: str, indent: str, tail: str = "") -> list[str]:
    """``text`` in lines of at most 80 columns, which an issue shows without a scroll bar; ``tail`` stays together."""
    lines = [""]
    for word in [*re.split(r"(?<=\S)(?= +\S)", printable(text)), printable(tail)]:
        if len(lines[-1]) + len(word) > WIDTH and lines[-1].strip():
            lines.append(indent + word.lstrip())
        else:
            lines[-1] += word
    return lines


def timeline_json(trace: Trace, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """``entries`` as plain JSON types; times are strings, for they do not fit the numbers of every reader."""
    return [
        {
            "process": entry.moment.process,
            "role": trace.processes[entry.moment.process].role,
            "rank": trace.processes[entry.moment.process].rank,
            "seq": entry.moment.seq,
            "begin_seq": entry.moment.begin_seq,
            "begin_ns": str(entry.begin_ns),
            "end_ns": str(entry.end_ns),
            "kind": entry.kind,
            "text": entry.text,
            "buffer": entry.buffer,
            "layers": list(entry.layers),
            "ordered": entry.ordered,
            "req_pool_idx": entry.req_pool_idx,
            "generation": entry.generation,
        }
        for entry in entries
    ]


def _process_name(trace: Trace, number: int) -> str:
    process = trace.processes[number]
    twins = [
        i
        for i, other in enumerate(trace.processes)
        if (other.role, other.rank) == (process.role, process.rank)
    ]
    name = f"{process.role[:1].upper()}{process.rank}"
    return name if len(twins) == 1 else f"{name}.{twins.index(number)}"


def _origins(trace: Trace, entries: Sequence[Entry]) -> dict[str, int]:
    """First time on each host."""
    origin: dict[str, int] = {}
    for entry in entries:
        host = trace.processes[entry.moment.process].host
        origin[host] = min(origin.get(host, entry.begin_ns), entry.begin_ns)
    return origin
