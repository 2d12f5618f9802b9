"""The journal: the append log of one process, and its reader.

A journal is a sequence of frames (``frames.py``) of records (``codec.py``)::

    frame 0            the schema as JSON
    frame 1            Process, Clock("start")
    frame 2 ..         records; each ends with what was lost meanwhile (Loss) and Clock("alive")
    last frame         ...; Clock("end"), only if the process ended normally

It is only appended to, and a frame is handed to the kernel in one piece, so a process that is killed at any moment
leaves whole frames and at most one unfinished one behind them.
"""

from capture_hooks.journal.error import JournalError
from capture_hooks.journal.reader import JournalReader
from capture_hooks.journal.writer import JournalWriter

__all__ = ["JournalError", "JournalReader", "JournalWriter"]
