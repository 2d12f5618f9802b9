"""Whether the pools of two sides fit together, from their inventories alone: before any page has moved.

Peers pair buffers by their place in a list and compute addresses from item lengths; what no handshake compares goes
wrong in silence. Each disagreement is a hazard: it changes no byte by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from capture_hooks.layouts import LAYOUTS
from replay.trace.reader import Trace

SCHEMA = "kv-replay/geometry/1"

#: Kind of hazard -> what it can lead to.
KINDS = {
    "missing-buffer": "F01",
    "not-registered": "F01",
    "format": "F03",
    "item-length": "F03",
    "pitch": "F03",
    "page-size": "F04",
    "index-space": "F04",
    "layer-pairing": "F05",
}


@dataclass(frozen=True, slots=True)
class Held:
    """One buffer of one process."""

    process: str
    name: str
    layer: int
    format: str
    address: int
    pages: int
    pitch: int
    item_length: int
    tokens_per_row: int
    registered: bool

    @property
    def judged(self) -> bool:
        """Whether its page format is known."""
        return self.format in LAYOUTS

    @property
    def page_tokens(self) -> int:
        """Tokens that one page id stands for, 0 where the format does not say."""
        return LAYOUTS[self.format].rows * self.tokens_per_row if self.judged else 0

    @property
    def items(self) -> int:
        """How many items of the told length the buffer holds: the page ids that can be addressed."""
        return self.pages * self.pitch // self.item_length if self.item_length else 0


@dataclass(frozen=True, slots=True)
class GeometryHazard:
    """One disagreement: its kind (a key of :data:`KINDS`), the kind of fault it can lead to, and both
    sides' values.
    """

    kind: str
    fault: str
    where: str
    what: str
    prefill: Any = None
    decode: Any = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Result of a comparison: names of the two sides' processes, their buffers, and the hazards."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    buffers: tuple[int, int]
    hazards: tuple[GeometryHazard, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON types, schema ``kv-replay/geometry/1``."""
        return {"schema": SCHEMA, **asdict(self)}


def _sides(trace: Trace) -> tuple[list[int], list[int]]:
    """Numbers of the processes that send and that receive: by role, or the first two where roles do not tell.

    Either list may be empty.
    """
    roles = [process.role for process in trace.processes]
    senders = [n for n, role in enumerate(roles) if role == "prefill"]
    receivers = [n for n, role in enumerate(roles) if role == "decode"]
    if not (senders or receivers) and len(roles) == 2:
        return [0], [1]
    return senders, receivers


def compare(trace: Trace) -> Geometry:
    """Compare the inventories of the two sides in ``trace``."""
    both = _sides(trace)
    left, right = ([_held(trace, number) for number in side] for side in both)
    names = tuple(
        tuple(f"{trace.processes[n].role} {trace.processes[n].rank}" for n in side) for side in both
    )
    found: list[GeometryHazard] = []
    if any(left) and any(right):
        found += _alone((*left, *right))
        found += _between([b for one in left for b in one], [b for one in right for b in one])
        found += _pairing(left, right)
    return Geometry(
        names[0], names[1], (sum(map(len, left)), sum(map(len, right))), tuple(dict.fromkeys(found))
    )


def _held(trace: Trace, process: int) -> list[Held]:
    """The buffers of a process in the order in which they were told."""
    table, ranges = trace.table("buffer"), trace.table("registration")
    mine = ranges["process"] == process
    begin = ranges["address"][mine].astype(np.uint64)
    end = begin + ranges["length"][mine].astype(np.uint64)
    info = trace.processes[process]
    found = []
    for row in np.flatnonzero(table["process"] == process).tolist():
        address, pages, pitch = (int(table[name][row]) for name in ("address", "pages", "pitch"))
        last = np.uint64(address + pages * pitch)
        # A process that registered nothing may do so later: nothing follows from it.
        inside = not len(begin) or bool(((begin <= np.uint64(address)) & (end >= last)).any())
        found.append(
            Held(
                f"{info.role} {info.rank}",
                str(table["name"][row]),
                int(table["layer"][row]),
                str(table["format"][row]),
                address,
                pages,
                pitch,
                int(table["item_length"][row]),
                int(table["tokens_per_row"][row]),
                inside,
            )
        )
    return found


