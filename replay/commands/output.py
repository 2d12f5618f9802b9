"""What the commands share: writing files, JSON, colour and progress."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from replay.writing import WriteError, check_folder, writing

#: Columns of what is printed for people.
WIDTH = 80


def may_color(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user has not set ``NO_COLOR``."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paragraph(text: str, first: str = "", rest: str | None = None) -> str:
    """``text`` in lines of 80 columns, the first behind ``first``, the others behind ``rest``. No word is broken."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_json(body: Any) -> str:
    """``body`` as indented JSON; numpy scalars and arrays and paths become plain values."""
    return json.dumps(body, indent=2, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def check_new(path: Path, force: bool) -> None:
    """Refuse to write over ``path`` unless ``force``, or where no file can be made; before the work is done."""
    if path.is_dir():
        raise WriteError(path, "it is a folder", "Give the name of a file")
    if path.exists() and not force:
        raise click.UsageError(f"'{path}' exists; give --force to write over it.")
    if not path.parent.is_dir():
        raise WriteError(path, f"there is no folder '{path.parent}'", "Make the folder, or choose another")
    check_folder(path.parent, path)


def write_new(path: Path, text: str, force: bool) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    check_new(path, force)
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; the file gets its own name where the block ends well, else it is removed."""
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


#: Columns of a full progress bar.
_BAR = 20


class Progress:
    """One line on standard error that is rewritten; nothing where standard error is not a terminal.

    Call it with what is being done and, where known, how much of how many.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._began = self._drawn = time.monotonic()
        self._shown = False

    def __call__(self, what: str = "", done: int = 0, total: int = 0) -> None:
        """Draw the state, at most ten times a second and not before half a second is over."""
        now = time.monotonic()
        if not self._enabled or now - self._began < 0.5 or now - self._drawn < 0.1:
            return
        self._drawn, self._shown = now, True
        share = ""
        if total:
            filled = _BAR * min(done, total) // total
            share = f" [{'=' * filled:<{_BAR}}] {done:,} of {total:,}"
        click.echo(f"\r\x1b[K{what}{share}", nl=False, err=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)
