"""A trace with texts of our own wherever a record holds text: what a report must escape and a bundle must not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.records import Event, schema
from replay.trace import builder
from replay.trace.schema import PROCESS_COLUMNS, TABLES
from tests.scenarios.scene import Job, Scene
from tests.scenarios.test_s2_late_foreign_write import overtaken

Text = Callable[[str], str]

#: Texts that steer the judge: they stay as they are, and records of their own carry the planted ones.
STEERING = {
    "process.role", "process.mode", "hook.covers", "hook.state", "buffer.name", "buffer.format", "buffer.memory",
    "request.phase", "request.mark", "free.reason", "snapshot.stage", "snapshot.moment", "send.operation",
    "transfer_state.state", "order.what", "order.key", "order.end", "loss.what", "clock.moment", "content.format",
    "copy.operation", "copy.unit", "metadata.moment", "trim.stages", "trim.run",
}  # fmt: skip
#: Records of this program's own making, in which no engine can put text.
OWN = {"trim"}


def places() -> set[str]:
    """Every text that a record can hold, as ``table.field``."""
    columns = {"process": PROCESS_COLUMNS, **TABLES}
    return {f"{t}.{c.name}" for t, found in columns.items() if t not in OWN for c in found if c.kind == "str"}


def plant(monkeypatch: pytest.MonkeyPatch, text: Text) -> set[str]:
    """From now on a :class:`TraceBuilder` puts ``text(place)`` into every text; returns the places that it filled."""
    used: set[str] = set()
    build = builder._build

    def planted(event: type[Event], given: dict[str, Any]) -> Event:
        for item in schema(event):
            place = f"{event.TABLE}.{item.name}"
            old = str(given.get(item.name, ""))
            if item.type != "str" or place in STEERING or event.TABLE in OWN:
                continue
            used.add(place)
            if item.name in ("options", "environment"):
                known = json.loads(old or "{}")
                extra = {text(place): "x", "mode": text(place), "numpy": text(place), "device": text(place)}
                given[item.name] = json.dumps(
                    {**known, **extra, "taps": [text(place)], "deep": {"a": text(place)}}
                )
            else:
                given[item.name] = f"{text(place)}{old}"
        return build(event, given)

    monkeypatch.setattr(builder, "_build", planted)
    return used


def planted_scene(folder: Path, monkeypatch: pytest.MonkeyPatch, text: Text) -> tuple[Scene, set[str]]:
    """S2 with texts planted everywhere, and the places where they are."""
    used = plant(monkeypatch, text)
    scene = overtaken(Scene(folder), later="after")
    scene.read(Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15]), logits=True)
    for side in scene.sides:
        p = side.process
        extra: dict[str, Any] = {"begin_ns": 0, "end_ns": 0}

        def odd(table: str, /, _p: Any = p, _extra: dict[str, Any] = extra, **fields: Any) -> None:
            for field, value in fields.items():
                if value is ...:
                    used.add(f"{table}.{field}")
                    fields[field] = text(f"{table}.{field}")
            getattr(_p, table)(**fields, **_extra)

        odd("buffer", buffer=90, name=..., memory=..., format="fp8", pages=1, address=1 << 50)
        odd("hook", name="a", covers=..., state=..., note="b")
        odd("request", room=31, phase=..., mark=..., rid="r")
        odd("free", room=31, pages=[40], reason=...)
        odd(
            "snapshot",
            stage=...,
            moment=...,
            room=31,
            buffer=side.buffer(0),
            pages=[40],
            logical=[0],
            digests=[[1, 2]],
        )
        odd("send", transfer=990, room=31, operation=...)
        odd("transfer_state", state=..., transfer=990)
        odd("order", what=..., key=..., end="tail")
        odd("trigger", reason="r", rid="r", room=31)
        odd("copy", operation=..., unit=...)
        odd("metadata", moment=...)
        odd("clock", moment=..., wall_ns=1_700_000_000_123_456_789)
        odd("loss", stage="queue", what=..., count=1, reason="r")
        odd("mapping", version=1)
    return scene, used
