"""Ctrl-C while the program is still being loaded: there is nothing to tell and nothing to undo.

To be imported before anything that takes time. From then on until :func:`loaded` Ctrl-C ends the process at once with
code 130, instead of with a traceback out of somebody's import.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def _begin() -> None:
    # Only where nobody else has taken the signal.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, _leave)
        except ValueError:  # another thread than the main one
            return


def loaded() -> None:
    """Ctrl-C raises ``KeyboardInterrupt`` again, which the program handles."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()
