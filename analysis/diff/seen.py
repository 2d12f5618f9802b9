"""The page snapshots of one request, flat, and what its prompt fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from replay.trace.reader import Trace

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

#: Looks at a page, in the order of the ladder: label, stage of the record, its moments (None: any).
SNAPSHOTS: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("store", "ST", None),
    ("source", "SE", ("before", "")),
    ("source, after", "SE", ("after",)),
    ("arrival", "RC", ("", "after")),
    ("later", "LT", None),
    ("reads", "RD", None),
)
#: The first of them that only the reading side has.
ARRIVAL = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """Page snapshots of one request, flat: one row a page."""

    stage: I64  #: index into SNAPSHOTS
    process: I64
    slot: npt.NDArray[np.object_]  #: (buffer name, layer)
    format: npt.NDArray[np.object_]
    logical: I64
    page: I64
    content: I64
    reading: Bool  #: made by the side that reads

    @property
    def slots(self) -> set[tuple[str, int]]:
        """All (buffer name, layer) that were seen."""
        return set(self.slot)


def snapshots_of(trace: Trace, room: int, attempt: int) -> Seen:
    """Every page look of a request that can be told apart, without those after it gave its pages back."""
    table = trace.table("snapshot")
    rows = np.flatnonzero((table["room"] == room) & (table["attempt"] == attempt))
    stages, moments = table["stage"][rows], table["moment"][rows]
    kind = np.full(len(rows), -1, np.int64)
    for number, (_, stage, wanted) in enumerate(SNAPSHOTS):
        kind[(stages == stage) & (True if wanted is None else np.isin(moments, wanted))] = number
    # After the request has given its pages back, a late step may still show them: they are the next owner's.
    freed = _freed(trace, room, attempt)
    process = table["process"][rows]
    last = np.array([freed.get(int(number), np.iinfo(np.int64).max) for number in process], np.int64)
    keep = (kind >= 0) & (table["seq"][rows] <= last)
    rows, kind, process = rows[keep], kind[keep], process[keep]
    buffers = buffer_names(trace)
    known = np.array(
        [(int(p), int(b)) in buffers for p, b in zip(process, table["buffer"][rows], strict=True)], bool
    )
    reading = np.isin(process, list(set(process[known & (kind >= ARRIVAL)]) or set(process)))
    if not reading.all():
        # Pages were sent: the store that counts is the sender's. The reader's own append rows to the last page.
        known &= (kind >= ARRIVAL) | ~reading
    rows, kind, process, reading = rows[known], kind[known], process[known], reading[known]
    names = [buffers[int(p), int(b)] for p, b in zip(process, table["buffer"][rows], strict=True)]
    logical, pages, content = (table.ragged(name) for name in ("logical", "pages", "content"))
    counts = np.array([len(logical[row]) for row in rows], np.int64)
    slot, layout = np.empty(len(rows), object), np.empty(len(rows), object)
    for number, name in enumerate(names):
        slot[number], layout[number] = name[:2], name[2]
    return Seen(
        stage=np.repeat(kind, counts),
        process=np.repeat(process.astype(np.int64), counts),
        slot=np.repeat(slot, counts),
        format=np.repeat(layout, counts),
        logical=_join([logical[row] for row in rows]),
        page=_join([pages[row] for row in rows]),
        content=_join([content[row] for row in rows]),
        reading=np.repeat(reading, counts),
    )


def references(seen: Seen, looks: I64) -> dict[int, int]:
    """Logical page -> the look that its other looks are compared with: one of the first stage that saw it.

    Stores and sends may fill a page in several steps: their last look has it whole. Later stages are to see it whole
    from the first look on.
    """
    found: dict[int, int] = {}
    for look in looks[np.argsort(seen.stage[looks], kind="stable")].tolist():
        logical = int(seen.logical[look])
        first = found.get(logical)
        if first is None or (seen.stage[look] == seen.stage[first] and seen.stage[look] < ARRIVAL):
            found[logical] = look
    return found


def is_step(seen: Seen, look: int, reference: int) -> bool:
    """Whether ``look`` may rightly show less than ``reference``: an earlier step of the same stage."""
    return bool(seen.stage[look] == seen.stage[reference] and seen.stage[look] < ARRIVAL)


def _join(parts: Sequence[npt.NDArray[np.int64]]) -> I64:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)


def buffer_names(trace: Trace) -> dict[tuple[int, int], tuple[str, int, str]]:
    """(name, layer, format) of each (process, buffer id)."""
    table = trace.table("buffer")
    columns = (table[name] for name in ("process", "buffer", "name", "layer", "format"))
    return {
        (int(process), int(buffer)): (str(name), int(layer), str(format_))
        for process, buffer, name, layer, format_ in zip(*columns, strict=True)
    }


def _freed(trace: Trace, room: int, attempt: int) -> dict[int, int]:
    """Sequence number of the request's last free in each process."""
    table = trace.table("free")
    rows = np.flatnonzero((table["room"] == room) & (table["attempt"] == attempt))
    return {int(table["process"][row]): int(table["seq"][row]) for row in rows}


def prompt_rows(trace: Trace, room: int, attempt: int) -> int:
    """Rows that the prompt fills, -1 where nobody told."""
    table = trace.table("request")
    rows = table["rows"][(table["room"] == room) & (table["attempt"] == attempt)]
    return int(rows.max()) if len(rows) else -1
