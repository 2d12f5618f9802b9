"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TraceError(Exception):
    """A trace or journal cannot be read or written.

    Attributes:
        what: what is wrong.
        where: the file, and the place in it.
        todo: what to do next.
    """

    def __init__(self, what: str, where: str = "", todo: str = "") -> None:
        self.what = what
        self.where = where
        self.todo = todo
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.todo}" if self.todo else head


DAMAGED = "The file is damaged: `replay verify` lists every place, sealing its journal again makes a new one"

#: What h5py, numpy and the codecs raise on damaged or hostile input, apart from MemoryError.
_RAISED = (
    OSError,
    LookupError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
)


@contextmanager
def reading(where: str, todo: str = DAMAGED) -> Iterator[None]:
    """Turn whatever a library raises on bad input into a :class:`TraceError` that says where it was."""
    try:
        yield
    except TraceError:
        raise
    except MemoryError as error:
        raise TraceError("it asks for more memory than there is", where, todo) from error
    except _RAISED as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise TraceError(text.rstrip("."), where, todo) from error
