"""The lab's adapter: which functions of the lab are hooked, and what their calls mean.

It is to the lab what an engine's plug-in is to the engine. The engine's modules know nothing of it: :func:`attach`
replaces methods of their classes by wrappers (``taps/methods.py``) and :meth:`Attached.detach` puts the very same
functions back. Without ``KV_REPLAY_CAPTURE`` this module is not even imported.

Every body runs inside ``Recorder.guard``: what goes wrong in a hook is counted and never reaches the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import capture_hooks
from capture_hooks.adapters import nixl
from capture_hooks.events import Process
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks
from replay.lab.capture_decode import DecodeHooks
from replay.lab.capture_prefill import PrefillHooks
from replay.lab.capture_wire import TcpHooks

TRANSPORTS = {"nixl": "nixl/UCX", "tcp": "tcp"}


class Attached:
    """A capture that runs."""

    def __init__(self, recorder: Recorder, role: str, transport: str) -> None:
        self.recorder = recorder
        self.hooks = Hooks(recorder, "lab")
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
