"""The documents: links lead somewhere, and what the README lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay import cli
from replay.classify import registry
from tests.docs_generator import generate

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), ROOT / "replay/trace/SPEC.md"]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).is_file()]

    assert missing == []


def test_the_index_leads_to_every_document() -> None:
    index = (ROOT / "docs/index.md").read_text()
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", index)}

    assert {path for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"} <= linked


def test_the_readme_lists_every_command() -> None:
    text = (ROOT / "README.md").read_text()

    listed = set(re.findall(r"^\| `replay ([a-z]+)", text, re.MULTILINE))
    assert listed == set(cli.available())


def test_the_readme_names_every_exit_code_as_the_help_does(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"])
    shown = re.search(r"Exit codes:(.*?)\.\n", capsys.readouterr().out, re.DOTALL)
    assert shown is not None
    codes = re.findall(r"\b\d+\b", shown.group(1))

    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Exit codes") : text.index("## What a verdict claims")]
    assert re.findall(r"(?:^|· )(\d+) ", section, re.MULTILINE) == codes


def test_the_parts_made_from_code_are_fresh() -> None:
    stale = [path.name for path, text in generate.made().items() if path.read_text() != text]
    assert stale == [], "run 'make docs', or .venv/bin/python docs/generate.py"


def test_every_classifier_of_the_package_is_declared() -> None:
    modules = {
        path.stem for path in (ROOT / "replay/classify").glob("*.py") if "\nKIND = Kind(" in path.read_text()
    }
    declared = {kind.name.replace("-", "_") for kind in registry.NAMED.values()}

    assert len(registry.NAMED) >= len(modules)
    assert modules <= declared
