"""``replay diff GOOD BAD``: where two runs part."""

from __future__ import annotations

from pathlib import Path

import click

from replay.commands.output import Progress, check_new, to_json, write_new
from replay.verdict import EXIT_CLEAN, EXIT_DIVERGENT, EXIT_INCONCLUSIVE

_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("good", metavar="GOOD", type=_PATH)
@click.argument("bad", metavar="BAD", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON alone.")
@click.option("-v", "--verbose", is_flag=True, help="List every difference.")
@click.option(
    "-o", "--out", metavar="FILE", type=click.Path(path_type=Path), help="Write the JSON to FILE too."
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
def command(good: Path, bad: Path, as_json: bool, verbose: bool, out: Path | None, force: bool) -> int:
    """Compare two runs of the same requests, and show the first difference in the order of the ladder.

    GOOD and BAD are traces, journals or folders. Requests are aligned by room, by the client's id, or by the order of
    equal lengths; pages by logical position, layer and look; rows as stored, values and scales apart.

    Two right runs may differ (kernels are not deterministic), so a difference is a place to look at and no fault.

    Exit codes: 0 equal, 1 different, 2 usage, 3 nothing comparable, 4 unreadable trace.
    """
    if out is not None:
        check_new(out, force)

    from analysis.compare_text import comparison_json, comparison_text
    from replay.compare import compare
    from replay.trace.reader import open_trace

    with Progress() as progress, open_trace(good) as left, open_trace(bad) as right:
        found = compare(left, right, progress)
    if out is not None:
        write_new(out, to_json(comparison_json(found)) + "\n", force)
    click.echo(to_json(comparison_json(found)) if as_json else comparison_text(found, verbose))
    if not found.comparable:
        return EXIT_INCONCLUSIVE
    return EXIT_DIVERGENT if found.differences else EXIT_CLEAN
