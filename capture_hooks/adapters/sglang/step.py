"""One forward pass while it runs: whose rows it has, and what is put by of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.requests import Held

if TYPE_CHECKING:
    from capture_hooks.taps.device import Job

I64 = npt.NDArray[np.int64]
Part = Callable[["Step", list[npt.NDArray[Any]]], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch: ``index`` is its place, ``start`` its first query token; lengths are in
    tokens.
    """

    index: int
    held: Held
    before: int
    length: int
    start: int


@dataclass(slots=True)
class Seen:
    """What was recorded of one request so far."""

    reads: int = 0
    due: bool = True  # its next read is recorded with bytes
    table: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    shared: int = -1  # logical pages that it took over from others; -1 before its first pass
    pages: int = 0  # logical pages that its passes tell of
    passes: list[tuple[int, int]] = field(default_factory=list)  # extend passes: number, pages by then


@dataclass(slots=True)
class Step:
    """One pass while it runs. ``parts`` are run in order with the job's arrays when it has arrived."""

    number: int
    extend: bool
    rows: list[Row]
    line: int
    begin: tuple[int, int]  # sequence number and time at its begin
    job: Job
    asked: int = 0  # requests whose pages it tells of
    queries: int = 0  # query rows of all requests of the batch
    parts: list[Part] = field(default_factory=list)
    stores: set[int] = field(default_factory=set)  # buffers whose store was seen
    closing: list[Callable[[], None]] = field(default_factory=list)  # taken when the pass is over
    once: dict[Any, int] = field(default_factory=dict)  # tensors taken once for all layers
    extra: dict[Any, Any] = field(default_factory=dict)

    def take_once(self, what: str, tensor: Any) -> int:
        """Add a tensor that several layers share; returns its place among the arrays."""
        key = (what, int(tensor.data_ptr()), tuple(tensor.shape))
        if key not in self.once:
            self.once[key] = self.job.take(tensor)
        return self.once[key]
