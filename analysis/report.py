"""The verdict in words: at most 15 lines of 80 columns, or all of it.

The block answers, in this order: what is wrong and how sure that is, for which request, in which bytes, why, what else
was hit, what is cleared, what could not be judged, and how far the verdict reaches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from analysis.facts import cleared_text, facts_text, scope_text
from analysis.printable import one_line
from replay.verdict import Finding, PageFinding, Verdict
from replay.words import counted, verb

if TYPE_CHECKING:
    from replay.compare import Difference

WIDTH = 80
LINES = 15

#: Column at which the text begins; the label stands before it.
_INDENT = 14
_CUT = " ..."

_COLORS = {"divergent": "1;31", "clean": "1;32", "inconclusive": "1;33"}
_DIM = "2"


def verdict_text(verdict: Verdict, color: bool = False, verbose: bool = False) -> str:
    """``verdict`` as text for a terminal or an issue.

    Args:
        verdict: What ``replay.judge.judge`` returned.
        color: Whether to use ANSI colours; the caller knows about terminals and ``NO_COLOR``.
        verbose: All findings in full and every piece of evidence, without a limit of lines.

    Returns:
        Lines of at most 80 columns, at most 15 of them unless ``verbose``; no newline at the end.
    """
    groups = _grouped(verdict.findings)
    sections = [_headline(verdict, groups)]
    for number, group in enumerate(groups if verbose else groups[:1]):
        if number:
            sections.append(_Section(_title(group), [""]))
        requests = _by_request(group)
        for shown in requests if verbose else requests[:1]:
            sections += _finding(shown, requests, verbose)
    if len(groups) > 1 and not verbose:
        sections.append(_Section("also", _flat(_also(group) for group in groups[1:]), order=2))
    sections += _remainder(verdict, verbose)
    if not verbose:
        _shrink(sections, LINES)
    return "\n".join(_painted(sections, verdict.verdict, color))


@dataclass(slots=True)
class _Section:
    """One labelled paragraph. ``order`` says how early it loses lines when there are too many (0 first)."""

    label: str
    lines: list[str]
    order: int = 9
    floor: int = 1
    cut: bool = False


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind and stage together, in the order in which the kinds were found."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.stage, finding.kind, finding.code), []).append(finding)
    return list(groups.values())


def _by_request(group: Sequence[Finding]) -> list[list[Finding]]:
    """The findings of each request in one buffer, in order: one for each layer."""
    found: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in group:
        request = finding.request
        key = (request.room, request.attempt, finding.role, finding.rank, finding.buffer)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def _name(finding: Finding) -> str:
    kind = finding.kind.replace("-", " ")
    return kind if finding.code == "unclassified" else f"{kind} ({finding.code})"


def _title(group: Sequence[Finding]) -> str:
    first = group[0]
    return one_line(f"{first.stage}: {_name(first)}, {first.confidence}")


def headline(verdict: Verdict) -> str:
    """The first line of the report."""
    section = _headline(verdict, _grouped(verdict.findings))
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
                _title(shown),
                one_line(_request_text(shown, [])),
                one_line(_where_text(shown, True)),
                tuple(one_line(reason) for reason in _reasons(shown, verbose=True)),
                tuple(shown),
            )
            for shown in _by_request(group)
        ]
        for group in _grouped(verdict.findings)
    ]


def _headline(verdict: Verdict, groups: Sequence[Sequence[Finding]]) -> _Section:
    word = verdict.verdict.upper()
    said = {
        "clean": "every judged rung agrees",
        "inconclusive": "bytes differ, and who wrote them is not known"
        if any("bytes differ" in item.what for item in verdict.not_judged)
        else "no difference found, but not all could be judged",
        "divergent": "a difference that no finding describes",
    }[verdict.verdict]
    text = _title(groups[0]) if groups else said
    return _Section(word, _wrap(text, WIDTH - len(word) - 2))


def _finding(
    shown: Sequence[Finding], requests: Sequence[Sequence[Finding]], verbose: bool
) -> list[_Section]:
    """Request, place and reason of ``shown``, the findings of one of the ``requests`` with the same kind."""
    others = [] if verbose else [found[0].request.room for found in requests if found is not shown]
    sections = [
        _Section("request", _fit(_request_text(shown, others)), 6),
        _Section("where", _fit(_where_text(shown, verbose)), 5),
    ]
    if verbose:
        for found in shown[1:]:
            if _places(found) != _places(shown[0]):
                sections[-1].lines += _fit(f"layer {found.layer}: {_pages_text(found, found.pages)}")
    why = _reasons(shown, verbose)
    if why:
        sections.append(_Section("why", _flat(_fit(reason) for reason in why), 3, floor=5))
    return sections


def _request_text(shown: Sequence[Finding], others: Sequence[int]) -> str:
    first = shown[0]
    room = f"room {first.request.room}"
    if first.request.attempt > 0:
        room += f" attempt {first.request.attempt}"
    layers = sorted({finding.layer for finding in shown})
    which = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers ({_ranges(layers)})"
    text = f"{room} ({first.role} rank {first.rank}), {first.buffer}, {which}"
    if first.request.aliases:
        text += f"; pages shared with {_rooms(first.request.aliases)}"
    if others:
        text += f"; and {_rooms(others)}" if len(others) <= 3 else f"; and {len(others):,} more requests"
    return text


def _where_text(shown: Sequence[Finding], verbose: bool) -> str:
    first = shown[0]
    if all(_places(finding) == _places(first) for finding in shown):
        return _pages_text(first, [page for finding in shown for page in finding.pages])
    other = "" if verbose else "; not the same in every layer, see -v"
    return f"layer {first.layer}: {_pages_text(first, first.pages)}{other}"


def _pages_text(finding: Finding, counted: Sequence[PageFinding]) -> str:
    """Pages, rows and bytes of one finding; ``counted`` are the pages whose differing bytes are told."""
    pages = finding.pages
    if not pages:
        return f"the whole request, {finding.role} side"
    logical, physical = [page.logical for page in pages], [page.physical for page in pages]
    text = f"logical {_noun(logical)} {_run(logical)} = {finding.role} {_noun(physical)} {_run(physical)}"
    alike = [list(found) for _, found in groupby(pages, key=_extent)]
    if len(alike) == 1:
        return ", ".join([text, *extent_text(pages[0]), *count_text(counted)])
    parts = [text]
    for found in alike[:3]:
        named = [page.logical for page in found]
        said = ", ".join([*extent_text(found[0]), *count_text(found)])
        parts.append(f"{_noun(named)} {_run(named)}: {said}")
    if len(alike) > 3:
        parts.append("and others, see -v")
    return "; ".join(parts)


def _noun(ids: Sequence[int]) -> str:
    return "page" if len(ids) == 1 else "pages"


def _extent(page: PageFinding) -> tuple[Any, ...]:
    return page.value_rows, page.scale_rows, page.byte_ranges


def _places(finding: Finding) -> list[tuple[Any, ...]]:
    return [(page.logical, page.physical, *_extent(page)) for page in finding.pages]


def extent_text(page: PageFinding | Difference) -> list[str]:
    """Rows and bytes of ``page`` that differ."""
    parts = []
    if page.value_rows and page.value_rows == page.scale_rows:
        parts.append(_rows(page.value_rows))
    else:
        if page.value_rows:
            parts.append(f"values of {_rows(page.value_rows)}")
        if page.scale_rows:
            parts.append(f"scales of {_rows(page.scale_rows)}")
    if page.byte_ranges:
        parts.append("bytes " + ", ".join(f"[{begin},{end})" for begin, end in page.byte_ranges[:4]))
        if len(page.byte_ranges) > 4:
            parts[-1] += f" and {len(page.byte_ranges) - 4} more ranges"
    return parts


def count_text(pages: Sequence[PageFinding | Difference]) -> list[str]:
    """How many bytes differ in each of ``pages``; nothing where the bytes were not kept."""
    counts = [page.bytes_differing for page in pages if page.bytes_differing is not None]
    if not counts:
        return []
    low, high = min(counts), max(counts)
    each = " in each" if len(pages) > 1 else ""
    return [
        f"{counted(low, 'byte')} {verb(low, 'differs', 'differ')}{each}"
        if low == high
        else f"{low:,} to {high:,} bytes differ{each}"
    ]


def _reasons(shown: Sequence[Finding], verbose: bool) -> list[str]:
    first = shown[0]
    reasons = [first.rule] if first.rule else []
    reasons += _donors(first)
    reasons += first.evidence
    if first.runner_up is not None:
        reasons.append(f"not {first.runner_up.code}: {first.runner_up.ruled_out_by}")
    if verbose:
        known = set(reasons)
        for finding in shown[1:]:
            fresh = [text for text in finding.evidence if text not in known]
            known.update(fresh)
            reasons += [f"layer {finding.layer}: {text}" for text in fresh]
        return reasons
    # One paragraph: short pieces of evidence share lines.
    return [" ".join(_sentence(reason) for reason in reasons)] if reasons else []


def _donors(finding: Finding) -> list[str]:
    """Where foreign bytes came from, said once for a run of pages."""
    named = [page for page in finding.pages if page.donor is not None]
    sources = {(page.donor.room, page.donor.layer) for page in named if page.donor is not None}
    if not named or len(sources) > 1:
        return [
            f"page {page.logical} holds room {page.donor.room}'s page {page.donor.logical} of layer {page.donor.layer}"
            for page in named[:4]
            if page.donor is not None
        ]
    room, layer = next(iter(sources))
    logical = [page.donor.logical for page in named if page.donor is not None]
    noun = "page" if len(logical) == 1 else "pages"
    whose = "its own" if room == finding.request.room else f"room {room}'s"
    where = "" if layer == finding.layer else f" of layer {layer}"
    return [f"{'it holds' if len(logical) == 1 else 'they hold'} {whose} {noun} {_run(logical)}{where}"]


def _also(group: Sequence[Finding]) -> list[str]:
    return _fit(f"{_title(group)}: {_rooms([finding.request.room for finding in group])}")


def _remainder(verdict: Verdict, verbose: bool) -> list[_Section]:
    """What stands below the findings: cleared, not judged, hazards, scope, and losses."""
    sections = []
    if verdict.cleared:
        cleared = [cleared_text(stage, verdict.scope) for stage in verdict.cleared]
        sections.append(_Section("cleared", _fit(", ".join(cleared)), 5))
    unclear = {f"{item.what}: {item.why}": item.detail if verbose else "" for item in verdict.not_judged}
    hazards = dict.fromkeys((f"{item.what} ({item.where})" for item in verdict.hazards), "")
    for label, texts, order in (("not judged", unclear, 1), ("hazard", hazards, 0)):
        if texts:
            lines = _flat([*_fit(text), *_quoted(more)] for text, more in texts.items())
            sections.append(_Section(label, lines, order, floor=2 if label == "not judged" else 1))
    facts = [("scope", scope_text(verdict.scope, verbose)), ("losses", facts_text(verdict.losses))]
    if verbose:
        facts += [("coverage", facts_text(verdict.coverage)), ("recorded", facts_text(verdict.environment))]
    for label, text in facts:
        if text:
            sections.append(_Section(label, _fit(text), 4))
    return sections


def _rooms(rooms: Sequence[int]) -> str:
    rooms = list(dict.fromkeys(rooms))
    if len(rooms) == 1:
        return f"room {rooms[0]}"
    if len(rooms) <= 6:
        return f"rooms {', '.join(map(str, rooms))}"
    return f"{len(rooms):,} requests, rooms {', '.join(map(str, rooms[:4]))} and more"


def _run(ids: Sequence[int]) -> str:
    """Ids in their given order: ``2..3`` for a run upwards, else a list that is cut after six."""
    if len(ids) > 1 and all(after == before + 1 for before, after in pairwise(ids)):
        return f"{ids[0]}..{ids[-1]}"
    shown = ", ".join(map(str, ids[:6]))
    return shown if len(ids) <= 6 else f"{shown} and {len(ids) - 6} more"


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers with runs joined: ``0..3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs[:5])
    return shown if len(runs) <= 5 else f"{shown} and more"


def _rows(ranges: Sequence[tuple[int, int]]) -> str:
    """Closed row ranges, cut after four."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"row {ranges[0][0]}"
    shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in ranges[:4])
    return f"rows {shown}" + (f" and {len(ranges) - 4} more" if len(ranges) > 4 else "")


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(one_line(text), width, break_on_hyphens=False) or [""]


def _fit(text: str) -> list[str]:
    return _wrap(text, WIDTH - _INDENT)


def _quoted(text: str) -> list[str]:
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


def _flat(groups: Iterable[list[str]]) -> list[str]:
    return [line for lines in groups for line in lines]


def _shrink(sections: list[_Section], limit: int) -> None:
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


def _painted(sections: Iterable[_Section], verdict: str, color: bool) -> Iterable[str]:
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
