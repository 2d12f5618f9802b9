"""``replay report``: the verdict as one HTML file, or as Markdown for an issue."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import Progress, check_new, write_new
from replay.commands.timeline import request_name


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--markdown", is_flag=True, help="Markdown for the body of an issue; printed where there is no --out."
)
@click.option(
    "--request",
    metavar="ROOM[.ATTEMPT]",
    callback=request_name,
    help="The request in the foreground. [default: the first with a finding]",
)
@click.option("--no-reexecute", is_flag=True, help="Run no kernel; the numpy reference only.")
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(
    traces: tuple[Path, ...],
    out: Path | None,
    markdown: bool,
    request: tuple[int, int | None] | None,
    no_reexecute: bool,
    force: bool,
) -> None:
    """Tell the verdict from symptom to byte in one self-contained HTML file: ladder, evidence, pictures, timeline.

    The file loads nothing from anywhere and runs no script.
    """
    if out is None and not markdown:
        raise click.UsageError("say where the HTML goes: -o report.html (or print --markdown).")
    if out is not None:
        check_new(out, force)

    from analysis.html import report_html
    from analysis.markdown import report_markdown
    from analysis.story import tell
    from replay.judge import JudgeOptions, judge
    from replay.rooms import check_request
    from replay.trace.reader import open_trace

    chosen = None if request is None else (request[0], request[1] or 0)
    with Progress() as progress, open_trace(*traces) as trace:
        if chosen is not None:
            check_request(trace, *chosen)
        verdict = judge(trace, JudgeOptions(reexecute=not no_reexecute), progress)
        progress("drawing")
        story = tell(trace, verdict, traces[0].name or "trace.h5", chosen)
        text = report_markdown(story) if markdown else report_html(story)
    if out is None:
        click.echo(text, nl=False)
        return
    write_new(out, text, force)
    click.echo(f"{out}  {out.stat().st_size:,} bytes: {verdict.verdict}")
