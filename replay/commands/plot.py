"""``replay plot``: pictures of a request, a page, its reads, or of several loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.commands.output import Progress, check_new, paragraph, whole_file
from replay.commands.timeline import owner_of, page_name, request_name

if TYPE_CHECKING:
    from analysis.diff import Rate
    from analysis.pictures import Picture, Wanted
    from replay.trace.reader import Trace
    from replay.verdict import Verdict

#: Kinds of pictures and what they show; ``analysis.pictures`` draws them.
KINDS = {
    "grid": "which page of a request was right at which stage",
    "bytes": "one page byte by byte: values, scales, rows",
    "rows": "the rows of a request along its sequence, with chunk borders",
    "ownership": "who owned a physical page when, and whose writes were in flight",
    "logits": "error of the logits and overlap of the top-k, by layer and step",
    "rate": "requests hit against the load: one point a trace, or a demo's summary.json",
}


def _list_kinds(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    for name, about in KINDS.items():
        click.echo(paragraph(about, f"{name:<10} ", " " * 11))
    ctx.exit()


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
@click.option("--kind", type=click.Choice(list(KINDS)), default="grid", show_default=True,
              help="What to draw; see --list-kinds.")  # fmt: skip
@click.option("--list-kinds", is_flag=True, is_eager=True, expose_value=False, callback=_list_kinds,
              help="List the kinds of pictures.")  # fmt: skip
@click.option(
    "--request",
    metavar="ROOM[.ATTEMPT]",
    callback=request_name,
    help="The request. [default: the first with a finding]",
)
@click.option("--logical", metavar="N", type=click.IntRange(min=0), help="Logical page, for bytes.")
@click.option("--layer", metavar="N", type=int, help="Layer, for bytes.")
@click.option("--page", metavar="BUFFER/LAYER/PAGE", callback=page_name, help="Physical page, for ownership.")
@click.option(
    "--process", metavar="N", type=click.IntRange(min=0), help="Whose page; needed where several have it."
)
@click.option("--force", is_flag=True, help="Write over the file.")
def command(
    traces: tuple[Path, ...],
    out: Path,
    kind: str,
    request: tuple[int, int | None] | None,
    logical: int | None,
    layer: int | None,
    page: tuple[str, int, int] | None,
    process: int | None,
    force: bool,
) -> None:
    """Draw what the verdict is about: the first request and page that a finding names, or those given.

    With --kind rate each TRACE or FOLDER is a load of its own and is judged apart from the others.
    """
    if out.suffix.lower() not in (".png", ".svg"):
        raise click.UsageError(f"'{out}' must end in .png or .svg.")
    check_new(out, force)
    if kind == "rate":
        click.echo(f"{out}: {_draw_rates(traces, out)}")
        return

    from analysis.event_text import BufferPage
    from analysis.pictures import Wanted
    from replay.judge import JudgeOptions, judge
    from replay.rooms import check_request
    from replay.trace.reader import open_trace

    with Progress() as progress, open_trace(*traces) as trace:
        if request is not None:
            check_request(trace, *request)
        verdict = judge(trace, JudgeOptions(reexecute=False), progress)
        place = None if page is None else BufferPage(owner_of(trace, page, process), *page)
        wanted = Wanted(
            None if request is None else (request[0], request[1] or 0), logical, layer, place=place
        )
        drawn = draw(trace, verdict, out, kind, wanted)
    click.echo(f"{out}: {drawn}")


def draw(trace: Trace, verdict: Verdict, out: Path, kind: str = "grid", wanted: Wanted | None = None) -> str:
    """Write a picture to ``out`` (over what is there) and return what it is of, in words.

    ``click.UsageError`` where the trace does not hold what the picture takes.
    """
    from analysis.pictures import NothingToDrawError, picture

    try:
        found = picture(kind, trace, verdict, wanted)
    except NothingToDrawError as error:
        raise click.UsageError(str(error)) from None
    _write(found, out)
    return found.said


def _write(picture: Picture, out: Path) -> None:
    from analysis.plots import save

    with whole_file(out) as partial:
        save(picture.figure, partial)


def _draw_rates(paths: tuple[Path, ...], out: Path) -> str:
    from analysis.pictures import rate_picture

    points = [point for path in paths for point in _rates(path)]
    said = "as the demo's clients saw it" if all(path.suffix == ".json" for path in paths) else "as judged"
    picture = rate_picture(points, said)
    _write(picture, out)
    return picture.said


def _rates(path: Path) -> list[Rate]:
    from analysis.diff import rate_of, rates_from_summary
    from replay.judge import JudgeOptions, judge
    from replay.trace.reader import open_trace

    if path.suffix == ".json":
        try:
            return rates_from_summary(path)
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    with Progress() as progress, open_trace(path) as trace:
        return [rate_of(trace, judge(trace, JudgeOptions(reexecute=False), progress))]
