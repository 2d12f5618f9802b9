"""When, with what and on what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def described(seconds: float) -> dict[str, str]:
    """Date, commit and machine; ``seconds`` is the CPU time of all traces together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": f"Python {platform.python_version()}, {cores} cores ({platform.machine()})",
        "cpu_minutes": f"{seconds / 60:.0f}",
    }


def commit() -> str:
    """The commit of the working tree, with ``+`` where sources differ from it; "unknown" outside of git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout

    try:
        found = git("rev-parse", "--short", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found + ("+" if changed else "")
