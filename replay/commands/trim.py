"""``replay trim``: a trace is cut down to some requests."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import Progress, check_new

_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=_PATH)
@click.option(
    "--room", "rooms", metavar="N", type=int, multiple=True, required=True, help="A request to keep."
)
@click.option(
    "--alone", is_flag=True, help="Leave out the other requests that held the same pages at some time."
)
@click.option("--no-payload", is_flag=True, help="Leave out page bytes, keys, queries and logits.")
@click.option(
    "-o", "--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(
    traces: tuple[Path, ...], rooms: tuple[int, ...], alone: bool, no_payload: bool, out: Path, force: bool
) -> None:
    """Cut a trace down to some requests, for a small file to keep or to send.

    Requests that held one of their pages stay too: a write that came from elsewhere is found there. What was left
    out is told in the new trace as lost, so a verdict on it can name a fault but not say "clean".
    """
    from replay.trace.trim import trim

    check_new(out, force)
    with Progress() as progress:
        done = trim(
            traces, out, rooms, neighbours=not alone, payload=not no_payload, replace=force, progress=progress
        )
    click.echo(f"{out}  {out.stat().st_size:,} bytes")
    click.echo(f"  {len(done.rooms):,} requests, {done.records:,} of {done.of:,} records")
