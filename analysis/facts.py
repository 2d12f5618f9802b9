"""The open mappings of a verdict (scope, losses, coverage, environment) in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay.words import counted

#: The ladder's stages whose counts stand in the scope, and under which name.
_COUNTED = {"store": "stores", "read-kernel": "reads"}


def cleared_text(stage: str, scope: Mapping[str, Any]) -> str:
    """A cleared stage, with the rows that were done again where the scope counts them."""
    rows = reproduced_text(stage, scope)
    return f"{stage} ({rows})" if rows else stage


def reproduced_text(stage: str, scope: Mapping[str, Any]) -> str:
    """How many rows of a stage were done again and came out the same; empty where the scope counts none."""
    counts = scope.get(_COUNTED.get(stage, ""))
    if not isinstance(counts, Mapping) or not counts.get("rows"):
        return ""
    rows, reproduced = counts["rows"], counts.get("rows_reproduced", 0)
    return (
        f"{'all ' if rows > 1 else ''}{counted(rows, 'row')} reproduced"
        if reproduced == rows
        else f"{reproduced:,} of {counted(rows, 'row')}"
    )


def scope_text(scope: Mapping[str, Any], verbose: bool) -> str:
    """How far the verdict reaches: one sentence of counts, or everything when ``verbose``."""
    if verbose or "requests" not in scope:
        return facts_text(scope)
    parts = [_counted(scope["requests"], "request")]
    rooms = list(scope.get("rooms", []))
    if len(rooms) == 2:
        parts[0] += f" (room {rooms[0]})" if rooms[0] == rooms[1] else f" (rooms {rooms[0]}..{rooms[1]})"
    for key, noun in (("layers", "layer"), ("pages", "page")):
        if key in scope:
            parts.append(_counted(scope[key], noun))
    text = [", ".join(parts)]
    if scope.get("cut_to"):
        text[0] = f"cut down to {facts_text(scope['cut_to'])}: {text[0]}"
    for key, noun in (("read_snapshots", "page"), ("tables", "block table")):
        if scope.get(key):
            seen = " seen at reads" if key == "read_snapshots" else ""
            text.append(f"{_counted(scope[key], noun)}{seen}")
    for key in ("stores", "reads"):
        done = scope.get(key)
        if isinstance(done, Mapping) and done.get("judged"):
            text.append(f"{_counted(done['judged'], key[:-1])} done again")
    if scope.get("not_in_scope"):
        text.append(f"not in scope: {', '.join(scope['not_in_scope'])}")
    triton = scope.get("triton")
    if isinstance(triton, Mapping):
        text.append(f"in Triton ({facts_text(triton)})")
    known = {"requests", "rooms", "layers", "pages", "read_snapshots", "tables", "stores", "reads", "triton"}
    known |= {"not_in_scope", "cut_to"}
    known |= {"pages_seen", "overshoot"}  # only with -v
    rest = facts_text({key: value for key, value in scope.items() if key not in known})
    return "; ".join([*text, rest] if rest else text)


def _counted(count: Any, noun: str) -> str:
    return counted(count, noun) if isinstance(count, int) else f"{count} {noun}s"


def facts_text(facts: Mapping[str, Any]) -> str:
    """Any mapping in words; what is empty, zero, false or unknown is left out."""
    texts = (_fact(str(key).replace("_", " "), value) for key, value in facts.items())
    return "; ".join(text for text in texts if text)


def _fact(name: str, value: Any) -> str:
    if not value:
        return ""
    if value is True:
        return name
    if isinstance(value, Mapping):
        inner = ", ".join(
            filter(None, (_fact(str(key).replace("_", " "), item) for key, item in value.items()))
        )
        return f"{name} ({inner})" if inner else ""
    if isinstance(value, (list, tuple)):
        return f"{name} {', '.join(map(str, value))}"
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
