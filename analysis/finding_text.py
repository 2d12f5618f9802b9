"""The words of a finding: its request, pages, rows, bytes and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from analysis.printable import one_line
from replay.verdict import Finding, PageFinding
from replay.words import counted, verb

if TYPE_CHECKING:
    from replay.comparison import Difference


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind and stage together, in the order in which the kinds were found."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.stage, finding.kind, finding.code), []).append(finding)
    return list(groups.values())


def by_request(group: Sequence[Finding]) -> list[list[Finding]]:
    """The findings of each request in one buffer, in order: one for each layer."""
    found: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in group:
        request = finding.request
        key = (request.room, request.attempt, finding.role, finding.rank, finding.buffer)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def title(group: Sequence[Finding]) -> str:
    """Stage, kind and confidence of findings of one kind."""
    first = group[0]
    return one_line(f"{first.stage}: {_name(first)}, {first.confidence}")


def _name(finding: Finding) -> str:
    kind = finding.kind.replace("-", " ")
    return kind if finding.code == "unclassified" else f"{kind} ({finding.code})"


def request_text(shown: Sequence[Finding], others: Sequence[int]) -> str:
    """The request of ``shown``, its cache and layers, and the rooms of ``others`` with the same kind."""
    first = shown[0]
    room = f"room {first.request.room}"
    if first.request.attempt > 0:
        room += f" attempt {first.request.attempt}"
    layers = sorted({finding.layer for finding in shown})
    which = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers ({_ranges(layers)})"
    text = f"{room} ({first.role} rank {first.rank}), {first.buffer}, {which}"
    if first.request.aliases:
        text += f"; pages shared with {rooms_text(first.request.aliases)}"
    if others:
        text += f"; and {rooms_text(others)}" if len(others) <= 3 else f"; and {len(others):,} more requests"
    return text


def where_text(shown: Sequence[Finding], verbose: bool) -> str:
    """Pages, rows and bytes of one request, told once where they are the same in every layer."""
    first = shown[0]
    if all(places(finding) == places(first) for finding in shown):
        return pages_text(first, [page for finding in shown for page in finding.pages])
    other = "" if verbose else "; not the same in every layer, see -v"
    return f"layer {first.layer}: {pages_text(first, first.pages)}{other}"


def pages_text(finding: Finding, differing: Sequence[PageFinding]) -> str:
    """Pages, rows and bytes of one finding; ``differing`` are the pages whose differing bytes are counted."""
    pages = finding.pages
    if not pages:
        return f"the whole request, {finding.role} side"
    logical, physical = [page.logical for page in pages], [page.physical for page in pages]
    text = f"logical {_noun(logical)} {_run(logical)} = {finding.role} {_noun(physical)} {_run(physical)}"
    alike = [list(found) for _, found in groupby(pages, key=_extent)]
    if len(alike) == 1:
        return ", ".join([text, *extent_text(pages[0]), *count_text(differing)])
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


def places(finding: Finding) -> list[tuple[Any, ...]]:
    """What findings of several layers have to agree in to be told as one."""
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


def reasons(shown: Sequence[Finding], verbose: bool) -> list[str]:
    """Rule, donors and evidence: one paragraph, or one for each where ``verbose``."""
    first = shown[0]
    told = [first.rule] if first.rule else []
    told += _donors(first)
    told += first.evidence
    if first.runner_up is not None:
        told.append(f"not {first.runner_up.code}: {first.runner_up.ruled_out_by}")
    if verbose:
        known = set(told)
        for finding in shown[1:]:
            fresh = [text for text in finding.evidence if text not in known]
            known.update(fresh)
            told += [f"layer {finding.layer}: {text}" for text in fresh]
        return told
    # One paragraph: short pieces of evidence share lines.
    return [" ".join(_sentence(reason) for reason in told)] if told else []


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
    whose = "its own" if room == finding.request.room else f"room {room}'s"
    where = "" if layer == finding.layer else f" of layer {layer}"
    return [
        f"{'it holds' if len(logical) == 1 else 'they hold'} {whose} {_noun(logical)} {_run(logical)}{where}"
    ]


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def rooms_text(rooms: Sequence[int]) -> str:
    """Rooms in a few words."""
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
