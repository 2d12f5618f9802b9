"""Sealing: journals become a trace file.

``python -m replay.trace.seal JOURNAL...`` seals each journal beside itself; a recorded process that ends normally runs
this in a child. It needs neither torch nor click.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from capture_hooks.events import Process
from capture_hooks.journal import JournalError, JournalReader
from replay.trace.errors import TraceError
from replay.trace.file import TRACE_SUFFIX, process_place
from replay.trace.writer import TraceWriter
from replay.words import counted
from replay.writing import WriteError

#: Called with what is being done, how much of it is done, and how much there is (0: not known).
Progress = Callable[[str, int, int], None]

_PROGRESS_EVERY = 1024


@dataclass(frozen=True, slots=True)
class SealedProcess:
    """What one journal gave.

    Attributes:
        journal: the journal.
        process: who wrote it.
        events: number of records.
        ended: the process recorded its end; without it, it was killed or is alive.
        cut: what could not be read, "" where nothing is missing.
    """

    journal: Path
    process: Process
    events: int
    ended: bool
    cut: str


def seal(
    journals: Sequence[Path], path: Path, *, replace: bool = False, progress: Progress | None = None
) -> list[SealedProcess]:
    """Seal ``journals`` into the one trace file ``path``, in bounded memory.

    A journal may be live, cut or damaged: everything that can be read is sealed, and what is missing is told. Several
    processes may seal one journal at the same time; each writes a file of its own name, and the last one stays.

    Raises:
        TraceError: a journal cannot be read at all.
        WriteError: ``path`` cannot be written.
    """
    sealed = []
    # Nobody may read the trace who may not read its journals.
    mode = 0o666
    for journal in journals:
        mode &= journal.stat().st_mode if journal.exists() else mode
    with TraceWriter(path, replace, mode) as writer:
        # Prefill before decode, whatever the order of the files.
        for journal in sorted(journals, key=_place) if len(journals) > 1 else journals:
            with _reading_journal(journal):
                sealed.append(_seal_one(journal, writer, progress))
    return sealed


@contextmanager
def _reading_journal(journal: Path) -> Iterator[None]:
    try:
        yield
    except JournalError as error:
        raise TraceError(error.what, error.where, _sentence(error.remedy)) from error
    except OSError as error:
        todo = "Check the disk and try again"
        raise TraceError(f"it cannot be read ({error.strerror})", str(journal), todo) from error


def _place(journal: Path) -> tuple[int, str, int, str]:
    with _reading_journal(journal), JournalReader(journal) as reader:
        process = reader.process or _from_name(journal)
        return process_place(process.role, process.rank, process.run)


def _seal_one(journal: Path, writer: TraceWriter, progress: Progress | None) -> SealedProcess:
    # The size before the reading begins: a live journal that grows meanwhile makes the trace stale.
    size = journal.stat().st_size if journal.exists() else -1
    with JournalReader(journal) as reader:
        process = reader.process or _from_name(journal)
        number = writer.add_process(process)
        before = writer.events
        for stamp, event in reader:
            writer.add(number, stamp, event)
            done = writer.events - before
            if progress is not None and done % _PROGRESS_EVERY == 0:
                progress(f"sealing {journal.name}, records", done, 0)
        done = writer.events - before
        if not done:
            raise TraceError(
                f"it has no whole record ({reader.cut or 'it is empty'})",
                str(journal),
                "Its process ended before it wrote anything: leave this file out",
            )
        missing = [reader.cut] if reader.cut else []
        missing += [
            f"{counted(count, 'record')} of a later version ({table})"
            for table, count in reader.unknown.items()
        ]
        cut = "; ".join(missing)
        writer.end_process(number, reader.ended, cut, size)
        return SealedProcess(journal, process, done, reader.ended, cut)


def _from_name(journal: Path) -> Process:
    """Who wrote a journal whose first records are damaged, from its name ``<role>-<rank>-<run id>.journal``."""
    role, _, rest = journal.stem.partition("-")
    rank, _, run = rest.partition("-")
    return Process(role=role, rank=int(rank) if rank.isdecimal() and len(rank) < 9 else 0, run=run)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(arguments: Sequence[str]) -> int:
    """Seal each of ``arguments`` beside itself; returns the exit code."""
    code = 0 if arguments else 2
    for name in arguments:
        journal = Path(name)
        try:
            seal([journal], journal.with_suffix(TRACE_SUFFIX), replace=True)
        except (TraceError, WriteError) as error:
            sys.stderr.write(f"kv-replay: {error}\n")
            code = 4
        except KeyboardInterrupt:
            return 130
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