def _hazard(kind: str, where: str, what: str, prefill: Any = None, decode: Any = None) -> GeometryHazard:
    return GeometryHazard(kind, KINDS[kind], where, what, prefill, decode)


def _alone(processes: Iterable[list[Held]]) -> list[GeometryHazard]:
    """What does not fit within one side."""
    found = []
    for buffers in processes:
        judged = [b for b in buffers if b.judged]
        most = max((b.items for b in judged), default=0)
        for b in judged:
            where = f"{b.process}: {b.name} layer {b.layer}"
            page = LAYOUTS[b.format].page_bytes
            if b.item_length % b.pitch or b.item_length < page:
                found.append(
                    _hazard(
                        "item-length",
                        where,
                        f"the transfer is told items of {b.item_length} bytes for pages of {page} ({b.format}) "
                        f"that lie {b.pitch} bytes apart",
                    )
                )
            if not b.registered:
                found.append(
                    _hazard("not-registered", where, "its memory is not registered with the transfer library")
                )
            if b.items != most:
                found.append(
                    _hazard(
                        "index-space",
                        where,
                        f"it holds {b.items} items where another layer holds {most}: page ids above are outside it",
                    )
                )
    return found


def _between(left: list[Held], right: list[Held]) -> list[GeometryHazard]:
    """What does not fit between the two sides, buffer by buffer."""
    here, there = ({(b.name, b.layer): b for b in side} for side in (left, right))
    found = []
    for name, layer in sorted(here.keys() | there.keys()):
        where = f"{name} layer {layer}"
        a, b = here.get((name, layer)), there.get((name, layer))
        if a is None or b is None:
            has, lacks = ("decode", "prefill") if a is None else ("prefill", "decode")
            found.append(
                _hazard(
                    "missing-buffer", where, f"{has} has it, {lacks} has not", a is not None, b is not None
                )
            )
            continue
        if a.format != b.format:
            found.append(
                _hazard("format", where, f"{a.format} at prefill, {b.format} at decode", a.format, b.format)
            )
        if a.item_length != b.item_length:
            found.append(
                _hazard(
                    "item-length",
                    where,
                    f"{a.item_length} bytes a page at prefill, {b.item_length} at decode",
                    a.item_length,
                    b.item_length,
                )
            )
        elif a.pitch != b.pitch:
            found.append(
                _hazard(
                    "pitch",
                    where,
                    f"pages lie {a.pitch} bytes apart at prefill, {b.pitch} at decode",
                    a.pitch,
                    b.pitch,
                )
            )
        if a.page_tokens and b.page_tokens and a.page_tokens != b.page_tokens:
            found.append(
                _hazard(
                    "page-size",
                    where,
                    f"a page id stands for {a.page_tokens} tokens at prefill, for {b.page_tokens} at decode",
                    a.page_tokens,
                    b.page_tokens,
                )
            )
    return found


def _pairing(left: list[list[Held]], right: list[list[Held]]) -> list[GeometryHazard]:
    """Buffers of one name pair by their place: the layers in one place must be the same."""
    found = []
    for one in left:
        for other in right:
            for name in dict.fromkeys(b.name for b in one):
                a, b = (tuple(x.layer for x in side if x.name == name) for side in (one, other))
                if len(a) != len(b) or a == b:
                    continue  # one side has more layers (pipeline ranks, missing buffers): told above
                place = next(i for i in range(len(a)) if a[i] != b[i])
                found.append(
                    _hazard(
                        "layer-pairing",
                        f"{one[0].process} -> {other[0].process}: {name}",
                        f"number {place} is layer {a[place]} at prefill and layer {b[place]} at decode",
                        a,
                        b,
                    )
                )
    return found
