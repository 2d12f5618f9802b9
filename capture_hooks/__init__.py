"""What runs inside the server. ``start`` is called by the adapters; without ``KV_REPLAY_CAPTURE`` it does nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture_hooks.events import Process
    from capture_hooks.recorder import Recorder

_log = logging.getLogger("kv_replay")
_lock = threading.Lock()
_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder of this process; ``None`` if nothing is recorded."""
    return _active if _active is not None and not _active.closed else None


def start(process: Process, environ: Mapping[str, str] | None = None) -> Recorder | None:
    """Start recording as ``environ`` (default: the process's own) says. Never raises.

    Returns the recorder (the one that runs already, if any), or ``None`` if ``KV_REPLAY_CAPTURE`` is not set or
    the journal cannot be created; a warning says why.
    """
    global _active
    environ = os.environ if environ is None else environ
    if not environ.get("KV_REPLAY_CAPTURE", "").strip():
        return None
    with _lock:
        if active() is None:
            try:
                from capture_hooks.options import Options
                from capture_hooks.recorder import Recorder

                options, warnings = Options.from_environ(environ)
                for warning in warnings:
                    _log.warning("kv-replay: %s", warning)
                _active = Recorder(options, process)
            except Exception as error:
                _log.warning("kv-replay: nothing is recorded: %s", error)
                return None
        return _active


def stop() -> None:
    """End recording and close the journal."""
    global _active
    with _lock:
        recorder, _active = _active, None
    if recorder is not None:
        recorder.close("stop")
