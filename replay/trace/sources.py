"""Which files a trace is read from: journals are sealed, sealed files are used while they are fresh."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from replay.trace.errors import TraceError
from replay.trace.file import TRACE_SUFFIX, TraceFile
from replay.writing import WriteError

JOURNAL_SUFFIX = ".journal"


@dataclass(slots=True)
class Found:
    """Trace files to read.

    Attributes:
        files: trace files in the order in which they were found, each once.
        problems: what could not be used, in words.
        folder: temporary folder with files sealed only for this use.
    """

    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Remove the temporary folder."""
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def sealed_path(self, journal: Path) -> Path:
        """Where ``journal`` is to be sealed: beside it, or in the temporary folder.

        A file that has that name and was not sealed from one journal is not written over.
        """
        beside = journal.with_suffix(TRACE_SUFFIX)
        if os.access(journal.parent, os.W_OK) and (not beside.exists() or _sealed_bytes(beside) >= 0):
            return beside
        return self.temporary_path(journal)

    def temporary_path(self, journal: Path) -> Path:
        """Where ``journal`` is to be sealed for this use only."""
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="kv-replay-")
        return Path(self.folder.name) / f"{len(self.files)}-{journal.stem}{TRACE_SUFFIX}"


def find_sources(paths: list[Path]) -> Found:
    """Turn files, journals and folders into trace files, sealing what has to be sealed."""
    found = Found()
    try:
        for path in paths:
            if path.is_dir():
                _use_folder(found, path)
            elif path.suffix == JOURNAL_SUFFIX:
                _use(found, _sealed(found, path))
            else:
                _use(found, path)
        if not found.files:
            reasons = "; ".join(found.problems)
            raise TraceError(
                reasons or "there is no trace and no journal", ", ".join(map(str, paths)), _hint(paths)
            )
    except BaseException:
        found.close()
        raise
    return found


def _hint(paths: list[Path]) -> str:
    """What to give instead: folders within those that were given, if a capture lies there."""
    inside = sorted(
        {item.parent for path in paths if path.is_dir() for item in path.glob(f"*/*{JOURNAL_SUFFIX}")}
    )
    if not inside:
        return "Check the path"
    return f"There are captures in {', '.join(map(str, inside))}: give one of them"


def _use(found: Found, path: Path) -> None:
    if not any(path.resolve() == other.resolve() for other in found.files):
        found.files.append(path)


def _use_folder(found: Found, folder: Path) -> None:
    """All journals of ``folder``, sealed, and then the traces that no journal belongs to.

    A journal without a single whole record (its process was killed at once) is a problem, not an error: the rest of
    the folder can be read. A damaged trace file is an error.
    """
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        raise TraceError(
            f"the folder cannot be read ({error.strerror})", str(folder), "Check its rights"
        ) from error
    journals = [name for name in names if name.suffix == JOURNAL_SUFFIX]
    for journal in journals:
        try:
            _use(found, _sealed(found, journal))
        except TraceError as error:
            found.problems.append(str(error))
    taken = {journal.with_suffix(TRACE_SUFFIX) for journal in journals}
    for name in names:
        if name.suffix == TRACE_SUFFIX and name not in taken and not name.name.startswith("."):
            _use(found, name)


def _sealed(found: Found, journal: Path) -> Path:
    """The fresh trace file of ``journal``."""
    beside = journal.with_suffix(TRACE_SUFFIX)
    if is_fresh(beside, journal):
        return beside
    from replay.trace.seal import seal  # only traces that have journals need it

    path = found.sealed_path(journal)
    try:
        seal([journal], path, replace=True)
    except WriteError:
        # A full disk, or a folder that only seemed to be writable: this use of the trace needs no file beside it.
        if path != beside:
            raise
        path = found.temporary_path(journal)
        seal([journal], path, replace=True)
    return path


def is_fresh(sealed: Path, journal: Path) -> bool:
    """Whether ``sealed`` was made from all of ``journal`` as it is now.

    The file says how many bytes of the journal were there; a journal only ever grows. Times would lie after a copy.
    """
    try:
        return sealed.exists() and _sealed_bytes(sealed) == journal.stat().st_size
    except OSError:
        return False


def _sealed_bytes(path: Path) -> int:
    """Bytes of the one journal that ``path`` was sealed from, -1 where it is anything else."""
    try:
        file = TraceFile(path)
    except TraceError:
        return -1
    try:
        return file.processes[0].journal_bytes if len(file.processes) == 1 else -1
    finally:
        file.close()
