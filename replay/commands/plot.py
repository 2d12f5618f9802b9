"""``replay plot``: the stage x page grid of a request as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.commands.output import Progress, check_new
from replay.commands.timeline import request_name

if TYPE_CHECKING:
    from replay.trace.reader import Trace
    from replay.verdict import Verdict


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="The picture: .png or .svg.",
)
@click.option(
    "--request",
    metavar="ROOM[.ATTEMPT]",
    callback=request_name,
    help="The request. [default: the first with a finding]",
)
@click.option("--force", is_flag=True, help="Write over the file.")
def command(traces: tuple[Path, ...], out: Path, request: tuple[int, int | None] | None, force: bool) -> None:
    """Draw which pages of a request were right at which stage, with the verdict above it.

    Without --request it is the first request of the verdict's findings, or the one with the most pages.
    """
    if out.suffix.lower() not in (".png", ".svg"):
        raise click.UsageError(f"'{out}' must end in .png or .svg.")
    check_new(out, force)

    from replay.judge import JudgeOptions, judge
    from replay.trace.reader import open_trace

    with Progress() as progress, open_trace(*traces) as trace:
        verdict = judge(trace, JudgeOptions(), progress)
        drawn = draw(trace, verdict, out, request)
    click.echo(f"{out}: {drawn}")


def draw(trace: Trace, verdict: Verdict, out: Path, request: tuple[int, int | None] | None = None) -> str:
    """Write the grid of ``request``, or of the one that the verdict names first, to ``out`` (over what is there).

    Returns the request in words. ``click.UsageError`` where the trace has no page of it.
    """
    from analysis.diff import busiest_request, stage_grid
    from analysis.plots import save
    from analysis.plots import stage_grid as figure_of
    from analysis.report import headline

    chosen = request or busiest_request(trace, verdict)
    if chosen is None:
        raise click.UsageError("this trace has no page of any request, so there is nothing to draw.")
    room, attempt = chosen[0], chosen[1] or 0
    grid = stage_grid(trace, verdict, room, attempt)
    if grid is None:
        raise click.UsageError(f"this trace has no page of room {room} attempt {attempt}.")
    said = f"room {room}" + (f" attempt {attempt}" if attempt else "")
    size = f"{said}: {len(grid.logical)} pages in {len(grid.layers)} layers"
    partial = out.with_name(f"{out.stem}.partial{out.suffix}")
    try:
        save(figure_of(grid, f"{headline(verdict)}\n{size}"), partial)
        partial.replace(out)
    except OSError as error:
        raise click.UsageError(f"cannot write '{out}': {error.strerror}") from error
    return size
