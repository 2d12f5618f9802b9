"""The host tier of the simulated engine: pages that a side gives up are copied there, and come back from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.accuracy.request import ROWS, Job
from benchmarks.accuracy.side import I64, U8, Side, Unit

if TYPE_CHECKING:
    from benchmarks.accuracy.pages import Pages


class HostTier:
    """What each side has in it, by text (:attr:`Job.key`) and logical page."""

    def __init__(self, pair: Pages) -> None:
        self.pair = pair
        self._kept: dict[str, dict[tuple[str, int], tuple[int, dict[Unit, U8]]]] = {}
        self._next = 0

    def texts(self) -> set[str]:
        """Requests of which any side has pages here."""
        return {key for pages in self._kept.values() for key, _ in pages}

    def has(self, side: Side, key: str, count: int) -> bool:
        """Whether a side has the first ``count`` pages of a request here."""
        kept = self._kept.get(side.agent, {})
        return all((key, k) in kept for k in range(count))

    def offload(self, side: Side, job: Job, count: int) -> None:
        """The first ``count`` pages of a request are copied to the host; nothing else is in the pages there."""
        if not count:
            return
        pages = job.pages[side.agent][:count]
        numbers = list(range(self._next, self._next + count))
        self._next += count
        carried = self._carried(side, job)
        kept = self._kept.setdefault(side.agent, {})
        for k, number in enumerate(numbers):
            held = {unit: np.zeros_like(side.memory[unit][pages[k]]) for unit in side.units}
            for unit in side.units:
                held[unit][carried] = side.memory[unit][pages[k], carried]
            kept[(job.key, k)] = (number, held)
        for unit in side.units:
            self._tell(side, job, unit, "offload", pages, numbers)

    def load_back(self, side: Side, job: Job, origin: str, count: int) -> None:
        """The first ``count`` pages of a request come back, as request ``origin`` left them here."""
        kept = [self._kept[side.agent][(origin, k)] for k in range(count)]
        pages = job.pages[side.agent][:count]
        carried = self._carried(side, job)
        for unit in side.units:
            for page, (_, held) in zip(pages, kept, strict=True):
                side.memory[unit][page, carried] = held[unit][carried]
            self._tell(side, job, unit, "load-back", pages, [number for number, _ in kept])

    def _carried(self, side: Side, job: Job) -> I64:
        """Bytes of a page that the copies of a request carry."""
        page = side.layout
        length = self.pair.deed.copied(self.pair, side, job)
        at = np.arange(page.page_bytes)
        if not self.pair.shape.host_rows:
            return at[:length]
        values = at[: page.scale_base].reshape(page.rows, -1)[:, :length]
        scales = at[page.scale_base :].reshape(page.rows, -1)[:, : max(0, length - page.value_bytes)]
        return np.concatenate([values.ravel(), scales.ravel()])

    def _tell(
        self,
        side: Side,
        job: Job,
        unit: Unit,
        operation: str,
        pages: list[int],
        numbers: list[int],
    ) -> None:
        """The record of one copy of one buffer."""
        length = self.pair.deed.copied(self.pair, side, job)
        pitch = self.pair.deed.host_pitch(self.pair, side)
        each = self._rows if self.pair.shape.host_rows else list
        width = side.pitch
        if self.pair.shape.host_rows:
            width = side.layout.value_bytes + side.layout.scale_bytes
        device: dict[str, Any] = {"buffer": side.buffer(unit)}
        ids, source_ids, stride, source_stride = each(pages), each(numbers), width, pitch
        if operation == "offload":
            device = {"source_buffer": side.buffer(unit)}
            ids, source_ids, stride, source_stride = source_ids, ids, source_stride, stride
        side.emit(
            "copy",
            operation=operation,
            unit="row" if self.pair.shape.host_rows else "page",
            source_ids=source_ids,
            ids=ids,
            logical=each(list(range(len(pages)))),
            length=length,
            source_stride=source_stride,
            stride=stride,
            **device,
            **job.who,
        )

    @staticmethod
    def _rows(pages: list[int]) -> list[int]:
        return [page * ROWS + row for page in pages for row in range(ROWS)]
