"""``replay bundle``: one ZIP for a bug report, without anything that says whose it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from capture_hooks.options import parse_size
from replay.commands.output import Progress, check_new, paragraph, whole_file
from replay.verdict import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from analysis.bundle import Bundle


def _size(_: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param=param) from None


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "-o", "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The ZIP to write."
)
@click.option(
    "--max-size",
    metavar="SIZE",
    default="24MB",
    show_default=True,
    callback=_size,
    help="Most bytes of the ZIP; an issue takes 25 MB.",
)
@click.option(
    "--request",
    "rooms",
    metavar="ROOM",
    type=int,
    multiple=True,
    help="Requests. [default: those of findings]",
)
@click.option("--layer", "layers", metavar="N", type=int, multiple=True, help="Layers. [default: all]")
@click.option("--yes", is_flag=True, help="Write without asking.")
@click.option("--force", is_flag=True, help="Write over the file.")
def command(
    traces: tuple[Path, ...],
    out: Path,
    max_size: int,
    rooms: tuple[int, ...],
    layers: tuple[int, ...],
    yes: bool,
    force: bool,
) -> int:
    """Pack what a finding stands on into one ZIP for a bug report: trace, report, verdict, and a script that shows it.

    Only texts on a list go in: no tokens, prompts, request ids, host or user names, addresses or paths. Page bytes do,
    and they are computed from the prompt. The command says what goes in and asks before it writes; then it replays the
    bundle in an empty folder.
    """
    check_new(out, force)

    from analysis.bundle import BundleError, TooLargeError, make
    from replay.scope import Scope

    scope = Scope(
        rooms=frozenset(rooms) if rooms else None, layers=frozenset(layers) if layers else None
    ) if rooms or layers else None  # fmt: skip
    try:
        with Progress() as progress:
            bundle = make(traces, max_size, scope, progress)
    except TooLargeError as error:
        raise click.UsageError(f"{error}.") from None
    except BundleError as error:
        raise click.ClickException(f"{error}.") from None
    _tell(bundle)
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: if what goes in may go, give --yes.")
    if not yes and not click.confirm(f"Write {out}?"):
        click.echo("Nothing was written.")
        return EXIT_INTERRUPTED
    _write(bundle, out)
    click.echo(f"{out}  {out.stat().st_size:,} bytes; replayed in an empty folder: the same verdict")
    return 0


def _tell(bundle: Bundle) -> None:
    """What goes in, what does not, and what the bytes mean."""
    from analysis.bundle import FILES
    from analysis.bundle_text import NEVER, WARNING

    click.echo("Goes in:")
    for name, content in bundle.files.items():
        head = f"  {name:<16} {len(content):>12,} bytes  "
        click.echo(paragraph(FILES[name], head, " " * len(head)))
    click.echo("Stays out:")
    for text in (*bundle.left_out, NEVER):
        click.echo(paragraph(text, "  "))
    click.echo("Mind:")
    click.echo(paragraph(WARNING, "  "))


def _write(bundle: Bundle, out: Path) -> None:
    """Write the ZIP, and let it stay only if it proves itself."""
    from analysis.bundle import prove, zipped

    with whole_file(out) as partial:
        partial.write_bytes(zipped(bundle.files))
        with Progress() as progress:
            progress("replaying the bundle in an empty folder")
            problems = prove(partial)
        if problems:
            raise click.ClickException(
                f"the bundle does not prove itself and was not kept: {'; '.join(problems)}. That is a fault of "
                "kv-replay: please report it."
            )
