"""A story as Markdown for the body of an issue: all that a trace says stands in fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from analysis.story import Story
from replay.words import counted

#: Characters of a body; GitHub takes 65,536.
LIMIT = 60_000
#: Characters of one block that can be left out.
_BLOCK = 12_000


def report_markdown(story: Story) -> str:
    """``story`` as Markdown, at most :data:`LIMIT` characters: what does not fit is left out from the end, and said."""
    head = [f"### {_inline(f'{story.verdict.upper()}: {story.headline}')}", fenced(story.block)]
    repeat = "\n".join(line for line, _ in story.repeat)
    tail = ["#### How to repeat", fenced(repeat), f"<sub>kv-replay {_inline(story.version)}</sub>"]
    body = list(head)
    room = LIMIT - sum(len(part) + 2 for part in [*head, *tail]) - 200
    gone = []
    for title, text in _details(story):
        part = f"<details><summary>{_inline(title)}</summary>\n\n{fenced(_cut(text))}\n\n</details>"
        if len(part) + 2 > room:
            gone.append(title)
            continue
        room -= len(part) + 2
        body.append(part)
    if gone:
        body.append(f"Left out for length: {_inline(', '.join(gone))}."[:180])
    return "\n\n".join([*body, *tail]) + "\n"


def _details(story: Story) -> Iterable[tuple[str, str]]:
    rungs = [f"{rung.stage:<12} {rung.state:<13} {rung.said}".rstrip() for rung in story.rungs]
    yield "The ladder", "\n".join(rungs)
    for kind in story.kinds:
        lines = []
        for one in kind.shown:
            lines += [one.request, one.where, *(f"- {reason}" for reason in one.reasons), ""]
        lines += [f"and {counted(kind.more, 'more request')}"] if kind.more else []
        yield f"Evidence: {kind.title}", "\n".join(lines).rstrip()
    if story.not_judged or story.hazards:
        lines = [f"not judged: {text}" for text in story.not_judged]
        yield "Not judged, and hazards", "\n".join([*lines, *(f"hazard: {text}" for text in story.hazards)])
    for title, text in story.timelines:
        yield f"Timeline: {title}", text
    facts = [f"scope     {story.scope}", f"coverage  {story.coverage}", f"losses    {story.losses or 'none'}"]
    yield "Scope, coverage, losses", "\n".join(facts)
    lines = []
    for process in story.processes:
        lines += [process.name, *(f"  {label:<10} {text}" for label, text in process.facts)]
    yield "Environment", "\n".join(lines)


def fenced(text: str) -> str:
    """``text`` in a fenced block whose fence does not occur in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _cut(text: str) -> str:
    return text if len(text) <= _BLOCK else text[:_BLOCK].rpartition("\n")[0] + "\n... cut for length"


def _inline(text: str) -> str:
    """``text`` where Markdown counts: no character of it means anything."""
    plain = re.sub(r"([\\`*_\[\]#|~@$])", r"\\\1", " ".join(text.split()))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
