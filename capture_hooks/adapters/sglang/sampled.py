"""Rows of a read that are recorded whole: what was put by of one kernel call, and the records that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.step import Part, Row, Step
from capture_hooks.codec import StampTuple
from capture_hooks.events import Read, Snapshot
from capture_hooks.layouts import LAYOUTS
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import emit_snapshot

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.pools import PoolBuffer

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Taken:
    """Sampled rows of one kernel call: where their parts are among the arrays of the job."""

    buffer: PoolBuffer
    kernel: str
    rows: list[Row]
    pages: list[tuple[int, int]]  # (place in rows, logical page) of each page that was looked at
    before: int = -1
    after: int = -1
    looked: StampTuple = (-1, -1, 0, -1, 0, 0)
    stamp: StampTuple = (-1, -1, 0, -1, 0, 0)
    last: StampTuple = (-1, -1, 0, -1, 0, 0)
    table: int = -1
    table_after: int = -1  # of this call alone; -1: the pass has it, or nobody
    lengths: int = -1
    gathered: int = -1  # keys of the row that were copied before they were scored
    query: int = -1
    weights: int = -1
    logits: int = -1
    top_k: int = -1
    k: int = -1


@dataclass(slots=True)
class Gathered:
    """A copy of keys that one layer gathered. ``waiting`` are the sampled rows whose logits are still to come."""

    keys: int  # address of the copy
    waiting: list[Taken]
    read: bool = False  # logits were made of it


@dataclass(slots=True)
class Layer:
    """The call for one layer while it runs."""

    rows: int = 0  # query rows that kernels have done so far
    k: int = -1
    busy: bool = False  # a kernel runs: what it calls is a part of it
    reads: list[Taken] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # records of ``reads``, once it is known whose they are
    gathered: Gathered | None = None

    @property
    def left(self) -> bool:
        """Whether keys were gathered of which not all logits were seen."""
        return self.gathered is not None and (not self.gathered.read or bool(self.gathered.waiting))


def tell(recorder: Recorder, step: Step, taken: Taken, arrays: list[npt.NDArray[Any]]) -> None:
    """Records of the sampled rows of one kernel call."""
    rows_of_page = LAYOUTS[taken.buffer.format].rows
    held_buffer = recorder.inventory.buffer(taken.buffer.number)
    lengths = arrays[taken.lengths].astype(np.int64)
    after = None
    if taken.table_after < 0 and "tables" in step.extra and "after" in step.extra["tables"]:
        after = arrays[step.extra["tables"]["after"]]
    places = np.array([place for place, _ in taken.pages], np.int64)
    logical = np.array([page for _, page in taken.pages], np.int64)
    for place, row in enumerate(taken.rows):
        rows = int(lengths[place])
        used = page_count(rows, rows_of_page)
        table = arrays[taken.table][place].astype(np.int64)
        mine = np.flatnonzero(places == place)
        for moment, part, stamp in (
            ("before", taken.before, taken.looked),
            ("after", taken.after, taken.last),
        ):
            bare = Snapshot(
                "RD", moment, row.held.room, row.held.attempt, taken.buffer.number, -1, step.number, rows
            )
            emit_snapshot(
                recorder,
                held_buffer,
                bare,
                table[logical[mine]],
                logical[mine],
                arrays[part][mine],
                stamp,
            )
        more: dict[str, Any] = {}
        if taken.query >= 0:
            more = {
                "query": E4M3[arrays[taken.query][place]],
                "weights": np.array(arrays[taken.weights][place], np.float32),
            }
            if taken.logits >= 0:
                more["logits"] = np.array(arrays[taken.logits][place][:rows], np.float32)
            if taken.top_k >= 0:
                wanted = taken.k if taken.k > 0 else arrays[taken.top_k].shape[1]
                more["top_k"] = request_rows(
                    arrays[taken.top_k][place][:wanted].astype(np.int64), table[:used], rows_of_page
                )
        then = np.zeros(0, np.int64)
        if taken.table_after >= 0:
            then = arrays[taken.table_after][place, :used].astype(np.int64)
        elif after is not None:
            then = after[row.index, :used].astype(np.int64)
        recorder.emit_at(
            Read(
                row.held.room, row.held.attempt, taken.buffer.number, step.number, rows, table[:used], then,
                taken.k, taken.kernel, **more,
            ),
            taken.stamp,
        )  # fmt: skip


def request_rows(slots: I64, table: I64, rows_of_page: int) -> npt.NDArray[np.int32]:
    """Rows of the request for physical ``slots`` (page times rows plus row) by its block table.

    -1 stays -1; a slot in a page that the table does not have becomes -2.
    """
    found = np.full(len(slots), -2, np.int32)
    found[slots == -1] = -1
    page, row = np.divmod(slots, rows_of_page)
    if len(table):
        order = np.argsort(table, kind="stable")
        where = np.minimum(np.searchsorted(table[order], page), len(table) - 1)
        hit = (table[order][where] == page) & (slots >= 0)
        found[hit] = (order[where][hit] * rows_of_page + row[hit]).astype(np.int32)
    return found


def e4m3_values() -> F32:
    """Value of each e4m3fn code: float32[256] (no infinities; 0x7F and 0xFF are NaN)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8.0
    values = np.where(
        exponent == 0, fraction * 2.0**-6, (1.0 + fraction) * 2.0 ** (exponent.astype(np.float64) - 7)
    )
    values = np.where(codes & 128, -values, values)
    values[(codes & 127) == 127] = np.nan
    return values.astype(np.float32)


E4M3 = e4m3_values()


def query_row(step: Step, row: Row) -> int:
    """Query row of a request's newest token in a pass."""
    return row.start + row.length - row.before - 1 if step.extend else row.index


def page_count(rows: int, rows_of_page: int) -> int:
    """Pages that so many rows lie in."""
    return -(-rows // rows_of_page)
