"""``replay trigger``: tell running captures that a reply was garbled."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import click

from capture_hooks.rid import rid_hash
from replay.commands.timeline import request_name
from replay.writing import writing


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--room", metavar="ROOM[.ATTEMPT]", callback=request_name, help="The request's bootstrap room.")
@click.option("--rid", metavar="ID", help="The client's request id; only a hash of it is written.")
@click.option(
    "--reason", metavar="TEXT", default="garbled reply", show_default=True, help="Kept in the trace."
)
def command(folder: Path, room: tuple[int, int | None] | None, rid: str | None, reason: str) -> None:
    """Tell running captures that a reply was garbled, so that they write out the page bytes they still hold.

    FOLDER is the one given as KV_REPLAY_CAPTURE. Every process that records there, on either side, sees the request
    within a moment and keeps its ring of bytes. Give --room, --rid or both.
    """
    if room is None and not rid:
        raise click.UsageError("say which request: --room ROOM, --rid ID, or both.")
    body: dict[str, object] = {"reason": reason[:200]}
    if room is not None:
        body |= {"room": room[0], "attempt": room[1] or 0}
    if rid:
        body["rid_hash"] = rid_hash(rid)
    name = f"trigger-{secrets.token_hex(8)}.json"
    # Under another name until it is whole: the captures look for files called trigger-*.json.
    partial = folder / f".{name}.partial"
    try:
        with writing(folder):
            partial.write_text(json.dumps(body) + "\n", encoding="utf-8")
            partial.replace(folder / name)
    finally:
        partial.unlink(missing_ok=True)
    click.echo(f"wrote {folder / name}")
    if not any(folder.glob("*.journal")):
        click.echo(
            "replay: warning: no journal lies in this folder, so no capture seems to run here", err=True
        )
