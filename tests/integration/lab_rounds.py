"""What the tests of the lab share: one pair of processes for many rounds, and captures read back."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from capture_hooks.events import Clock
from capture_hooks.journal import JournalReader
from replay.lab.config import LabConfig

#: Capture options of a round in a test; sealing is a matter of its own.
OPTIONS = {"KV_REPLAY_SEAL": "0", "KV_REPLAY_LATER_MS": "30"}


def small(**sizes: Any) -> LabConfig:
    """A load that is over in a second or two, yet has every request at once, aborts and page reuse."""
    usual: dict[str, Any] = {
        "layers": 2,
        "requests": 64,
        "concurrency": 60,
        "tokens": (64, 700),
        "long_tokens": (1100, 1600),
        "long_share": 0.2,
        "new_tokens": (4, 12),
        "prefill_pages": 100,
        "decode_pages": 90,
        "wire_pages_s": 600.0,
        "layer_ms": 0.2,
        "heads": 4,
        "patience_ms": (20.0, 600.0),
        "triton_pages": 0,
    }
    return LabConfig(**{**usual, **sizes})


def with_aborts(load: LabConfig, flags: Path, count: int = 6) -> tuple[LabConfig, set[int]]:
    """The load with its first requests given up while a sender has their first chunk, however slow the machine is; and
    their rooms. ``flags`` is a new folder.
    """
    jobs = list(load.clients())
    rooms = [job.room for job in jobs[:count]]
    for i, room in enumerate(rooms):
        jobs[i] = replace(jobs[i], patience_ms=None, abort_when=f"sender.taken:{room}.0")
    rules = {f"sender.post:{room}.0": f"decode.aborting:{room}" for room in rooms}
    flags.mkdir()
    return replace(load, jobs=tuple(jobs), flags=str(flags), rules=rules), set(rooms)


def journals(folder: Path) -> dict[str, list[Any]]:
    """Events of each role in a capture folder."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.journal")):
        reader = JournalReader(path)
        events = [event for _, event in reader]
        assert reader.process is not None
        found[reader.process.role] = events
    return found


def written(folder: Path) -> None:
    """Wait until what was recorded so far is in the journals: a later proof of life stands behind it."""
    now, end = time.monotonic_ns(), time.monotonic() + 20
    while not all(
        any(isinstance(event, Clock) and event.monotonic_ns > now for _, event in JournalReader(path))
        for path in folder.glob("*.journal")
    ):
        assert time.monotonic() < end, "the journals are not written"
        time.sleep(0.05)


def of(events: list[Any], kind: type[Any]) -> list[Any]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def counts(outcomes: dict[int, str]) -> Counter[str]:
    """How the requests of a round ended."""
    return Counter(outcomes.values())
