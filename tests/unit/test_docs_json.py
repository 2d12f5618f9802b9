"""``docs/other-json.md`` names every field that the commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from replay import cli

ROOT = Path(__file__).parents[2]
TOUR = str(ROOT / "notebooks/tour.h5")
CODE = [path for folder in ("replay", "analysis") for path in (ROOT / folder).rglob("*.py")]


def documented(call: str) -> dict[str, set[str]]:
    """Field -> the fields of its objects, of the row for ``call``; the schema among them."""
    row = re.search(rf"^\| `(\S+)` \| `{re.escape(call)}` \| (.*) \|$", other_json(), re.MULTILINE)
    assert row is not None
    fields = re.findall(r"`([^`]+)`(?: \((`[^)]*)\))?", row[2])
    return {row[1]: set(), **{name: set(re.findall(r"`([^`]+)`", inner)) for name, inner in fields}}


def other_json() -> str:
    return (ROOT / "docs/other-json.md").read_text()


def inner(value: Any) -> set[str]:
    """Fields of the objects in a list."""
    values = value if isinstance(value, list) else []
    return {field for one in values if isinstance(one, dict) for field in one}


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("replay info", ["info", TOUR]),
        ("replay verify", ["verify", TOUR]),
        ("replay timeline", ["timeline", TOUR, "--request", "12"]),
        ("replay geometry", ["geometry", TOUR]),
        ("replay kernels", ["kernels", "--format", "bf16", "--batch", "1", "--rows", "64"]),
        ("replay explain F09", ["explain", "F09"]),
        ("replay explain", ["explain"]),
        ("replay env", ["env"]),
    ],
)
def test_every_field_that_is_printed_is_documented(
    call: str, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)

    told = documented(call)
    assert set(printed) - {"schema"} == set(told) - {printed["schema"]}
    for name, value in printed.items():
        assert not inner(value) or inner(value) == told[name]
        assert not isinstance(value, dict) or told[name] in (set(), set(value))


def test_every_schema_has_a_place_in_the_documents() -> None:
    named = {name for path in CODE for name in re.findall(r'"(kv-replay/[a-z]+/\d+)"', path.read_text())}
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))

    assert {name for name in named if f"`{name}`" not in text} == set()
