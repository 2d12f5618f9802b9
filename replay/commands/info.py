"""``replay info``: what is in a trace, and first of all what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from replay.commands.output import paragraph, to_json
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.reader import ProcessInfo, Trace

SCHEMA = "kv-replay/info/1"

#: Hooks that the line about those that never fired names.
_NAMES = 3


@click.command()
@click.argument(
    "traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON alone.")
@click.option("-v", "--verbose", is_flag=True, help="List the hooks that never fired.")
def command(traces: tuple[Path, ...], as_json: bool, verbose: bool) -> None:
    """Say what is missing in a trace (losses, cut journals, hooks that see a part), then what is there."""
    from replay.trace.reader import open_trace

    with open_trace(*traces) as trace:
        body = describe(trace)
    if as_json:
        click.echo(to_json(body))
        return
    missing = body["missing"]
    click.echo("Missing" if missing else "Missing: nothing that the trace knows of")
    for line in missing:
        click.echo(paragraph(line, "  ", "    "))
    for line in _silent(body["never_fired"], verbose):
        click.echo(paragraph(line, "", "  "))
    click.echo("There")
    for line in _there(body):
        # A name and its count stay together.
        click.echo(paragraph(line, "  ", "    ").replace("\xa0", " "))


def describe(trace: Trace) -> dict[str, Any]:
    """Everything that the command tells, as plain values."""
    return {
        "schema": SCHEMA,
        "files": [{"file": str(path), "bytes": path.stat().st_size} for path in trace.paths],
        "missing": missing(trace),
        "never_fired": never_fired(trace),
        "processes": [_process(trace, number) for number in range(len(trace.processes))],
        "requests": _requests(trace),
        "snapshots": _snapshots(trace),
        "records": _records(trace),
        "contents": _contents(trace),
        "payload": _payload(trace),
    }


def _name(process: ProcessInfo) -> str:
    return f"{process.role} {process.rank}"


def missing(trace: Trace) -> list[str]:
    """What is missing in ``trace``, in words, the gravest first."""
    found = losses(trace)
    roles = {process.role for process in trace.processes}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in roles and other not in roles and "server" not in roles:
            found.append(f"there is a {role} process but no {other} process")
    found += _hooks(trace)
    contents = trace.contents
    if len(contents) and not contents.has_data.any():
        found.append("no page bytes were kept: differing bytes cannot be shown, only differing rows")
    return found


def losses(trace: Trace) -> list[str]:
    """What recording or reading ``trace`` lost, in words."""
    found = [f"not readable: {problem}" for problem in trace.problems]
    for process in trace.processes:
        if process.cut:
            found.append(f"{_name(process)}: its journal is cut: {process.cut}")
        if not process.ended:
            found.append(f"{_name(process)}: no end recorded: it was killed, or is still alive")
    table = trace.table("loss")
    lost: Counter[tuple[int, str, str, str]] = Counter()
    columns = zip(
        table["process"], table["stage"], table["what"], table["reason"], table["count"], strict=True
    )
    for number, stage, what, reason, count in columns:
        lost[int(number), stage, what, reason] += int(count)
    for (number, stage, what, reason), times in lost.most_common():
        why = f": {reason}" if reason else ""
        name = _name(trace.processes[number])
        records = counted(times, f"{what} record" if what else "record")
        found.append(f"{name}: {records} lost at the {stage}{why}")
    return found


def _last_hooks(trace: Trace) -> dict[tuple[int, str], int]:
    """(process, hook) -> the row of the hook table that holds: the last one."""
    table = trace.table("hook")
    names = zip(table["process"], table["name"], strict=True)
    return {(int(process), str(name)): row for row, (process, name) in enumerate(names)}


def _hooks(trace: Trace) -> list[str]:
    """Hooks that are not attached or see only a part."""
    table = trace.table("hook")
    last = _last_hooks(trace)
    state, complete, covers, note = (table[name] for name in ("state", "complete", "covers", "note"))
    found = []
    for (process, name), row in last.items():
        where = f"{_name(trace.processes[process])}: hook {name} ({covers[row]})"
        because = f": {note[row]}" if note[row] else ""
        if state[row] != "attached":
            found.append(f"{where} is {state[row]}{because}")
        elif not complete[row]:
            found.append(f"{where} does not see everything{because}")
    seen = {process for process, _ in last}
    found += [
        f"{_name(process)}: no hook was told, so absence of a record proves nothing"
        for number, process in enumerate(trace.processes)
        if number not in seen
    ]
    return found


def never_fired(trace: Trace) -> list[dict[str, str]]:
    """Attached hooks whose function was never called: the engine goes another way, or had no use for it."""
    table = trace.table("hook")
    return [
        {"process": _name(trace.processes[process]), "hook": name, "covers": str(table["covers"][row])}
        for (process, name), row in _last_hooks(trace).items()
        if table["state"][row] == "attached" and not table["fired"][row]
    ]


def _silent(hooks: list[dict[str, str]], verbose: bool) -> list[str]:
    """One line about hooks that never fired; one for each of them where asked."""
    if not hooks:
        return []
    told = counted(len(hooks), "attached hook") + " never fired"
    if verbose:
        return [told, *(f"  {item['process']}: {item['hook']} ({item['covers']})" for item in hooks)]
    names = list(dict.fromkeys(item["hook"] for item in hooks))
    more = ", ..." if len(names) > _NAMES else ""
    return [f"{told}: {', '.join(names[:_NAMES])}{more} (-v lists them)"]


def _process(trace: Trace, number: int) -> dict[str, Any]:
    process = trace.processes[number]
    table = trace.table("buffer")
    groups: dict[tuple[Any, ...], list[int]] = {}
    columns = ("name", "format", "pages", "pitch", "item_length")
    for row in np.flatnonzero(table["process"] == number):
        groups.setdefault(tuple(table[name][row] for name in columns), []).append(int(table["layer"][row]))
    buffers = [
        {**dict(zip(columns, group, strict=True)), "layers": sorted(layers)}
        for group, layers in groups.items()
    ]
    known = ("role", "rank", "run", "engine", "mode", "transport", "options", "environment", "ended", "cut")
    return {**{name: getattr(process, name) for name in known}, "buffers": buffers}


def _requests(trace: Trace) -> dict[str, Any]:
    table = trace.table("request")
    rooms = set(zip(table["room"].tolist(), table["attempt"].tolist(), strict=True))
    return {"requests": len(rooms), "phases": dict(Counter(table["phase"].tolist()))}


def _snapshots(trace: Trace) -> list[dict[str, Any]]:
    table = trace.table("snapshot")
    pages = table.ragged("pages").lengths
    found: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(table["stage"], table["moment"], strict=True)):
        found.setdefault(key, []).append(row)
    return [
        {"stage": stage, "moment": moment, "snapshots": len(rows), "pages": int(pages[rows].sum())}
        for (stage, moment), rows in sorted(found.items())
    ]


def _records(trace: Trace) -> dict[str, int]:
    from replay.trace.schema import TABLES

    counts = {name: len(trace.table(name)) for name in TABLES}
    return {name: count for name, count in counts.items() if count}


def _contents(trace: Trace) -> dict[str, int]:
    contents = trace.contents
    sizes = contents.data_sizes()
    return {
        "distinct": len(contents),
        "with_row_digests": int((contents.rows > 0).sum()),
        "with_bytes": int(contents.has_data.sum()),
        "bytes": int(sizes[sizes > 0].sum()),
    }


def _payload(trace: Trace) -> dict[str, int]:
    """Records whose payload was kept, by table and column."""
    from replay.trace.schema import TABLES

    found = {}
    for name, columns in TABLES.items():
        table = trace.table(name)
        for column in columns:
            if column.kind == "bulk" and len(table):
                kept = int((table.bulk_size(column.name) > 0).sum())
                found.update({f"{name}.{column.name}": kept} if kept else {})
    return found


def _there(body: dict[str, Any]) -> list[str]:
    lines = [f"{item['file']}  {item['bytes']:,} bytes" for item in body["files"]]
    for process in body["processes"]:
        told = [process["engine"], f"mode {process['mode']}" if process["mode"] else "", process["transport"]]
        more = ", ".join(text for text in told if text)
        lines.append(f"{process['role']} {process['rank']}" + (f"  {more}" if more else ""))
        for buffer in process["buffers"]:
            layers = len(buffer["layers"])
            lines.append(
                f"  {buffer['name']}  {counted(layers, 'layer')}, {counted(buffer['pages'], 'page')}, format "
                f"{buffer['format']}, pitch {buffer['pitch']:,}, item length {buffer['item_length']:,}"
            )
    requests = body["requests"]
    phases = ", ".join(f"{name} {count:,}" for name, count in requests["phases"].items())
    lines.append(counted(requests["requests"], "request") + (f" ({phases})" if phases else ""))
    for item in body["snapshots"]:
        stage = f"{item['stage']} {item['moment']}".strip()
        lines.append(f"snapshots {stage}: {item['snapshots']:,}, {counted(item['pages'], 'page')}")
    contents = body["contents"]
    lines.append(
        f"{counted(contents['distinct'], 'distinct page content')}, {contents['with_bytes']:,} with bytes "
        f"({contents['bytes']:,} bytes)"
    )
    lines.append(_listed("records", body["records"]))
    if body["payload"]:
        lines.append(_listed("kept payload", body["payload"]))
    return lines


def _listed(head: str, counts: Mapping[str, int]) -> str:
    """Counts with their names."""
    return f"{head}: " + ", ".join(f"{name}\xa0{count:,}" for name, count in counts.items())
