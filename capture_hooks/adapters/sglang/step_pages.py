"""The pages of a pass: which are its requests' own, which it wrote, and how they are after it (ST)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.pools import PoolBuffer
from capture_hooks.adapters.sglang.requests import Held
from capture_hooks.adapters.sglang.step import I64, Row, Seen, Step
from capture_hooks.codec import StampTuple
from capture_hooks.events import Alloc, Snapshot
from capture_hooks.layouts import LAYOUTS
from capture_hooks.taps.pages import emit_snapshot

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.taps.device import DeviceTap


class StepPages:
    """What is told of the pages of passes. ``seen`` gives what was recorded of a request so far."""

    def __init__(self, session: Session, seen: Callable[[Held], Seen]) -> None:
        self._session, self._recorder, self._seen = session, session.recorder, seen

    def take(self, step: Step, tap: DeviceTap, runner: Any, batch: Any) -> None:
        """Put by the pages of the step's requests, and the bytes of those that it wrote."""
        from capture_hooks.taps.device import gather

        buffers = self._session.buffers
        judged = buffers.judged
        if not judged:
            return
        tokens = page_tokens(judged[0])
        written = [
            (row, logical)
            for row in step.rows
            for logical in written_pages(row.before, row.length, judged[0].tokens_per_row, tokens)
        ]
        known = [(row, logical) for row in step.rows for logical in self._wanted(step, row, tokens)]
        step.asked = len({row.index for row, _ in known})
        looks = written if self._recorder.options.tap("store") else []
        pairs = looks + known
        if not pairs:
            return
        table = runner.req_to_token_pool.req_to_token
        places = np.array([[row.index, logical * tokens] for row, logical in pairs], np.int64)
        on_device = tap.upload(places)
        rows = batch.req_pool_indices.index_select(
            0, on_device[:, 0].clamp(0, batch.req_pool_indices.shape[0] - 1)
        )
        flat = (rows.long() * table.shape[1] + on_device[:, 1]).clamp(0, table.numel() - 1)
        pages = table.reshape(-1).index_select(0, flat).long() // tokens
        at_pages = step.job.take(pages)
        mark = self._recorder.mark()
        at_bytes = [
            step.job.take(gather(b.tensor, pages[: len(looks)], LAYOUTS[b.format].page_bytes))
            for b in judged
            if looks
        ]
        stamp = self._recorder.stamp(mark, step.line)
        count = len(looks)

        def finish(step: Step, arrays: list[npt.NDArray[Any]]) -> None:
            found = arrays[at_pages]
            self._allocs(step, known, found[count:])
            for buffer, place in zip(judged, at_bytes, strict=False):
                self._stored(step, buffer, looks, found[:count], arrays[place], stamp)

        step.parts.insert(0, finish)

    def _wanted(self, step: Step, row: Row, tokens: int) -> Iterable[int]:
        """Logical pages of a row whose place is asked for: all in an extend pass or the first one, else a new
        page.
        """
        seen = self._seen(row.held)
        first = seen.shared < 0
        if first:
            seen.shared = row.before // tokens if self._session.role != "decode" else 0
        last = (row.length - 1) // tokens
        seen.pages = max(seen.pages, last + 1)
        if step.extend:
            seen.passes.append((step.number, last + 1))
        if step.extend or first:
            return range(last + 1)
        return range(last, last + 1) if (row.length - 1) % tokens == 0 else ()

    def _allocs(self, step: Step, pairs: list[tuple[Row, int]], pages: I64) -> None:
        """Tell pages that a request did not have before."""
        stamp = self._at_begin(step)
        by_row: dict[int, list[tuple[int, int]]] = {}
        held_of = {row.index: row.held for row, _ in pairs}
        for (row, logical), page in zip(pairs, pages.tolist(), strict=True):
            by_row.setdefault(row.index, []).append((logical, page))
        for index, entries in by_row.items():
            self._tell(held_of[index], entries, stamp)

    def sent(self, tap: DeviceTap, held: Held, logical: int, pages: I64) -> None:
        """A send names ``pages[i]`` as logical page ``logical + i``, of which passes so far tell.

        The prefix tree may have put its page in the place of the request's own since then: it takes the last chunk in
        before that is sent. So what the passes tell is waited for, on the tap's thread, and compared.
        """
        from capture_hooks.taps.device import Job

        stamp = self._recorder.stamp()
        entries = list(enumerate(pages.tolist(), logical))
        tap.submit(Job(), lambda _: self._tell(held, entries, stamp), [(Alloc.TABLE, 1)])

    def _tell(self, held: Held, entries: list[tuple[int, int]], stamp: StampTuple) -> None:
        """Tell (logical page, page) that are news."""
        news = [(logical, page) for logical, page in entries if held.pages.get(logical) != page]
        shared = max(0, self._seen(held).shared)
        for first, run, theirs in runs(news, shared, held.pages):
            self._session.owners.give(held, first, run, shared=theirs, stamp=stamp)

    def _at_begin(self, step: Step) -> StampTuple:
        """A stamp at the begin of a step, on its stream: what was so when the pass began."""
        seq, now = step.begin
        return seq, seq, self._recorder.stamp()[2], step.line, now, now

    def _stored(
        self,
        step: Step,
        buffer: PoolBuffer,
        looks: list[tuple[Row, int]],
        pages: I64,
        data: npt.NDArray[np.uint8],
        stamp: StampTuple,
    ) -> None:
        """ST of the pages that the pass wrote, one record a request."""
        held_buffer = self._recorder.inventory.buffer(buffer.number)
        start = 0
        while start < len(looks):
            row = looks[start][0]
            stop = start
            while stop < len(looks) and looks[stop][0] is row:
                stop += 1
            logical = np.array([k for _, k in looks[start:stop]], np.int64)
            bare = Snapshot(
                "ST", "", row.held.room, row.held.attempt, buffer.number, -1, step.number,
                row.length // buffer.tokens_per_row,
            )  # fmt: skip
            emit_snapshot(
                self._recorder,
                held_buffer,
                bare,
                np.array(pages[start:stop]),
                logical,
                data[start:stop],
                stamp,
            )
            start = stop


def page_tokens(buffer: PoolBuffer) -> int:
    """Tokens whose rows share a page of the buffer."""
    return LAYOUTS[buffer.format].rows * buffer.tokens_per_row


def written_pages(before: int, length: int, tokens_per_row: int, tokens: int) -> range:
    """Logical pages to which a pass from ``before`` to ``length`` tokens writes rows (a row is written with
    its last token).
    """
    first, last = before // tokens_per_row, length // tokens_per_row - 1
    rows = tokens // tokens_per_row
    return range(first // rows, last // rows + 1) if last >= first else range(0)


def runs(news: list[tuple[int, int]], shared: int, had: dict[int, int]) -> list[tuple[int, list[int], bool]]:
    """Adjacent logical pages with one answer to "was it another's?": (first logical page, pages, shared).

    Pages of a prefix that was there before are another's; so is a page that replaces one which the request
    had: the prefix tree has put an equal one in its place.
    """
    found: list[tuple[int, list[int], bool]] = []
    for logical, page in sorted(news):
        theirs = logical < shared or logical in had
        if found and found[-1][0] + len(found[-1][1]) == logical and found[-1][2] == theirs:
            found[-1][1].append(page)
        else:
            found.append((logical, [page], theirs))
    return found
