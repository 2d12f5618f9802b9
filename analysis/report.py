"""The verdict in words: at most 15 lines of 80 columns, or all of it.

The block answers, in this order: what is wrong and how sure that is, for which request, in which bytes, why, what else
was hit, what is cleared, what could not be judged, and how far the verdict reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.block import LINES, WIDTH, Section, fit, flat, painted, quoted, shrink, wrap
from analysis.facts import cleared_text, facts_text, scope_text
from analysis.finding_text import (
    by_request,
    grouped,
    pages_text,
    places,
    reasons,
    request_text,
    rooms_text,
    title,
    where_text,
)
from analysis.printable import one_line
from replay.verdict import Finding, Verdict


def verdict_text(verdict: Verdict, color: bool = False, verbose: bool = False) -> str:
    """``verdict`` as text for a terminal or an issue.

    Args:
        verdict: What ``replay.judge.judge`` returned.
        color: Whether to use ANSI colours; the caller knows about terminals and ``NO_COLOR``.
        verbose: All findings in full and every piece of evidence, without a limit of lines.

    Returns:
        Lines of at most 80 columns, at most 15 of them unless ``verbose``; no newline at the end.
    """
    groups = grouped(verdict.findings)
    sections = [_headline(verdict, groups)]
    for number, group in enumerate(groups if verbose else groups[:1]):
        if number:
            sections.append(Section(title(group), [""]))
        requests = by_request(group)
        for shown in requests if verbose else requests[:1]:
            sections += _finding(shown, requests, verbose)
    if len(groups) > 1 and not verbose:
        sections.append(Section("also", flat(_also(group) for group in groups[1:]), order=2))
    sections += _remainder(verdict, verbose)
    if not verbose:
        shrink(sections, LINES)
    return "\n".join(painted(sections, verdict.verdict, color))


def headline(verdict: Verdict) -> str:
    """The first line of the report."""
    section = _headline(verdict, grouped(verdict.findings))
    return f"{section.label}  {' '.join(section.lines)}"


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of one request with one kind of finding, in one cache: whole texts, not wrapped."""

    title: str
    request: str
    where: str
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]


def told(verdict: Verdict) -> list[list[Told]]:
    """Everything that a verdict found: the kinds in their order, and the requests of each."""
    return [
        [
            Told(
                title(shown),
                one_line(request_text(shown, [])),
                one_line(where_text(shown, True)),
                tuple(one_line(reason) for reason in reasons(shown, verbose=True)),
                tuple(shown),
            )
            for shown in by_request(group)
        ]
        for group in grouped(verdict.findings)
    ]


def _headline(verdict: Verdict, groups: Sequence[Sequence[Finding]]) -> Section:
    word = verdict.verdict.upper()
    said = {
        "clean": "every judged rung agrees",
        "inconclusive": "bytes differ, and who wrote them is not known"
        if any("bytes differ" in item.what for item in verdict.not_judged)
        else "no difference found, but not all could be judged",
        "divergent": "a difference that no finding describes",
    }[verdict.verdict]
    text = title(groups[0]) if groups else said
    return Section(word, wrap(text, WIDTH - len(word) - 2))


def _finding(shown: Sequence[Finding], requests: Sequence[Sequence[Finding]], verbose: bool) -> list[Section]:
    """Request, place and reason of ``shown``, the findings of one of the ``requests`` with the same kind."""
    others = [] if verbose else [found[0].request.room for found in requests if found is not shown]
    sections = [
        Section("request", fit(request_text(shown, others)), 6),
        Section("where", fit(where_text(shown, verbose)), 5),
    ]
    if verbose:
        for found in shown[1:]:
            if places(found) != places(shown[0]):
                sections[-1].lines += fit(f"layer {found.layer}: {pages_text(found, found.pages)}")
    why = reasons(shown, verbose)
    if why:
        sections.append(Section("why", flat(fit(reason) for reason in why), 3, floor=5))
    return sections


def _also(group: Sequence[Finding]) -> list[str]:
    return fit(f"{title(group)}: {rooms_text([finding.request.room for finding in group])}")


def _remainder(verdict: Verdict, verbose: bool) -> list[Section]:
    """What stands below the findings: cleared, not judged, hazards, scope, and losses."""
    sections = []
    if verdict.cleared:
        cleared = [cleared_text(stage, verdict.scope) for stage in verdict.cleared]
        sections.append(Section("cleared", fit(", ".join(cleared)), 5))
    unclear = {f"{item.what}: {item.why}": item.detail if verbose else "" for item in verdict.not_judged}
    hazards = dict.fromkeys((f"{item.what} ({item.where})" for item in verdict.hazards), "")
    for label, texts, order in (("not judged", unclear, 1), ("hazard", hazards, 0)):
        if texts:
            lines = flat([*fit(text), *quoted(more)] for text, more in texts.items())
            sections.append(Section(label, lines, order, floor=2 if label == "not judged" else 1))
    facts = [("scope", scope_text(verdict.scope, verbose)), ("losses", facts_text(verdict.losses))]
    if verbose:
        facts += [("coverage", facts_text(verdict.coverage)), ("recorded", facts_text(verdict.environment))]
    for label, text in facts:
        if text:
            sections.append(Section(label, fit(text), 4))
    return sections
