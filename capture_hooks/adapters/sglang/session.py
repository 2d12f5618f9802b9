"""A capture that runs in one SGLang process: what every module of hooks is given."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterable
from typing import Any

import capture_hooks
from capture_hooks.adapters.sglang.looks import Looks
from capture_hooks.adapters.sglang.owners import Owners
from capture_hooks.adapters.sglang.patch import Patches
from capture_hooks.adapters.sglang.pools import Buffers
from capture_hooks.adapters.sglang.requests import Requests
from capture_hooks.adapters.sglang.tell import say
from capture_hooks.adapters.sglang.versions import Layout, Target
from capture_hooks.events import Process
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import device_tap

#: Names of transports in traces.
_TRANSPORTS = {"nixl": "nixl/UCX"}


class Session:
    """Shared by all hooks of a process.

    * ``recorder``: records; ``role``: "prefill", "decode" or "server"; ``rank``; ``version``: the layout of SGLang's
      code (a member of ``versions.VERSIONS``);
    * ``patches``: how functions are hooked (``patches.wrap``);
    * ``requests``: who is who: ``requests.of_room(room)`` gives the ``Held`` (room, attempt, rid hash, tokens, rows,
      pages);
    * ``looks``: snapshots of a request's pages in every judged buffer (``looks.look``);
    * ``buffers``: ``pools.Buffers``, every buffer of the pools: ``buffers.judged`` are those whose pages are looked
      at, ``buffers.of_address(data_ptr)`` finds one;
    * ``scheduler``: ``scheduler.SchedulerHooks``; its ``of(req)`` gives the ``Held`` of a scheduler's request;
    * ``table_rows``: ``table_rows.TableRows``; its ``of(req)`` gives a request's row in ``req_to_token`` and its
      generation;
    * ``owners``: tells pages given and taken, and lengths (``owners.Owners``);
    * ``wire``: the adapter of the transfer library, ``None`` where there is none; lists ``before_post`` and
      ``after_state`` on it are called with each transfer;
    * ``runner``: the model runner, ``None`` where managers are used without one;
    * ``steps``: ``steps.Steps``, the forward passes; ``steps.passed()`` asks which of them are over;
    * ``stores``, ``reads``: ``store.StoreHooks`` and ``read.ReadHooks``;
    * ``worker``: ``worker.WorkerHooks`` of the prefill side; ``worker.queue`` hands a chunk over.
    """

    def __init__(
        self,
        recorder: Recorder,
        role: str,
        rank: int,
        layout: Layout,
        targets: Iterable[Target],
        transport: str = "",
    ) -> None:
        self.recorder = recorder
        self.role = role
        self.rank = rank
        self.transport = transport
        self.version = layout.version
        self.patches = Patches(recorder, targets, layout.version, role)
        self.requests = Requests()
        self.buffers = Buffers(recorder)
        self.looks = Looks(recorder, self.buffers)
        self.owners = Owners(recorder, self.requests, self.buffers, self.patches.own("pages", "alloc"))
        self.runner: Any = None
        self.steps: Any = None
        self.stores: Any = None
        self.reads: Any = None
        self.worker: Any = None
        self.wire: Any = None
        self.scheduler: Any = None
        self.table_rows: Any = None
        self._told = threading.Event()

    @classmethod
    def start(
        cls, role: str, rank: int, layout: Layout, targets: Iterable[Target], transport: str = ""
    ) -> Session | None:
        """Start the recorder; ``None`` where capture is off or the journal cannot be made (told on the log)."""
        process = Process(
            role=role,
            rank=rank,
            engine=f"sglang {layout.installed or layout.version}",
            transport=_TRANSPORTS.get(transport, transport),
        )
        recorder = capture_hooks.start(process)
        if recorder is None:
            return None
        session = cls(recorder, role, rank, layout, targets, transport)
        atexit.register(session.tell)
        atexit.register(session.settle)  # before the recorder closes
        _on_termination(session)
        return session

    def pool(self, pool: Any) -> None:
        """Make a pool known, whenever it was made."""
        with self.recorder.guard("sglang.pool"):
            self.buffers.add(pool)

    def tail(self, what: str, key: str) -> None:
        """The tail of an order edge (``events.Order``)."""
        self.recorder.tail(what, key)

    def head(self, what: str, key: str) -> None:
        """The head of an order edge."""
        self.recorder.head(what, key)

    def tell(self) -> None:
        """One line about the hooks on standard error: when the first request is over, and at the end.

        Another plug-in may have replaced a hooked function meanwhile: that is told in the trace.
        """
        with self.recorder.guard("sglang.tell"):
            self.patches.look_again()
        say(f"{self.role} rank {self.rank}: {self.patches.summary()}")

    def request_over(self) -> None:
        """A request is over: the first time, tell which hooks have fired by then."""
        if not self._told.is_set():
            self._told.set()
            self.tell()

    def settle(self, seconds: float = 5.0) -> None:
        """Hand over what is still on its way from the device, waiting at most ``seconds``."""
        tap = device_tap(self.recorder)
        if tap is not None:
            tap.close(seconds)


def _on_termination(session: Session) -> None:
    """Close the journal when the process is asked to end and nobody else has claimed that signal.

    A scheduler process leaves SIGTERM to the system, which ends it without its exit handlers. The signal takes its
    course when the journal is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def ended(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        session.tell()
        session.settle(2.0)
        capture_hooks.stop()
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, ended)
