"""What the plug-in costs a process of SGLang while ``KV_REPLAY_CAPTURE`` is not set.

Usage: python benchmarks/plugin_off.py [--out FILE]

Starts a fresh interpreter many times, in turn with and without what SGLang does with the entry point (import it and
call it), and compares the times. What of the standard library SGLang has imported by then is imported in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MS = 50.0
ROUNDS = 41

#: Of the standard library, and in every process of SGLang before it looks for plug-ins.
BEFORE = "import importlib.metadata, logging, threading, time, typing\n"
FULL = (
    BEFORE
    + """
a = time.perf_counter()
from capture_hooks.adapters.sglang import register
register()
print((time.perf_counter() - a) * 1e3)
"""
)
MODULES = (
    BEFORE
    + """
import sys
before = set(sys.modules)
from capture_hooks.adapters.sglang import register
register()
print(*sorted(set(sys.modules) - before))
"""
)


def run(code: str, **environ: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KV_REPLAY_")} | {
        "PYTHONPATH": str(ROOT)
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | environ, capture_output=True, text=True, check=True
    )
    return done.stdout


def whole(code: str) -> float:
    """Milliseconds from the start of an interpreter to its end."""
    begin = time.perf_counter()
    run(code)
    return (time.perf_counter() - begin) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    inside = [float(run(FULL)) for _ in range(ROUNDS)]
    pairs = [(whole(BEFORE), whole(FULL)) for _ in range(ROUNDS)]
    difference = [b - a for a, b in pairs]
    loaded = run(MODULES).split()
    rows = {
        "import of the entry point and its call, inside the process": (inside, 2),
        "the whole process with it, less one without": (difference, 1),
    }
    names = ", ".join(f"`{name}`" for name in loaded)
    lines = [
        "# The plug-in while nothing is captured",
        "",
        f"`python benchmarks/plugin_off.py`, {ROUNDS} fresh interpreters each, in turn. Limit: {LIMIT_MS:g} ms.",
        "",
        "| what | median | largest |",
        "|---|---|---|",
        *(
            f"| {what} | {statistics.median(times):.{digits}f} ms | {max(times):.{digits}f} ms |"
            for what, (times, digits) in rows.items()
        ),
        "",
        f"Modules that it imports: {names}.",
        "That no function is wrapped then is held by",
        "`tests/integration/test_sglang_targets.py`. The machine was busy with other work: the medians count.",
        "",
    ]
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines))
    return int(statistics.median(inside) > LIMIT_MS or statistics.median(difference) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
