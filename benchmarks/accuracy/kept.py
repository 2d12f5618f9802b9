"""Outcomes that are kept as they come, so that a measurement which was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy.measure import Outcome, Task

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("benchmarks/accuracy", "capture_hooks", "replay")


class OtherCodeError(ValueError):
    """The outcomes were made by other code than this."""


def code_digest() -> str:
    """What the outcomes follow from, besides their tasks: every Python source of the generator and the judge."""
    found = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


class Kept:
    """A file with one outcome a line, under a line that says which code made them."""

    def __init__(self, path: Path, code: str = "") -> None:
        """Raises :class:`OtherCodeError` where the file is no such file, or one of another state of the code."""
        self.path = path
        self.outcomes: dict[Task, Outcome] = {}
        head = json.dumps({"code": code or code_digest()})
        text = path.read_text() if path.exists() else ""
        first, _, rest = text.partition("\n")
        if text and first != head:
            raise OtherCodeError(
                f"{path} has outcomes of other code than this; remove it, or name another file"
            )
        if not text:
            path.write_text(head + "\n")
        whole = 0
        for line in rest.splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # cut in the middle; it is measured again
            fields = json.loads(line)
            outcome = Outcome(Task(**fields.pop("task")), **fields)
            self.outcomes[outcome.task] = outcome
            whole += len(line.encode())
        if rest:
            with path.open("rb+") as file:
                file.truncate(len(first.encode()) + 1 + whole)

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
