"""``replay explain``: what a kind of fault is, how it looks, and what may be claimed of it."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import click

from replay.commands.output import WIDTH, paragraph, to_json

if TYPE_CHECKING:
    from replay.classify.base import Kind

SCHEMA = "kv-replay/explain/1"


@click.command()
@click.argument("kind", metavar="[CODE|KIND]", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON alone.")
def command(kind: tuple[str, ...], as_json: bool) -> None:
    """Explain a kind of fault, by its code (F09) or by its name (completion-early); without one, list them all.

    The page says what it is, how it looks, what caused it in public reports, and how to confirm and to rule it out.
    What may be claimed in each capture mode comes from the code that looks for it.
    """
    from replay.classify.base import VOCABULARY
    from replay.classify.registry import NAMED
    from replay.kinds import LINES, UnknownKindError, find_kind, page

    if not kind:
        if as_json:
            kinds = [_json(code, NAMED.get(code)) | {"summary": LINES[code]} for code in VOCABULARY]
            click.echo(to_json({"schema": SCHEMA, "kinds": kinds}))
        else:
            click.echo(_listing())
        return
    try:
        code = find_kind(" ".join(kind))
    except UnknownKindError as error:
        near = error.near or ""
        near = near.upper() if near.upper() in VOCABULARY else near
        hint = f"Did you mean '{near}'?" if near else "'replay explain' lists them."
        raise click.UsageError(f"'{error.name}' is no kind of fault. {hint}") from error
    if as_json:
        click.echo(to_json({"schema": SCHEMA, **_json(code, NAMED.get(code)), "page": page(code)}))
        return
    click.echo(_narrow(page(code)) + "\n\n" + _claims(code, NAMED.get(code)))


_ITEM = re.compile(r"(- |\d+\. )")


def _narrow(page: str) -> str:
    """A page's Markdown in lines of 80 columns; a table of two columns becomes a list."""
    lines: list[str] = []
    for block in page.strip().split("\n\n"):
        if block.startswith("|"):
            rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in block.splitlines()[2:]]
            lines += [paragraph(": ".join(row), "- ", "  ") for row in rows]
        elif _ITEM.match(block):
            for item in re.split(r"\n(?=- |\d+\. )", block):
                mark = _ITEM.match(item)
                assert mark is not None
                lines.append(paragraph(" ".join(item[mark.end() :].split()), mark[0], " " * len(mark[0])))
        else:
            lines.append(paragraph(block))
        lines.append("")
    return "\n".join(lines[:-1])


def _listing() -> str:
    """One line a kind."""
    from replay.classify.base import VOCABULARY
    from replay.classify.registry import NAMED
    from replay.kinds import LINES

    wide = max(len(name) for name, _ in VOCABULARY.values())
    lines = []
    for code, (name, _) in VOCABULARY.items():
        mark = " " if code in NAMED else "-"
        lines.append(f"{code}{mark} {name:{wide}}  {LINES[code]}")
    if len(NAMED) < len(VOCABULARY):
        lines += ["", "- not named by this version: reported as unclassified at its stage"]
    return "\n".join(lines)


def _claims(code: str, kind: Kind | None) -> str:
    """What may be claimed: the table kind x mode -> best claim, as the classifier declares it."""
    from replay.classify.base import MODES, VOCABULARY

    lines = ["## What may be claimed", ""]
    if kind is None:
        stages = " or ".join(VOCABULARY[code][1])
        lines += textwrap.wrap(
            f"Not named by this version: reported as unclassified at its stage ({stages}), with the bytes.",
            WIDTH,
        )
        return "\n".join(lines)
    lines += ["| mode | best claim |", "|---|---|"]
    lines += [f"| `{mode}` | {kind.best[mode] or 'not named'} |" for mode in MODES]
    for label, text in (("Named where", kind.shows), ("`certain` also asks for", kind.certain)):
        lines += ["", *textwrap.wrap(f"{label}: {text}.", WIDTH, break_on_hyphens=False)]
    if kind.rivals:
        lines.append("")
        for other, what in kind.rivals:
            name = VOCABULARY[other][0] if other in VOCABULARY else ""
            text = f"- {other} {name}: {what}".replace("  ", " ")
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _json(code: str, kind: Kind | None) -> dict[str, Any]:
    from replay.classify.base import MODES, VOCABULARY

    name, stages = VOCABULARY[code]
    found: dict[str, Any] = {"code": code, "kind": name, "stages": stages, "named": kind is not None}
    if kind is not None:
        found |= {
            "shows": kind.shows,
            "certain": kind.certain,
            "best": {mode: kind.best[mode] for mode in MODES},
            "rivals": [{"code": other, "told_apart_by": what} for other, what in kind.rivals],
        }
    return found
