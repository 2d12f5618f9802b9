"""``replay geometry``: whether the pools of two sides fit together, before any traffic."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import to_json
from replay.verdict import EXIT_CLEAN, EXIT_DIVERGENT, EXIT_INCONCLUSIVE
from replay.words import counted

_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("traces", metavar="PREFILL DECODE", nargs=-1, required=True, type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON alone.")
def command(traces: tuple[Path, ...], as_json: bool) -> int:
    """Compare the buffers of a prefill and a decode side and list what does not fit.

    Takes traces, journals (of running servers too) or folders; one folder that holds both sides is enough. Nothing
    needs to have been sent yet.

    Exit codes: 0 they fit, 1 hazards were found, 3 a side has no inventory.
    """
    from replay.geometry import compare
    from replay.trace.reader import open_trace

    with open_trace(*traces) as trace:
        found = compare(trace)
    whole = all(found.buffers)
    if as_json:
        click.echo(to_json(found.to_json()))
    elif not whole:
        for side, names, count in zip(
            ("prefill", "decode"), (found.prefill, found.decode), found.buffers, strict=True
        ):
            if not count:
                why = "no buffer was recorded there" if names else "there is no such process in these traces"
                click.echo(f"replay: cannot compare: {side}: {why}", err=True)
    else:
        left, right = (", ".join(names) for names in (found.prefill, found.decode))
        click.echo(f"{left} ({counted(found.buffers[0], 'buffer')}) and {right} ({found.buffers[1]})")
        for hazard in found.hazards:
            click.echo(f"  hazard  {hazard.kind} ({hazard.fault})  {hazard.where}: {hazard.what}")
        if not found.hazards:
            click.echo("  nothing that does not fit")
    if not whole:
        return EXIT_INCONCLUSIVE
    return EXIT_DIVERGENT if found.hazards else EXIT_CLEAN
