"""``replay seal``: journals become trace files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.commands.output import Progress, check_new
from replay.verdict import EXIT_UNREADABLE
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.seal import SealedProcess

_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("journals", metavar="JOURNAL|FOLDER...", nargs=-1, required=True, type=_PATH)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Seal all journals into this one file, instead of each beside itself.",
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(journals: tuple[Path, ...], out: Path | None, force: bool) -> int:
    """Turn journals into compressed HDF5 traces, whether their processes ended, were killed, or are alive.

    Without --out each journal is sealed beside itself, over an older trace of it. Journals stay as they are. `replay
    FOLDER` does this by itself; the command is for keeping or sending a capture.
    """
    from replay.trace.errors import TraceError
    from replay.trace.file import TRACE_SUFFIX
    from replay.trace.seal import seal
    from replay.trace.sources import JOURNAL_SUFFIX

    chosen: list[Path] = []
    for path in journals:
        inside = sorted(path.glob(f"*{JOURNAL_SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise click.UsageError(f"there is no journal in '{path}'.")
        if path.suffix == TRACE_SUFFIX:
            raise click.UsageError(f"'{path}' is a trace already: every command reads it as it is.")
        chosen += [journal for journal in inside if journal not in chosen]
    if out is not None:
        check_new(out, force)
        with Progress() as progress:
            _tell(out, seal(chosen, out, replace=force, progress=progress))
        return 0
    failed = 0
    for journal in chosen:
        path = journal.with_suffix(TRACE_SUFFIX)
        try:
            with Progress() as progress:
                _tell(path, seal([journal], path, replace=True, progress=progress))
        except TraceError as error:
            failed += 1
            click.echo(f"replay: {error}", err=True)
    return EXIT_UNREADABLE if failed else 0


def _tell(path: Path, sealed: list[SealedProcess]) -> None:
    click.echo(f"{path}  {path.stat().st_size:,} bytes")
    for item in sealed:
        state = "ended" if item.ended else "no end recorded: killed, or still alive"
        click.echo(f"  {item.process.role} {item.process.rank}  {counted(item.events, 'record')}, {state}")
        if item.cut:
            click.echo(f"    not readable: {item.cut}")
