"""Flat columns of what happened to single pages: one row a page looked at, given or taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.order import Moment
from replay.trace.errors import DAMAGED, TraceError

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

#: Logical page numbers and ids beyond this are refused: they would overflow the cell keys.
MAX_LOGICAL = 1 << 22

#: Buffers and pages are joined to one number, ``buffer * PLACE + page``.
PLACE = 1 << 40


def place(buffer: I64, page: I64) -> I64:
    """One number for each (buffer, page); a page outside ``0 .. PLACE - 1`` gets -1, which matches nothing."""
    return np.where((buffer >= 0) & (page >= 0) & (page < PLACE), buffer * PLACE + page, -1)


def column_at(column: I64, rows: I64) -> I64:
    """``column[rows]``, -1 where the row is -1; the column may be empty."""
    if not len(column):
        return np.full(np.shape(rows), -1, np.int64)
    return np.where(rows >= 0, column[np.maximum(rows, 0)], -1)


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """One buffer of one process. ``number`` is its row in :attr:`Timeline.buffers`."""

    number: int
    process: int
    buffer: int
    name: str
    layer: int
    layout: Layout
    address: int
    pages: int
    pitch: int
    item_length: int
    tokens_per_row: int


def row_numbers(rows: I64) -> I64:
    """A number for each row of ``rows``, the same for equal rows: column by column, for sorting rows takes longer."""
    number = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values, code = np.unique(column, return_inverse=True)
        _, number = np.unique(number * len(values) + code.reshape(-1), return_inverse=True)
    return number.reshape(-1)


def rows_in(want: I64, have: I64) -> Bool:
    """Whether each row of ``want`` is a row of ``have``."""
    if not len(want) or not len(have):
        return np.zeros(len(want), bool)
    number = row_numbers(np.concatenate([have, want]))
    return np.isin(number[len(have) :], number[: len(have)])


class EventColumn(np.lib.mixins.NDArrayOperatorsMixin):
    """A column of the snapshot table as one of page looks: each look has the value of its record.

    It stands for the array ``values[event]`` and makes as much of it as is asked for: over millions of looks a dozen
    such arrays would take more memory than everything else.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, values: I64, event: I64) -> None:
        self._values, self._event = values, event

    def __len__(self) -> int:
        return len(self._event)

    def __getitem__(self, rows: Any) -> Any:
        return self._values[self._event[rows]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> I64:
        if copy is False:
            raise ValueError("the array of an event column is made when it is asked for")
        found = self._values[self._event]
        return found if dtype is None else found.astype(dtype, copy=False)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(function, method)(*(np.asarray(item) for item in inputs), **options)


def by_event(values: I64, event: I64) -> I64:
    """:class:`EventColumn` that passes for the array that it stands for."""
    return cast("I64", EventColumn(values, event))


@dataclass(frozen=True, slots=True)
class PageSnapshots:
    """Flat columns, one row a page look (``event`` is the row of the snapshot table).

    All but ``event``, ``logical``, ``page`` and ``content`` are event columns: index them with rows of looks.
    """

    event: I64
    stage: npt.NDArray[np.object_]  #: of the event table; index it with ``event``
    moment: npt.NDArray[np.object_]
    process: I64
    buffer: I64  #: number in ``Timeline.buffers``, -1 where unknown
    request: I64  #: number in ``Timeline.requests``, -1 where unknown
    logical: I64
    page: I64
    content: I64
    transfer: I64
    step: I64
    rows: I64
    begin_seq: I64
    seq: I64
    line: I64
    slot: I64  #: (layer, name) number, -1 where the buffer is unknown
    indexes: dict[str, tuple[I64, I64]] = field(default_factory=dict, repr=False)

    def where(self, stage: str, moment: str | None = None) -> I64:
        """Rows of one stage, and of one moment of it where given."""
        chosen = self.stage == stage
        if moment is not None:
            chosen &= self.moment == moment
        return np.flatnonzero(chosen[self.event])

    def index(self, stage: str) -> tuple[I64, I64]:
        """(places in ascending order, rows) of a stage's snapshots, for :meth:`at_place`."""
        if stage not in self.indexes:
            rows = self.where(stage)
            rows = rows[np.lexsort((self.seq[rows], place(self.buffer[rows], self.page[rows])))]
            self.indexes[stage] = (place(self.buffer[rows], self.page[rows]), rows)
        return self.indexes[stage]

    def at_place(self, stage: str, buffer: int, page: int) -> I64:
        """Rows of a stage's snapshots of one physical page, in sequence."""
        places, rows = self.index(stage)
        wanted = buffer * PLACE + page
        low, high = np.searchsorted(places, [wanted, wanted + 1])
        return rows[low:high]

    def moment_of(self, row: int) -> Moment:
        """The interval of one page snapshot."""
        return Moment(
            int(self.process[row]), int(self.line[row]), int(self.begin_seq[row]), int(self.seq[row])
        )


@dataclass(frozen=True, slots=True)
class PageEvents:
    """Flat columns of alloc or free, one row a page."""

    event: I64
    process: I64
    request: I64
    logical: I64  #: -1 for frees
    page: I64
    begin_seq: I64
    seq: I64
    line: I64

    def moment_of(self, row: int) -> Moment:
        """The interval of one row."""
        return Moment(
            int(self.process[row]), int(self.line[row]), int(self.begin_seq[row]), int(self.seq[row])
        )


def check_logical(logical: npt.NDArray[np.int64]) -> None:
    """Raise :class:`TraceError` for a logical page that no key holds."""
    if len(logical) and int(logical.max()) >= MAX_LOGICAL:
        raise TraceError(
            f"logical page {int(logical.max())} is beyond {MAX_LOGICAL - 1}", "the tables", DAMAGED
        )
