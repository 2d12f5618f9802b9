"""Opening traces: files, journals and folders become one :class:`Trace`."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.trace.contents import Contents
from replay.trace.errors import TraceError
from replay.trace.file import ProcessInfo, TraceFile, process_place
from replay.trace.ragged import Ragged
from replay.trace.schema import TABLES
from replay.trace.sources import Found, find_sources
from replay.trace.table import Source, Table

__all__ = ["ProcessInfo", "Ragged", "Table", "Trace", "open_trace"]

I32 = npt.NDArray[np.int32]


class Trace:
    """Everything that was recorded, over all files of one capture.

    Use as a context manager, or call :meth:`close`. Tables and contents are read when they are asked for.

    Attributes:
        paths: the files that are read.
        processes: the recorded processes; "process" columns are indices into it.
        strings: the string table, object array of ``str``; ``Table.codes`` are indices into it.
        problems: what of the given paths could not be used, in words; empty if all could.
    """

    def __init__(self, found: Found) -> None:
        """Open the files of ``found``, which stays in use until the trace is closed."""
        self._found = found
        self.problems: tuple[str, ...] = tuple(found.problems)
        self._files: list[TraceFile] = []
        try:
            runs: dict[str, Path] = {}
            for path in found.files:
                self._add(path, runs)
            self._join()
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path, runs: dict[str, Path]) -> None:
        """Open ``path`` unless its processes are there already (a merged file beside what it was made of)."""
        file = TraceFile(path)
        named = [process.run for process in file.processes if process.run]
        known = [run for run in named if run in runs]
        if known and len(known) == len(file.processes):
            file.close()
            return
        self._files.append(file)
        if known:
            raise TraceError(
                f"it holds run {known[0]}, which {runs[known[0]]} holds too, and others",
                file.place,
                "Give one of the two files",
            )
        runs.update(dict.fromkeys(named, path))

    def _join(self) -> None:
        # One order whatever order the paths came in.
        self._files.sort(key=lambda file: [process_place(p.role, p.rank, p.run) for p in file.processes])
        self.paths: tuple[Path, ...] = tuple(file.path for file in self._files)
        self.processes: list[ProcessInfo] = [process for file in self._files for process in file.processes]
        codes: dict[str, int] = {}
        self._sources: list[Source] = []
        offset = 0
        for index, file in enumerate(self._files):
            translated = [codes.setdefault(text, len(codes)) for text in file.strings]
            self._sources.append(Source(file, offset, np.array(translated, np.int32), index))
            offset += len(file.processes)
        self.strings: npt.NDArray[Any] = np.empty(len(codes), object)
        self.strings[:] = list(codes)
        self._codes = codes
        self._tables: dict[str, Table] = {}

    def code(self, text: str) -> int:
        """Code of ``text`` in ``strings``; -1 where it does not occur."""
        return self._codes.get(text, -1)

    def table(self, name: str) -> Table:
        """The table ``name``, one of ``events.BY_TABLE``; it has no rows where nothing was recorded."""
        if name not in self._tables:
            self._tables[name] = self.fresh_table(name)
        return self._tables[name]

    def fresh_table(self, name: str) -> Table:
        """The table ``name`` with nothing read yet; its columns go when it goes."""
        if name not in TABLES:
            raise KeyError(f"there is no table {name!r}; tables: {', '.join(TABLES)}")
        return Table(name, self._sources, self.strings, lambda: self.contents.maps)

    @cached_property
    def contents(self) -> Contents:
        """The distinct page contents."""
        return Contents([file.contents for file in self._files])

    def content_formats(self) -> I32:
        """Code of the page format of each content, ``int32[C]``."""
        return self.contents.formats([source.codes for source in self._sources])

    def close(self) -> None:
        """Close the files and remove what was sealed only for this trace."""
        try:
            for file in self._files:
                file.close()
        finally:
            self._found.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_trace(*paths: str | os.PathLike[str], merge: bool = True) -> Trace:
    """Open traces, journals and folders of them as one trace.

    A journal is sealed first, beside itself or, where its folder cannot be written, in a temporary folder that goes
    when the trace is closed. In a folder a sealed file is used as long as its journal has not grown since.

    Args:
        paths: ``.h5`` or ``.journal`` files, or folders.
        merge: allow more than one file; without it a second file is an error.

    Raises:
        TraceError: nothing can be read, or a file is damaged; it says what, where and what to do.
    """
    if not paths:
        raise TraceError("no trace was given")
    found = find_sources([Path(path) for path in paths])
    if not merge and len(found.files) > 1:
        found.close()
        raise TraceError(f"there are {len(found.files)} traces, and they are not to be merged", str(paths[0]))
    return Trace(found)
