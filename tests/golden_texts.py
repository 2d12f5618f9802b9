"""Whole texts kept beside the tests: ``pytest --renew-golden`` writes them anew; read the diff before a commit."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(name: str, text: str, renew: bool) -> None:
    """``text`` must be what ``golden/NAME`` holds. Versions, sizes of files and folders are not part of it."""
    text = re.sub(r"kv-replay \d+\.\d+\.\d+\S*", "kv-replay VERSION", text)
    text = re.sub(r"\S*/(\w+\.h5)  [\d,]+ bytes", r"\1  N bytes", text)
    path = FOLDER / name
    if renew:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"there is no {path.name} yet: run pytest with --renew-golden"
    assert text == path.read_text(encoding="utf-8"), f"{path.name} says something else: see --renew-golden"
