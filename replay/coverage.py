"""What the hooks saw: coverage that makes absence evidence, losses that forbid it, and journals that were cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from capture_hooks.options import TAPS
from replay.trace.file import ProcessInfo
from replay.trace.reader import Trace
from replay.verdict import NotJudged
from replay.words import counted

#: What a lost record of each table takes away from the coverage of its process.
COVERS = {
    "store": "store",
    "alloc": "alloc",
    "free": "alloc",
    "send": "send",
    "receive": "receive",
    "transfer_state": "completion",
    "request": "completion",
    "read": "read",
    "copy": "copy",
    "metadata": "metadata",
}

#: The tap that each kind of look belongs to: who switched a tap off asked for no verdict on its rung.
TAP_OF = {"store": "store", "read": "read"}

#: What the hooks of each role must cover before everything is judged.
NEEDED = {
    "prefill": ("store", "alloc", "send", "completion"),
    "decode": ("alloc", "receive", "completion", "read"),
    "server": ("store", "alloc", "read"),
}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Per process: what is covered whole, the hook table, losses; and what follows for the verdict."""

    complete: dict[int, frozenset[str]]
    hooks: dict[str, Any]
    losses: dict[str, Any]
    not_judged: list[NotJudged]


def taps(process: ProcessInfo) -> frozenset[str]:
    """The taps that ran in a process; all of them where its options do not say."""
    return frozenset(process.options.get("taps", TAPS))


def needed(process: ProcessInfo) -> tuple[str, ...]:
    """What the hooks of ``process`` must cover, given the taps that it was asked to run."""
    ran = taps(process)
    return tuple(what for what in NEEDED.get(process.role, ()) if TAP_OF.get(what, "") in ran | {""})


def coverage(trace: Trace, apart: frozenset[int] = frozenset()) -> Coverage:
    """Read the hook and loss tables of a trace; ``apart`` are processes that were cut down without the others."""
    missing: list[NotJudged] = []
    lost = _losses(trace)
    served = bool((trace.table("request")["phase"] == "arrived").any())
    served |= bool((trace.table("transfer_state")["state"] == "arrived").any())
    complete: dict[int, frozenset[str]] = {}
    shown: dict[str, Any] = {}
    for number, process in enumerate(trace.processes):
        name = f"{process.role} rank {process.rank}"
        hooks = _hooks(trace, number)
        good = {h["covers"] for h in hooks.values() if h["state"] == "attached" and h["complete"]}
        bad = {h["covers"] for h in hooks.values()} - good
        bad |= {h["covers"] for h in hooks.values() if h["state"] != "attached" or not h["complete"]}
        silent = {
            what
            for what in NEEDED.get(process.role, ())
            if served and what in good and not any(h["fired"] for h in hooks.values() if h["covers"] == what)
        }
        bad |= silent
        gone = lost.get(number, {})
        for what in gone:
            bad |= {COVERS[what]} if what in COVERS else set(COVERS.values()) if what == "" else set()
        complete[number] = frozenset() if number in apart else frozenset(good - bad)
        shown[name] = {
            "attached": sum(h["state"] == "attached" for h in hooks.values()),
            "fired": sum(h["fired"] > 0 for h in hooks.values()),
            "hooks": len(hooks),
            "covered": sorted(complete[number]),
        }
        absent = [what for what in needed(process) if what not in complete[number]]
        if absent:
            why = "records of it were lost" if set(gone) - {"content"} else "no attached hook sees all of it"
            if number in apart:
                why = "the file was cut down by itself, without the other side's: trim them together"
            elif set(absent) <= silent:
                why = "the hooks are attached and never fired: the engine goes another way"
            missing.append(NotJudged(f"{name}: {', '.join(absent)}", why))
        # Page bytes that were given up (a full ring, the disk limit) leave their digests: that is scope, not a hole.
        total = sum(int(entry["count"]) for what, entry in gone.items() if what != "content")
        if total:
            missing.append(NotJudged(f"{name}: {counted(total, 'record')}", "dropped while recording"))
        if not process.ended:
            cut = f" ({process.cut})" if process.cut else ""
            missing.append(
                NotJudged(f"{name}: everything after its last record", f"its journal was never closed{cut}")
            )
        elif process.cut:
            missing.append(NotJudged(f"{name}: a part of its journal", process.cut))
    losses = {
        f"{trace.processes[number].role} rank {trace.processes[number].rank}": {
            what or "any": entry for what, entry in entries.items()
        }
        for number, entries in lost.items()
    }
    return Coverage(complete, shown, losses, missing)


def _hooks(trace: Trace, process: int) -> dict[str, dict[str, Any]]:
    """The last state of each hook of a process."""
    table = trace.table("hook")
    found: dict[str, dict[str, Any]] = {}
    for row in np.flatnonzero(table["process"] == process).tolist():
        found[str(table["name"][row])] = {
            "covers": str(table["covers"][row]),
            "state": str(table["state"][row]),
            "fired": int(table["fired"][row]),
            "complete": bool(table["complete"][row]),
        }
    return found


def _losses(trace: Trace) -> dict[int, dict[str, dict[str, Any]]]:
    """Process -> table -> count and stages of what was lost there."""
    table = trace.table("loss")
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in np.flatnonzero(table["count"] > 0).tolist():
        entry = found.setdefault(int(table["process"][row]), {}).setdefault(
            str(table["what"][row]), {"count": 0, "stages": []}
        )
        entry["count"] += int(table["count"][row])
        stage = str(table["stage"][row])
        if stage not in entry["stages"]:
            entry["stages"].append(stage)
    return found
