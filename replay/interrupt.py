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
    others = sys.unraisablehook
    inside = False

    def again(number: int, frame: FrameType | None) -> None:
        # While the hook itself runs it would be lost once more: the timer comes back.
        if not inside:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    def lost(args: UnraisableHookArgs) -> None:
        nonlocal inside
        if issubclass(args.exc_type, KeyboardInterrupt):
            inside = True
            signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
            inside = False
        else:
            others(args)

    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(signal.SIGALRM, again)
        sys.unraisablehook = lost


def done() -> None:
    """The command has ended: a Ctrl-C, or one that is told again, changes nothing any more.

    While Python ends it would kill the process, whose exit code is known by then.
    """
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


_begin()
