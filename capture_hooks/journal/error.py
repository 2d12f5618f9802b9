"""What goes wrong with a journal as a whole."""

from __future__ import annotations

import errno


class JournalError(Exception):
    """A journal that cannot be opened, created or read at all: what is wrong, where, and what to do."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what, self.where, self.remedy = what, where, remedy


def error_name(error: OSError) -> str:
    """The symbolic name of an error ("ENOSPC"): its text would hold paths."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
