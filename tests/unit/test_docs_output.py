"""What documents show of commands is what these print now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_generator import generate


@pytest.mark.parametrize("page", generate.pages_with_output(), ids=lambda page: page.stem)
def test_printed_output_is_fresh(page: Path) -> None:
    shown, printed = page.read_text(), generate.with_output(page)

    assert shown == printed, "run 'make docs', or .venv/bin/python docs/generate.py"


def page_with(folder: Path, *lines: str) -> Path:
    page = folder / "page.md"
    page.write_text("\n".join(["before", "", "```console", *lines, "```", "", "after", ""]))
    return page


def test_old_output_is_replaced_and_the_rest_of_the_page_is_not(tmp_path: Path) -> None:
    page = page_with(tmp_path, "$ echo new", "old", "$ ls", "$ cd / && pwd")

    assert generate.with_output(page) == page_with(
        tmp_path, "$ echo new", "new", "$ ls", "tour.h5", "$ cd / && pwd", "/"
    ).read_text()  # fmt: skip


def test_an_exit_code_has_to_be_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md: '\$ replay none' ended with code 2"):
        generate.with_output(page_with(tmp_path, "$ replay none"))

    shown = generate.with_output(page_with(tmp_path, "$ (exit 3)", "$ echo $?"))
    assert "$ (exit 3)\n$ echo $?\n3\n" in shown


def test_other_sizes_of_files_are_no_reason_to_renew_a_page(tmp_path: Path) -> None:
    lines = ("$ echo 'a.h5   1,000 bytes, b 2 bytes'", "a.h5  90 bytes, b 2 bytes")
    page = page_with(tmp_path, *lines)
    assert generate.with_output(page) == page.read_text()

    page = page_with(tmp_path, *lines[:1], "a.h5  90 bytes, b 3 bytes")
    assert "a.h5   1,000 bytes, b 2 bytes\n```" in generate.with_output(page)
