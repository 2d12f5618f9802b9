"""The lab's adapter: which functions of the lab are hooked, and what their calls mean.

It is to the lab what an engine's plug-in is to the engine. The engine's modules know nothing of it:
:func:`attach` replaces methods of their classes by wrappers and :meth:`Attached.detach` puts the very same
functions back. Without ``KV_REPLAY_CAPTURE`` this module is not even imported.

Every body runs inside ``Recorder.guard``: what goes wrong in a hook is counted and never reaches the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import capture_hooks
from capture_hooks.adapters import nixl
from capture_hooks.events import Order, Process
from capture_hooks.recorder import Recorder
from replay.lab.capture_decode import DecodeHooks
from replay.lab.capture_prefill import PrefillHooks
from replay.lab.capture_wire import TcpHooks

TRANSPORTS = {"nixl": "nixl/UCX", "tcp": "tcp"}


class Hooks:
    """The wrapped methods of one process."""

    def __init__(self, recorder: Recorder, role: str) -> None:
        self.recorder = recorder
        self.role = role
        self._wrapped: list[tuple[type[Any], str, Callable[..., Any]]] = []

    def wrap(
        self,
        owner: type[Any],
        method: str,
        covers: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
        around: Callable[..., Any] | None = None,
        label: str = "",
    ) -> None:
        """Hook ``owner.method``.

        ``before`` gets the call's arguments, ``after`` the result and the arguments, and ``around`` the
        original and the arguments; ``around`` has to call the original exactly once and to guard its own work.
        ``label`` tells two hooks on one method apart.
        """
        original = owner.__dict__[method]
        name = f"lab.{owner.__name__}.{method}{label and ' ' + label}"
        recorder = self.recorder

        @functools.wraps(original)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            if recorder.closed or recorder.detached(name):
                return original(*args, **keywords)
            recorder.fired(name)
            if around is not None:
                return around(original, *args, **keywords)
            if before is not None:
                with recorder.guard(name):
                    before(*args, **keywords)
            found = original(*args, **keywords)
            if after is not None:
                with recorder.guard(name):
                    after(found, *args, **keywords)
            return found

        setattr(owner, method, wrapper)
        self._wrapped.append((owner, method, original))
        recorder.hook(name, covers)

    def tail(self, what: str, key: str) -> None:
        """The tail of an order edge."""
        self.recorder.emit(Order(what, key, "tail"))

    def head(self, what: str, key: str) -> None:
        """The head of an order edge."""
        self.recorder.emit(Order(what, key, "head"))

    def restore(self) -> None:
        """Put every original back."""
        while self._wrapped:
            owner, method, original = self._wrapped.pop()
            setattr(owner, method, original)


class Attached:
    """A capture that runs."""

    def __init__(self, recorder: Recorder, role: str, transport: str) -> None:
        self.recorder = recorder
        self.hooks = Hooks(recorder, role)
        self.wire: nixl.NixlAdapter | TcpHooks | None
        if transport == "nixl":
            self.wire = nixl.install(recorder)
        else:
            self.wire = TcpHooks(recorder, self.hooks)
        if role == "prefill":
            PrefillHooks(recorder, self.hooks, self.wire)
        else:
            self.decode = DecodeHooks(recorder, self.hooks)

    def detach(self, keep: bool = False) -> None:
        """Put the originals back and close the journal; ``keep`` has the bytes in the ring written out before."""
        if keep:
            self.recorder.trigger("end of the run")
        if hasattr(self, "decode"):
            self.decode.finish()
        self.hooks.restore()
        if isinstance(self.wire, nixl.NixlAdapter):
            self.wire.uninstall()
        capture_hooks.stop()


def attach(role: str, transport: str, environ: Mapping[str, str]) -> Attached | None:
    """Start the recorder and hook the lab; ``None`` where capture is off or cannot start."""
    process = Process(role=role, engine="lab", transport=TRANSPORTS[transport])
    recorder = capture_hooks.start(process, environ)
    return Attached(recorder, role, transport) if recorder is not None else None
