"""A damaged file gives the same data, or an error that says where, or `verify` finds it. Never a crash, never a lie."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replay.trace.builder import TraceBuilder
from replay.trace.errors import TraceError
from replay.trace.reader import open_trace
from replay.trace.verify import verify
from tests.unit.trace_samples import everything, pages

ROOT = Path(__file__).parents[2]


def sample(path: Path) -> Path:
    """Few tables, so that a trial is short; every kind of column."""
    with TraceBuilder(path) as builder:
        process = builder.process(role="prefill", engine="test")
        process.buffer(buffer=0)
        process.snapshot(stage="ST", buffer=0, logical=[0, 1], pages=[5, 6], data=pages(2))
        process.send(transfer=1, source=[[1 << 40, 4]], destination=[[1, 4], [2, 8]])
        process.read(room=7, table=[5, 6], logits=np.arange(100), top_k=[3, 2])
    return path


def outcome(path: Path, wanted: dict[str, object]) -> str:
    """What a reader makes of ``path``: "same", "error", "found" by verify, or "LIE"."""
    try:
        with open_trace(path) as trace:
            found = everything(trace)
    except TraceError as error:
        told = str(path) in error.where and verify(path).problems
        return "error" if told else f"NOT-TOLD:{error.where}".replace(" ", "-")
    if found == wanted:
        return "same"
    return "found" if verify(path).problems else "LIE"


def trials(path: Path, how: str, seed: int, count: int) -> None:
    """Damage the file at ``path`` ``count`` times, each time from its whole state. Runs in a process of its own."""
    whole = path.read_bytes()
    with open_trace(path) as trace:
        wanted = everything(trace)
    rng = random.Random(seed)
    counts: dict[str, int] = {}
    for _ in range(count):
        data = bytearray(whole)
        if how == "cut":
            del data[rng.randrange(len(data)) :]
        elif how == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == "burst":
            at = rng.randrange(len(data))
            data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
        elif how == "zeros":
            at = rng.randrange(len(data)) // 512 * 512
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        path.write_bytes(data)
        found = outcome(path, wanted)
        counts[found] = counts.get(found, 0) + 1
        if found == "LIE":
            path.with_suffix(f".lie{seed}").write_bytes(data)
    sys.stdout.write(" ".join(f"{name}={counts[name]}" for name in sorted(counts)))


@pytest.mark.parametrize(("how", "count"), [("cut", 40), ("flip", 60), ("burst", 40), ("zeros", 30)])
def test_damage_is_an_error_or_harmless_or_found(how: str, count: int, tmp_path: Path) -> None:
    path = sample(tmp_path / "t.h5")
    code = (
        "import sys; from pathlib import Path; from tests.property.test_trace_damage import trials; "
        "trials(Path(sys.argv[1]), sys.argv[2], 1, int(sys.argv[3]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), how, str(count)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    # A negative code would be a crash inside the HDF5 library.
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(item.split("=") for item in done.stdout.split())
    assert set(counts) <= {"same", "error", "found"}
    assert "error" in counts
    assert sum(map(int, counts.values())) == count
    if how == "cut":
        assert set(counts) == {"error"}
