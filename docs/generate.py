"""Writes what the documents take from the code: ``make docs``, or ``.venv/bin/python docs/generate.py``.

* ``options.md`` and ``commands.md``, and the tables between ``made by`` and ``end`` in other pages.
* What is printed in every ``console`` block: a line with ``$`` in front, and lines with ``>`` right behind it, are a
  command; the rest is what it prints. The blocks of a page share a folder that holds ``tour.h5``. A command that ends
  with a code other than 0 has to show it: ``echo $?`` follows.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from replay import cli
from replay.classify import registry
from replay.classify.base import VOCABULARY
from replay.commands.env import markdown_table
from replay.kinds import LINES, page_name

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOUR = ROOT / "notebooks/tour.h5"
#: The fence (longer than any in what is printed), and what is between two of them.
CONSOLE = re.compile(r"^(`{3,})console\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)", re.MULTILINE)
#: Stands in front of what each command of a block prints.
MARK = "\x1e"


def claims(text: str) -> str:
    """``verdicts.md`` with the table of kinds and claims."""
    return _between(text, "from the classifiers' declarations", registry.markdown())


def kinds(text: str) -> str:
    """``kinds.md`` with the list of kinds."""
    rows = [
        f"| [{code} {name}](kinds/{page_name(code)}) | {' or '.join(stages)} | {LINES[code]} |"
        for code, (name, stages) in VOCABULARY.items()
    ]
    return _between(
        text, "from the list of kinds", "\n".join(["| kind | stage | in one line |", "|---|---|---|", *rows])
    )


def notebooks(text: str) -> str:
    """``notebooks.md`` with the list of notebooks: the title and the first sentence of each."""
    lines = []
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        cell = re.match(r"# %% \[markdown\]\n# # (.*)\n#\n((?:# .*\n)+)", path.read_text())
        if cell:
            told = " ".join(line[2:] for line in cell[2].splitlines())
            first = re.split(r"(?<=[.?]) (?=[A-Z])", told)[0]
            shown = path.with_suffix(".ipynb")
            output = f" ([with its output](../notebooks/{shown.name}))" if shown.exists() else ""
            lines.append(f"- [{cell[1]}](../notebooks/{path.name}){output}: {first}")
    return _between(text, "from the notebooks", "\n".join(lines))


def commands(_: str) -> str:
    """``commands.md``: what ``--help`` prints, of every command."""
    lines = [
        "# Commands",
        "",
        "What `--help` prints, command by command. How they treat files, output and your shell:",
        "[command-line.md](command-line.md). This page is made by `make docs`.",
    ]
    group = click.Context(cli.cli, info_name="replay", terminal_width=78)  # of 80 columns
    group.help_option_names = ["-h", "--help"]
    lines += ["", "## replay", "", "```text", cli.cli.get_help(group), "```"]
    for name in cli.available():
        command = cli.cli.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group)
        lines += ["", f"## replay {name}", "", "```text", command.get_help(context), "```"]
    return "\n".join(lines) + "\n"


#: Pages of which all or one table comes from code: name -> the page's text, from its text.
MADE: dict[str, Callable[[str], str]] = {
    "commands.md": commands,
    "kinds.md": kinds,
    "notebooks.md": notebooks,
    "options.md": lambda _: markdown_table(),
    "verdicts.md": claims,
}


def _between(text: str, source: str, table: str) -> str:
    """``text`` with ``table`` between the marks that name ``source``."""
    begin, end = f"<!-- made by `make docs` {source} -->", "<!-- end -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    found, count = re.subn(
        pattern, lambda _: f"{begin}\n\n{table.strip()}\n\n{end}", text, count=1, flags=re.DOTALL
    )
    if not count:
        raise ValueError(f"there is no '{begin}' ... '{end}' in the page")
    return found


def made() -> dict[Path, str]:
    """Page -> its text as it should be, of the pages in ``MADE``; runs no command."""
    paths = {DOCS / name: rewrite for name, rewrite in MADE.items()}
    return {path: rewrite(path.read_text() if path.exists() else "") for path, rewrite in paths.items()}


def pages_with_output() -> list[Path]:
    """The pages that show what commands print."""
    return [path for path in sorted(DOCS.rglob("*.md")) if CONSOLE.search(path.read_text())]


def with_output(page: Path) -> str:
    """The text of ``page`` with what the commands in its console blocks print now.

    Raises:
        ValueError: a command ended with a code that the page does not show.
    """
    _find_fonts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        shutil.copy(TOUR, work)
        tool = folder / "replay"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m replay "$@"\n')
        tool.chmod(0o755)
        return CONSOLE.sub(lambda b: f"{b[1]}console\n{_session(page, b[2], work)}{b[1]}", page.read_text())


@cache
def _find_fonts() -> None:
    """Let matplotlib look for fonts before it is in a hurry: where that takes long it says so, on standard error."""
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], capture_output=True, check=True)


def _session(page: Path, block: str, folder: Path) -> str:
    """A block with what its commands print; as it was where nothing differs but the size of a file or a version."""
    shown = COMMAND.findall(block)
    commands = [text.replace("\n> ", "\n") for text in shown]
    # Between two commands nothing may change what $? says.
    script = "".join(
        f"printf '\\036'; (exit $code)\n{command}\ncode=$?; printf '\\036%s' $code\n" for command in commands
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KV_REPLAY_", "PYTHON"))}
    path = (
        f"{folder.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    )
    done = subprocess.run(
        ["bash", "-c", f"code=0\n{script}"],
        cwd=folder,
        env={
            **kept,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    parts = done.stdout.split(MARK)[1:]
    if len(parts) != 2 * len(commands):
        raise ValueError(f"{page.name}: a console block ended early: {done.stdout}")
    text = ""
    for number, command in enumerate(commands):
        printed, code = parts[2 * number], parts[2 * number + 1]
        if code != "0" and commands[number + 1 : number + 2] != ["echo $?"]:
            raise ValueError(
                f"{page.name}: '$ {command}' ended with code {code}; put '$ echo $?' behind it:\n{printed}"
            )
        text += f"$ {shown[number]}\n{printed}"
    return block if _steady(text) == _steady(block) else text


def _steady(text: str) -> str:
    """``text`` without what differs from one machine to the next: sizes of files, versions."""
    text = re.sub(r"(\.\w+) +[\d,]+ bytes", r"\1 N bytes", text)
    return re.sub(r"kv-replay \d+\.\d+\.\d+\S*", "kv-replay VERSION", text)


def _renew(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


def main() -> int:
    """Write every page that differs."""
    for path, text in made().items():
        _renew(path, text)
    for path in pages_with_output():
        _renew(path, with_output(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
