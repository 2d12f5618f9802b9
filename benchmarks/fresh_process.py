"""A command in a process of its own, with what it took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def timed(command: list[str], out: Path) -> tuple[float, int, int]:
    """Run ``command`` with its output in ``out``: wall seconds, peak resident bytes, exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with out.open("wb") as stream:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=stream, cwd=out.parent, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
    return wall, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), child.returncode
