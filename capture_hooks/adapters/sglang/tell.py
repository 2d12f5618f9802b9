"""Lines for people."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line on standard error."""
    try:
        sys.stderr.write(f"kv-replay: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
