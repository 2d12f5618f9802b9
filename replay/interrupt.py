"""Ctrl-C: at once while the program is still being loaded, and never lost after that.

To be imported before anything that takes time. From then on until :func:`loaded` Ctrl-C ends the process at once with
code 130, instead of with a traceback out of somebody's import: there is nothing to tell and nothing to undo.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Seconds until a Ctrl-C that was lost is told once more.
_AGAIN = 0.02


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


def keep() -> None:
    """Have a Ctrl-C that nobody could handle told again.

    ``KeyboardInterrupt`` comes up wherever the program happens to be. Where that is a finalizer or the callback of a
    weak reference, and HDF5's objects have many, Python prints it and goes on with the work.
    """
    import threading

    others = sys.unraisablehook
    main = threading.main_thread().ident

    def lost(args: UnraisableHookArgs) -> None:
        if not issubclass(args.exc_type, KeyboardInterrupt) or main is None:
            others(args)
            return
        again = threading.Timer(_AGAIN, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = lost


_begin()
