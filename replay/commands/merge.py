"""``replay merge``: the traces of both sides become one file."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import Progress, check_new

_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=_PATH)
@click.option(
    "-o", "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(traces: tuple[Path, ...], out: Path, force: bool) -> None:
    """Join traces, journals and folders of one capture into one file; their order does not matter.

    Equal page contents of several files become one. Nothing is ordered by clocks: records stay in the sequence of
    their own process.
    """
    from replay.trace.merge import merge

    check_new(out, force)
    with Progress() as progress:
        problems = merge(traces, out, replace=force, progress=progress)
    for problem in problems:
        click.echo(f"replay: left out: {problem}", err=True)
    click.echo(f"{out}  {out.stat().st_size:,} bytes")
