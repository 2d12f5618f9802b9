"""A block of labelled paragraphs: wrapped at 80 columns, shortened to a number of lines, painted for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from analysis.printable import one_line

WIDTH = 80
LINES = 15

#: Column at which the text begins; the label stands before it.
_INDENT = 14
_CUT = " ..."

_COLORS = {"divergent": "1;31", "clean": "1;32", "inconclusive": "1;33"}
_DIM = "2"


@dataclass(slots=True)
class Section:
    """One labelled paragraph. ``order`` says how early it loses lines when there are too many (0 first)."""

    label: str
    lines: list[str]
    order: int = 9
    floor: int = 1
    cut: bool = False


def wrap(text: str, width: int) -> list[str]:
    """``text`` in lines of ``width`` columns, one at least."""
    return textwrap.wrap(one_line(text), width, break_on_hyphens=False) or [""]


def fit(text: str) -> list[str]:
    """The lines of ``text`` behind a label."""
    return wrap(text, WIDTH - _INDENT)


def quoted(text: str) -> list[str]:
    """The lines of a traceback or an output, indented as they are."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())][:20].replace("\t", "  ")
        lines += textwrap.wrap(
            one_line(line),
            WIDTH - _INDENT,
            initial_indent="  " + indent,
            subsequent_indent="    " + indent,
            break_on_hyphens=False,
        )
    return lines


def flat(groups: Iterable[list[str]]) -> list[str]:
    """All lines of some paragraphs."""
    return [line for lines in groups for line in lines]


def shrink(sections: list[Section], limit: int) -> None:
    """Take lines from the sections that can spare them until ``limit`` lines are left; a cut shows as dots."""
    while sum(len(section.lines) for section in sections) > limit:
        spare = [section for section in sections if len(section.lines) > section.floor]
        if not spare:
            break
        # Within one order the longest loses first, so that no paragraph vanishes beside a long one.
        victim = min(spare, key=lambda section: (section.order, -len(section.lines)))
        victim.lines.pop()
        victim.cut = True
    for section in sections:
        if section.cut:
            line, room = section.lines[-1], WIDTH - _INDENT - len(_CUT)
            if len(line) > room:
                line = line[: room + 1].rpartition(" ")[0] or line[:room]
            section.lines[-1] = line.rstrip(" ,;.") + _CUT


def painted(sections: Iterable[Section], verdict: str, color: bool) -> Iterable[str]:
    """The lines of a block with their labels; the first label is the verdict."""

    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color and text.strip() else text

    for index, section in enumerate(sections):
        for number, line in enumerate(section.lines):
            if index == 0:
                head = paint(_COLORS[verdict], section.label) if number == 0 else " " * len(section.label)
                yield f"{head}  {line}"
            elif line:
                label = f"  {section.label}" if number == 0 else ""
                yield paint(_DIM, label.ljust(_INDENT)) + line
            else:  # a heading between the findings of a verbose report
                yield section.label
