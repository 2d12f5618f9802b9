"""``replay trim``: a trace is cut down to a part whose verdict stays what it was."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import Progress, check_new
from replay.verdict import EXIT_INCONCLUSIVE, STAGES
from replay.words import counted

_PATH = click.Path(path_type=Path, exists=True)
#: Longest range of pages or layers that may be asked for.
_MOST = 1 << 20


def _ranges(_: click.Context, param: click.Parameter, value: tuple[str, ...]) -> frozenset[int] | None:
    """Numbers of ``3``, ``0-3`` and ``0,2,5``, given any number of times."""
    found: set[int] = set()
    for text in value:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise click.BadParameter(f"'{text}' is not of the form 3, 0-3 or 0,2,5.", param=param)
            low, high = int(first), int(last) if dash else int(first)
            if not low <= high < low + _MOST:
                raise click.BadParameter(f"'{part}' is no range from low to high.", param=param)
            found |= set(range(low, high + 1))
    return frozenset(found) or None


@click.command()
@click.argument("traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=_PATH)
@click.option(
    "--request", "--room", "rooms", metavar="ROOM", multiple=True, callback=_ranges, help="Requests, by room."
)
@click.option("--layer", "layers", metavar="N", multiple=True, callback=_ranges, help="Layers.")
@click.option("--page", "pages", metavar="N", multiple=True, callback=_ranges, help="Logical pages.")
@click.option("--stage", "stages", metavar="STAGE", type=click.Choice(STAGES), multiple=True,
              help=f"Stages of the ladder: {', '.join(STAGES)}.")  # fmt: skip
@click.option(
    "--last",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests that did anything in the last SECONDS of the recording.",
)
@click.option("--alone", is_flag=True, help="Leave out other requests even where they are evidence.")
@click.option("--no-payload", is_flag=True, help="Leave out page bytes, keys, queries and logits.")
@click.option(
    "-o", "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(
    traces: tuple[Path, ...],
    rooms: frozenset[int] | None,
    layers: frozenset[int] | None,
    pages: frozenset[int] | None,
    stages: tuple[str, ...],
    last: float | None,
    alone: bool,
    no_payload: bool,
    out: Path,
    force: bool,
) -> int:
    """Cut a trace down to some requests, layers, pages or stages, for a small file to keep or to send.

    Choices combine. ROOM and N are a number, a range such as 0-3, or a list such as 0,2,5. What a verdict on the part
    needs is kept: other owners of its pages, their transfers, donors, both sides. So the part is judged as it was in
    the whole trace, and the verdict says how far it reaches.

    With --alone evidence may go; it is told as lost, and a verdict can only become weaker (exit code 3).
    """
    if not (rooms or layers or pages or stages or last):
        raise click.UsageError("say what to keep: --request, --layer, --page, --stage or --last.")
    check_new(out, force)

    from replay.scope import Scope
    from replay.trim import trim

    scope = Scope(rooms, layers, pages, frozenset(stages) or None)
    with Progress() as progress:
        done = trim(
            traces,
            out,
            scope,
            last=last,
            alone=alone,
            payload=not no_payload,
            replace_out=force,
            progress=progress,
        )
    click.echo(f"{out}  {out.stat().st_size:,} bytes")
    beside = done.requests - done.own
    more = f" and {beside:,} more as evidence" if beside > 0 else ""
    click.echo(f"  {counted(done.own, 'request')}{more}, {done.records:,} of {counted(done.of, 'record')}")
    if done.verdict is not None:
        click.echo(f"  its verdict is that of the whole trace within this scope: {done.verdict}")
    for what in done.beside:
        click.echo(f"  cut away: {what}")
    if done.level:
        click.echo("  more was kept than these choices name: the verdict stands on it")
    if done.lost:
        click.echo(
            f"  {counted(done.lost, 'record')} of evidence left out, which the new trace tells as lost"
        )
    return EXIT_INCONCLUSIVE if done.lost else 0
