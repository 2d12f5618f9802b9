"""What is said when a file that somebody asked for cannot be written."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ELSEWHERE = "Choose another place"
#: errno -> what is wrong, and what to do.
_CAUSES: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", "Make room on it, or choose another place"),
    errno.EDQUOT: ("the disk quota is used up", "Make room, or choose another place"),
    errno.EFBIG: ("the limit on the size of a file is reached (ulimit -f)", "Raise it"),
    errno.ENOENT: ("its folder does not exist", "Make the folder, or choose another"),
    errno.ENOTDIR: ("its folder does not exist", "Make the folder, or choose another"),
    errno.EACCES: ("you have no right to write there", _ELSEWHERE),
    errno.EPERM: ("you have no right to write there", _ELSEWHERE),
    errno.EROFS: ("the file system is read-only", _ELSEWHERE),
    errno.EISDIR: ("it is a folder", "Give the name of a file"),
    errno.ENAMETOOLONG: ("its name is too long", "Choose a shorter one"),
}
#: How HDF5 tells a number of the system in the middle of a text.
_ERRNO = re.compile(r"errno = (\d+)")


class WriteError(Exception):
    """A file or folder that somebody asked for cannot be written.

    Attributes:
        where: the file or folder.
        what: what is wrong.
        todo: what to do next.
    """

    def __init__(self, where: Path, what: str, todo: str) -> None:
        self.where, self.what, self.todo = where, what, todo
        super().__init__(f"cannot write '{where}': {what}. {todo}")


def write_error(path: Path, error: Exception) -> WriteError:
    """``error`` of the system or of HDF5 in words."""
    told = _ERRNO.search(str(error))
    number = int(told.group(1)) if told else getattr(error, "errno", None) or 0
    what, todo = _CAUSES.get(number, (os.strerror(number) if number else "it failed", _ELSEWHERE))
    return WriteError(path, what[:1].lower() + what[1:], todo)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system or HDF5 raises while ``path`` is written into a :class:`WriteError`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error
    except (RuntimeError, ValueError) as error:
        if _ERRNO.search(str(error)) is None:
            raise
        raise write_error(path, error) from error


def check_folder(folder: Path, path: Path | None = None) -> None:
    """Raise :class:`WriteError` about ``path`` unless a file can be made in ``folder``; nothing is left there."""
    with writing(path or folder):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except FileNotFoundError:
            if not folder.is_dir():
                raise
            # Such as /proc: it is there, and takes no files.
            raise WriteError(path or folder, f"no file can be made in '{folder}'", _ELSEWHERE) from None
