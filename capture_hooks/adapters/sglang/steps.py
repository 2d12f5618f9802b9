"""Forward passes: who is in a batch, which pages the pass writes, and what is taken of it from the device.

A step is one call of ``ModelRunner.forward``. The host knows who is in it and how long each request is; where
their rows lie is known on the device alone (``req_to_token``). So every step submits one job to the device
tap, on the stream of the pass: the pages of its requests, those that it wrote (ST), and what the hooks on the
store and the read have put by. The rest is worked out when the job arrives on the host, long after the pass;
records carry the stamps of the launch.

A pass that replays a CUDA graph runs no Python of the model: the hooks on its read see nothing of it, and that on
its store only what it had the graph copy (``taps/graphs.py``). Its pages are looked at all the same, as they are
when the pass is over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from capture_hooks.adapters.sglang.requests import Held
from capture_hooks.adapters.sglang.step import I64, Row, Seen, Step
from capture_hooks.adapters.sglang.step_pages import StepPages
from capture_hooks.adapters.sglang.versions import Target, at
from capture_hooks.events import Alloc, Order, Snapshot, Store
from capture_hooks.taps.pages import device_tap

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.taps.device import DeviceTap


HOOKS: tuple[Target, ...] = (
    Target("run_batch", "step", at("managers.scheduler", "Scheduler.run_batch"), takes=("batch",)),
    Target(
        "forward",
        "step",
        at("model_executor.model_runner", "ModelRunner.forward"),
        takes=("forward_batch",),
    ),
)

_MAX_KNOWN = 8192  #: requests whose reads are counted


def install(session: Session) -> None:
    """Hook the scheduler's batches and the runner's passes."""
    steps = session.steps = Steps(session)
    session.patches.wrap("run_batch", around=steps.run_batch)
    session.patches.wrap("forward", around=steps.forward)


class Steps:
    """The passes of one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.recorder = session.recorder
        self.now: Step | None = None  #: the pass that runs; the scheduler's thread alone sets it
        self.graphs = 0  #: passes that replayed a graph
        #: Told the reason, when a pass is not followed for the first time.
        self.on_unseen: list[Callable[[str], None]] = []
        #: Told each pass that is followed, when it begins; and when it is over, where it replayed a graph.
        self.on_begin: list[Callable[[Step], None]] = []
        self.on_graph: list[Callable[[Step], None]] = []
        #: Told the model runner, at the first pass.
        self.on_runner: list[Callable[[Any], None]] = []
        self._number = 0
        self._batch: list[Any] = []
        self._known: OrderedDict[tuple[int, int], Seen] = OrderedDict()
        self._ends: deque[tuple[int, Any]] = deque()
        self._passed = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._tap: DeviceTap | None = None
        self._pages = StepPages(session, self.seen)

    # -- the hooks -------------------------------------------------------------------------------------------

    def run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **keywords: Any
    ) -> Any:
        """Around ``Scheduler.run_batch``: remember whose rows the pass below will have."""
        with self.recorder.guard("sglang.run_batch"):
            self._batch = list(getattr(batch, "reqs", None) or ())
        try:
            return original(scheduler, batch, *args, **keywords)
        finally:
            self._batch = []

    def forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **keywords: Any
    ) -> Any:
        """Around ``ModelRunner.forward``."""
        step: Step | None = None
        if self.now is None and not getattr(runner, "is_draft_worker", False):
            with self.recorder.guard("sglang.forward"):
                step = self._begin(runner, forward_batch)
        self.now = step if step is not None else self.now
        try:
            output = original(runner, forward_batch, *args, **keywords)
        finally:
            if step is not None:
                self.now = None
        if step is not None:
            with self.recorder.guard("sglang.forward"):
                self._end(step, runner, forward_batch, bool(getattr(output, "can_run_graph", False)))
        return output

    def unseen(self, why: str) -> None:
        """Passes of a kind that the hooks on the store and the read cannot follow: they are not complete any
        more.
        """
        told, self.on_unseen = self.on_unseen, []
        for tell in told:
            tell(why)

    # -- begin and end ---------------------------------------------------------------------------------------

    def _begin(self, runner: Any, batch: Any) -> Step | None:
        told, self.on_runner = self.on_runner, []
        for tell in told:
            tell(runner)
        rows, queries = self._rows(batch)
        if not rows:
            return None  # warm-up, health check, idle
        tap = self._tap_of_pools()
        if tap is None or tap.capturing():
            return None
        from capture_hooks.taps.device import Job

        mark = self.recorder.mark()
        self._number += 1
        step = Step(self._number, not _is_decode(batch), rows, tap.line(), (mark.seq, mark.ns), Job())
        step.queries = queries
        key = f"{self.session.role}{self.session.rank}.step.{step.number}"
        self.recorder.tail("queue", key)
        self.recorder.emit(Order("queue", key, "head"), stream=step.line)
        for tell_begin in self.on_begin:
            tell_begin(step)
        return step

    def _tap_of_pools(self) -> DeviceTap | None:
        if self._tap is None:
            judged = self.session.buffers.judged
            if judged:
                self._tap = device_tap(self.recorder, judged[0].tensor.device)
        return self._tap

    def _rows(self, batch: Any) -> tuple[list[Row], int]:
        """Known requests of a batch, and query rows of all of it; empty where the host does not know the lengths."""
        reqs, rids = self._batch, getattr(batch, "rids", None)
        mode = batch.forward_mode
        if not reqs or mode.is_idle() or (rids is not None and [r.rid for r in reqs] != list(rids)):
            return [], 0
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            self.unseen("speculative decoding: rows of drafts are not followed")
            return [], 0
        lengths = ints(batch.seq_lens_cpu)
        decode = _is_decode(batch)
        before = [n - 1 for n in lengths] if decode else ints(batch.extend_prefix_lens_cpu)
        added = [1] * len(lengths) if decode else ints(batch.extend_seq_lens_cpu)
        if not (len(reqs) == len(lengths) == len(before) == len(added)):
            return [], 0
        rows, start = [], 0
        for index, req in enumerate(reqs):
            held = self.session.scheduler.of(req)
            if held is None and self.session.role == "decode":
                self.unseen("a request that had given its pages back runs again: it is not followed any more")
            if held is not None and not held.mark:
                if not decode:  # a request that decodes keeps its row
                    self.session.scheduler.placed(held, req)
                rows.append(Row(index, held, before[index], before[index] + added[index], start))
            start += added[index]
        return rows, start

    def _end(self, step: Step, runner: Any, batch: Any, graph: bool) -> None:
        tap = self._tap
        if tap is None:
            return
        if graph:
            self.graphs += 1
            for tell_graph in self.on_graph:
                tell_graph(step)
        self._pages.take(step, tap, runner, batch)
        for close in step.closing:
            close()
        key = f"{self.session.role}{self.session.rank}.done.{step.number}"
        self.recorder.emit(Order("sync", key, "tail"), stream=step.line)
        self._ends.append((step.number, tap.event()))
        while len(self._ends) > 64:  # nobody asked
            self._ends.popleft()

        def finish(arrays: list[npt.NDArray[Any]]) -> None:
            for part in step.parts:
                with self.recorder.guard("sglang.step"):
                    part(step, arrays)

        layers = len(self.session.buffers.judged)
        lost = [(Snapshot.TABLE, layers), (Store.TABLE, layers)]
        tap.submit(step.job, finish, [*lost, (Alloc.TABLE, step.asked)] if step.asked else lost)

    @property
    def requests(self) -> int:
        """Requests of the batch that runs, those that nobody follows among them."""
        return len(self._batch)

    @property
    def free(self) -> int:
        """About how many bytes a pass may take from the device."""
        return self._tap.free if self._tap is not None else 0

    def upload(self, values: npt.NDArray[Any]) -> Any:
        """A small array on the device, without waiting."""
        if self._tap is None:
            raise RuntimeError("no device tap")
        return self._tap.upload(values)

    # -- what the host may know of the device ----------------------------------------------------------------

    def passed(self) -> int:
        """Number of the last pass that is known to be over, asked without waiting.

        It puts the head of that pass's edge on the calling thread: what the pass did happened before what
        this thread does from now on.
        """
        with self.recorder.guard("sglang.passed"):
            with self._lock:
                while self._ends and (self._ends[0][1] is None or self._ends[0][1].query()):
                    self._passed = self._ends.popleft()[0]
            if self._passed > getattr(self._local, "passed", 0):
                self._local.passed = self._passed
                key = f"{self.session.role}{self.session.rank}.done.{self._passed}"
                self.recorder.head("sync", key)
        return self._passed

    def written(self, held: Held, logical: int) -> int:
        """Whether the pass that wrote pages up to ``logical`` of a request is over: 1, 0, or -1 where no pass
        of it did.
        """
        seen = self._known.get((held.room, held.attempt))
        for number, pages in list(seen.passes) if seen is not None else ():
            if pages > logical:
                return int(self.passed() >= number)
        return -1

    def sent(self, held: Held, logical: int, pages: I64, *, shared: bool) -> None:
        """A send names ``pages[i]`` as logical page ``logical + i`` of a request.

        Passes tell the pages of their requests, a while later. What is sent of a request before any pass of it tells
        of it is told here; where a scheduler runs (``shared``) it is a prefix that others stored.
        """
        seen = self._known.get((held.room, held.attempt))
        first = max(0, seen.pages - logical) if seen is not None else 0
        self.session.owners.give(held, logical + first, pages[first:], shared=shared)
        if self._tap is not None and first:
            self._pages.sent(self._tap, held, logical, pages[:first])

    def seen(self, held: Held) -> Seen:
        """What was recorded of a request so far. Threads of the scheduler and of the tap ask."""
        key = (held.room, held.attempt)
        with self._lock:
            found = self._known.pop(key, None) or Seen()
            self._known[key] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found


def ints(values: Any) -> list[int]:
    """Whole numbers of a list or of a tensor that is on the host; empty for anything else (a device is not
    asked).
    """
    if values is None:
        return []
    device = getattr(values, "device", None)
    if device is not None and device.type != "cpu":
        return []
    return [int(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


def _is_decode(batch: Any) -> bool:
    return bool(batch.forward_mode.is_decode())
