from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from replay.classify.base import MODES, VOCABULARY
from replay.classify.registry import NAMED
from replay.cli import run
from replay.kinds import LINES, UnknownKindError, find_kind, page, page_name
from replay.verdict import STAGES

PAGES = Path(__file__).parents[2] / "docs" / "kinds"
SECTIONS = [
    "How it looks",
    "What caused it in public reports",
    "How to confirm",
    "How to rule out",
    "What it is confused with",
]


def test_every_kind_has_its_page_and_no_page_is_left_over() -> None:
    assert {path.name for path in PAGES.glob("*.md")} == {page_name(code) for code in VOCABULARY}


@pytest.mark.parametrize("code", VOCABULARY)
def test_a_page_has_all_parts_and_is_short(code: str) -> None:
    name, stages = VOCABULARY[code]
    lines = page(code).splitlines()
    assert lines[0] == f"# {code} {name}"
    assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS
    assert 30 <= len(lines) <= 60
    assert max(map(len, lines)) <= 140
    opening = page(code).split("## ")[0]
    told = {
        stage for stage in STAGES if re.search(rf"(?<![\w-]){stage}(?![\w-])", opening.split("Stage:")[1])
    }
    assert told == set(stages)


@pytest.mark.parametrize("code", VOCABULARY)
def test_a_page_names_other_kinds_by_their_right_names(code: str) -> None:
    for other, name in re.findall(r"\b(F\d\d) ([a-z]+(?:-[a-z]+)+)", page(code)):
        assert VOCABULARY[other][0] == name
    rows = page(code).split("## What it is confused with")[1]
    rivals = set(re.findall(r"\bF\d\d\b", rows))
    assert rivals <= set(VOCABULARY)
    assert code not in rivals


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("F09", "F09"), ("f9", "F09"), ("09", "F09"), ("completion-early", "F09"), ("Completion Early", "F09"),
        ("LOST_ON_WIRE", "F31"),
    ],
)  # fmt: skip
def test_a_kind_is_found_by_code_and_by_name_in_any_case(name: str, code: str) -> None:
    assert find_kind(name) == code


@pytest.mark.parametrize(
    ("name", "near"),
    [("competion-early", "completion-early"), ("local clears", "local-clear"), ("zzzz", None)],
)
def test_a_typing_error_names_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(UnknownKindError) as caught:
        find_kind(name)
    assert caught.value.near == near


def test_the_command_prints_the_page_and_what_may_be_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "completion", "early"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# F09 completion-early\n")
    for mode in MODES:
        assert f"| `{mode}` | {NAMED['F09'].best[mode]} |" in text
    assert run(["explain", "F09", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["code"], body["named"]) == ("kv-replay/explain/1", "F09", True)
    assert run(["explain", "compltion-early"]) == 2
    assert "Did you mean 'completion-early'?" in capsys.readouterr().err
    assert run(["explain", "F09x"]) == 2
    assert "Did you mean 'F09'?" in capsys.readouterr().err


def test_a_kind_that_is_not_named_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(NAMED, "F09")
    assert run(["explain", "f09"]) == 0
    assert "reported as unclassified at its stage (completion)" in " ".join(capsys.readouterr().out.split())
    assert run(["explain"]) == 0
    assert "F09- completion-early" in capsys.readouterr().out


def test_alone_it_lists_every_kind_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line[:3] for line in lines if re.match(r"F\d\d", line)]
    assert listed == list(VOCABULARY)
    assert max(map(len, lines)) <= 80
    assert set(LINES) == set(VOCABULARY)


def test_the_wheel_carries_the_pages() -> None:
    import tomllib

    project = tomllib.loads((PAGES.parents[1] / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"docs/kinds": "replay/kinds_pages"}
