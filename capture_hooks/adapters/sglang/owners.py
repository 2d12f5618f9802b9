"""Pages given to requests and taken from them, and what is known of each request's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.pools import Buffers
from capture_hooks.adapters.sglang.requests import Held, Requests
from capture_hooks.codec import StampTuple
from capture_hooks.events import Alloc, Free
from capture_hooks.recorder import Recorder

I64 = npt.NDArray[np.int64]


class Owners:
    """Records of pages that change hands. Every method may be called from any thread."""

    def __init__(
        self, recorder: Recorder, requests: Requests, buffers: Buffers, fired: Callable[[], None]
    ) -> None:
        self._recorder, self._requests, self._buffers, self._fired = recorder, requests, buffers, fired

    def told(self, held: Held, tokens: int) -> None:
        """The prompt of ``held`` has ``tokens`` tokens."""
        judged = self._buffers.judged
        held.tokens = tokens
        held.rows = tokens // judged[0].tokens_per_row if judged else -1

    def give(
        self,
        held: Held,
        logical: int,
        pages: Sequence[int] | I64,
        *,
        shared: bool = False,
        stamp: StampTuple | None = None,
    ) -> None:
        """``pages[i]`` is logical page ``logical + i`` of ``held`` from now on; told where that is news.

        ``shared``: they are pages of a prefix that others use as well. ``stamp``: when they were given, where
        that becomes known later; by then the request may be over, and they are told without becoming its own
        again.
        """
        if not len(pages):
            return
        if held.over or self._requests.give(held, logical, [int(page) for page in pages]):
            self._fired()
            alloc = Alloc(held.room, held.attempt, logical, np.asarray(pages, np.int64), shared)
            self._recorder.emit_at(alloc, stamp if stamp is not None else self._recorder.stamp())

    def free(self, held: Held, reason: str) -> None:
        """The pages of ``held`` are given back. Nobody looks at them from now on."""
        with held.lock:
            held.over = True
            pages = np.array(list(held.pages.values()), np.int64)
        if len(pages):
            self._recorder.emit(Free(held.room, held.attempt, pages, reason))

    def over(self, held: Held) -> None:
        """``held`` is over."""
        with held.lock:
            self._requests.close(held)
