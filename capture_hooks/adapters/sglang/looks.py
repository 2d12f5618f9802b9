"""Snapshots of a request's pages in every buffer that is judged, now or a little later."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.pools import Buffers
from capture_hooks.adapters.sglang.requests import Held
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import look

I64 = npt.NDArray[np.int64]


class Looks:
    """The snapshots of one process. Nobody waits for a device: such a look is over some time after the
    call.
    """

    def __init__(self, recorder: Recorder, buffers: Buffers) -> None:
        self._recorder, self._buffers = recorder, buffers
        self._due: list[tuple[float, int, Callable[[], bool]]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def look(
        self,
        stage: str,
        moment: str,
        held: Held,
        pages: Sequence[int] | I64,
        logical: int | Sequence[int] | I64,
        *,
        rows: int = -1,
        transfer: int = -1,
        tap: str = "",
    ) -> None:
        """Snapshot ``pages`` (logical pages ``logical``, or from ``logical`` on) of every judged
        buffer.
        """
        if not len(pages):
            return
        first = logical if isinstance(logical, int) else -1
        places = np.arange(first, first + len(pages)) if first >= 0 else np.asarray(logical, np.int64)
        numbers = [b.number for b in self._buffers.judged]
        # A source at its post and a destination before and after its arrival are looked at as they are. At
        # arrival the look takes its place before whatever this thread puts on its stream from then on.
        look(
            self._recorder, stage, moment, numbers, pages, places, room=held.room, attempt=held.attempt,
            transfer=transfer, rows=rows, aside=(stage, moment) != ("RC", ""), tap=tap,
        )  # fmt: skip

    def later(self, seconds: float, body: Callable[[], bool]) -> None:
        """Run ``body`` on a thread of its own after ``seconds``, and again as long as it returns True.

        It runs inside a guard. What is due when the process ends is not run.
        """
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-replay-later", daemon=True)
                self._thread.start()
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), body))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0][0] > time.monotonic():
                    pause = self._due[0][0] - time.monotonic() if self._due else None
                    self._wake.wait(pause)
                if self._recorder.closed:
                    return
                _, _, body = heapq.heappop(self._due)
            again: Any = False
            with self._recorder.guard("sglang.later"):
                again = body()
            if again:
                self.later(0.001, body)
