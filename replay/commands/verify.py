"""``replay verify``: is a trace whole and consistent with itself?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.commands.output import Progress, paragraph, to_json
from replay.verdict import EXIT_INCONCLUSIVE, EXIT_UNREADABLE
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.verify import Checked

SCHEMA = "kv-replay/verify/1"
_SHOWN = 20


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON alone.")
@click.option("-v", "--verbose", is_flag=True, help=f"Show every problem, not the first {_SHOWN} of a file.")
def command(traces: tuple[Path, ...], as_json: bool, verbose: bool) -> int:
    """Check every chunk, every digest and every reference of a trace. Journals are sealed first.

    Exit code 0: whole. 3: whole, but the recording itself lost something (replay info says what). 4: damaged.
    """
    from replay.trace.sources import find_sources
    from replay.trace.verify import verify

    found = find_sources(list(traces))
    try:
        with Progress() as progress:
            checked = [verify(path, progress) for path in found.files]
        recorded = [loss for item in checked if not item.problems for loss in _losses(item.path)]
        lost = list(dict.fromkeys([*found.problems, *recorded]))
    finally:
        found.close()
    damaged = any(item.problems for item in checked)
    if as_json:
        click.echo(to_json({"schema": SCHEMA, "files": [_as_json(item) for item in checked], "lost": lost}))
    else:
        for item in checked:
            _tell(item, verbose)
        for loss in lost:
            click.echo(paragraph(f"lost while recording: {loss}", "", "  "))
    return EXIT_UNREADABLE if damaged else EXIT_INCONCLUSIVE if lost else 0


def _losses(path: Path) -> list[str]:
    from replay.commands.info import losses
    from replay.trace.reader import open_trace

    with open_trace(path) as trace:
        return losses(trace)


def _as_json(item: Checked) -> dict[str, Any]:
    return {
        "file": str(item.path),
        "whole": not item.problems,
        "problems": [{"where": problem.where, "what": problem.what} for problem in item.problems],
        "records": item.records,
        "contents": item.contents,
        "contents_with_bytes": item.contents_with_bytes,
        "blobs": item.blobs,
        "blob_bytes": item.blob_bytes,
        "ignored": item.ignored,
    }


def _tell(item: Checked, verbose: bool) -> None:
    count = len(item.problems)
    state = "whole" if not count else f"DAMAGED, {counted(count, 'problem')}"
    click.echo(f"{item.path}: {state}")
    lines = [
        f"checked {counted(item.records, 'record')}, {counted(item.contents, 'page content')} "
        f"({item.contents_with_bytes:,} with bytes), {counted(item.blobs, 'blob')} of "
        f"{counted(item.blob_bytes, 'byte')}"
    ]
    shown = item.problems if verbose else item.problems[:_SHOWN]
    lines += [f"{problem.where}: {problem.what}" for problem in shown]
    if count > len(shown):
        lines.append(f"and {count - len(shown):,} more (--verbose)")
    if count:
        lines.append(item.todo)
    if item.ignored:
        lines.append(f"not known to this version and not checked: {', '.join(item.ignored)}")
    for line in lines:
        click.echo(paragraph(line, "  ", "    "))
