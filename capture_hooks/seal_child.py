"""Sealing at the end of a process, in a child. Known by its module's name only: this package imports no reader."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from capture_hooks.options import PREFIX

_MODULE = "replay.trace.seal"
_log = logging.getLogger("kv_replay")


def start_seal(journal: Path) -> subprocess.Popen[bytes] | None:
    """Start ``python -m replay.trace.seal JOURNAL``, detached. ``None`` if it is not installed or cannot start."""
    try:
        if not _is_installed():
            return None
        # Without the capture's own variables: the child must not record itself.
        environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(journal.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
    except Exception as error:
        _log.warning(
            "kv-replay: the journal was not sealed (%s); `replay seal` does it", type(error).__name__
        )
        return None


def _is_installed() -> bool:
    """Whether the module is there, found without importing its packages."""
    top, *inner = _MODULE.split(".")
    spec = importlib.util.find_spec(top)
    folders = spec.submodule_search_locations if spec else None
    return any(Path(folder, *inner).with_suffix(".py").exists() for folder in folders or ())
