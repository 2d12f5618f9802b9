"""``replay timeline``: the events of a request or of a physical page, in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.commands.output import to_json

if TYPE_CHECKING:
    from replay.trace.reader import Trace

SCHEMA = "kv-replay/timeline/1"


def request_name(
    _: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int | None] | None:
    """(room, attempt or None) of ``ROOM`` or ``ROOM.ATTEMPT``."""
    if value is None:
        return None
    room, dot, attempt = value.partition(".")
    if not room.isdecimal() or (dot and not attempt.isdecimal()):
        raise click.BadParameter(f"'{value}' is not a room number, such as 7719 or 7719.1.", param=param)
    return int(room), int(attempt) if dot else None


def page_name(_: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int, int] | None:
    """(buffer name, layer, page) of ``BUFFER/LAYER/PAGE``."""
    if value is None:
        return None
    parts = value.rsplit("/", 2)
    if len(parts) != 3 or not parts[1].isdecimal() or not parts[2].isdecimal():
        raise click.BadParameter(
            f"'{value}' is not of the form BUFFER/LAYER/PAGE, such as index_k/12/14.", param=param
        )
    return parts[0], int(parts[1]), int(parts[2])


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("--request", metavar="ROOM[.ATTEMPT]", callback=request_name, help="The request to list.")
@click.option("--page", metavar="BUFFER/LAYER/PAGE", callback=page_name, help="The physical page to list.")
@click.option(
    "--process",
    metavar="N",
    type=click.IntRange(min=0),
    help="Whose page, where several have it. [default: all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON alone.")
def command(
    traces: tuple[Path, ...],
    request: tuple[int, int | None] | None,
    page: tuple[str, int, int] | None,
    process: int | None,
    as_json: bool,
) -> None:
    """List what happened to a request or a page, in order: who stored, copied, sent, received, read and freed it.

    A ~ marks a line whose order against the line above is not proved by the trace.
    """
    if (request is None) == (page is None):
        raise click.UsageError("give either --request ROOM or --page BUFFER/LAYER/PAGE.")

    from analysis.event_text import BufferPage
    from analysis.timeline_text import (
        page_entries,
        page_title,
        request_entries,
        timeline_json,
        timeline_text,
    )
    from replay.rooms import check_request
    from replay.trace.reader import open_trace

    with open_trace(*traces) as trace:
        if request is not None:
            check_request(trace, *request)
            title = f"room {request[0]}" + (f" attempt {request[1]}" if request[1] is not None else "")
            found = [(title, request_entries(trace, *request))]
        else:
            assert page is not None
            owners = owners_of(trace, page, process)
            if as_json and len(owners) > 1:
                raise click.UsageError(_several(trace, owners))
            found = []
            for number in owners:
                place = BufferPage(number, *page)
                title = page_title(trace, place) + (f" (--process {number})" if len(owners) > 1 else "")
                found.append((title, page_entries(trace, place)))
        if as_json:
            ((title, entries),) = found
            click.echo(to_json({"schema": SCHEMA, "title": title, "events": timeline_json(trace, entries)}))
            return
        for number, (title, entries) in enumerate(found):
            if number:
                click.echo()
            if entries:
                click.echo(timeline_text(trace, title, entries, place_told=page is not None))
            else:
                click.echo(f"{title}: nothing in this trace")


def owner_of(trace: Trace, page: tuple[str, int, int], process: int | None) -> int:
    """The process whose page is meant; page numbers of the two sides have nothing to do with each other."""
    owners = owners_of(trace, page, process)
    if len(owners) > 1:
        raise click.UsageError(_several(trace, owners))
    return owners[0]


def _several(trace: Trace, owners: list[int]) -> str:
    told = ", ".join(f"{i} ({trace.processes[i].role} rank {trace.processes[i].rank})" for i in owners)
    return f"several processes have that page; add --process with one of {told}."


def owners_of(trace: Trace, page: tuple[str, int, int], process: int | None) -> list[int]:
    """Every process that has the page, or ``process`` alone."""
    name, layer, number = page
    table = trace.table("buffer")
    hit = (table["name"] == name) & (table["layer"] == layer)
    if not hit.any():
        known = sorted({f"{n}/{k}" for n, k in zip(table["name"], table["layer"], strict=True)})
        raise click.UsageError(
            f"no buffer {name}/{layer} in this trace; it has {', '.join(known[:8]) or 'none'}."
        )
    hit &= table["pages"] > number
    owners = sorted({int(owner) for owner in table["process"][hit]})
    if process is not None:
        owners = [owner for owner in owners if owner == process]
    if not owners:
        raise click.UsageError(f"no process has page {number} in {name}/{layer}.")
    return owners
