"""A verdict as a story from symptom to byte: what a report says, in plain texts that any format can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from analysis.diff import busiest_request
from analysis.diff.ownership import Lane, page_of
from analysis.facts import facts_text, reproduced_text
from analysis.pictures import KINDS, NothingToDrawError, Picture, Wanted, picture, room_text
from analysis.printable import one_line
from analysis.report import Told, headline, told, verdict_text
from analysis.timeline_text import page_entries, page_title, request_entries, timeline_text
from capture_hooks.options import BY_ENV, OPTIONS
from replay.verdict import STAGES, Verdict
from replay.words import counted

if TYPE_CHECKING:
    from replay.trace.reader import ProcessInfo, Trace

#: What each rung of the ladder compares.
COMPARES = {
    "store": "the store, done again from its recorded inputs, with the page after it (ST)",
    "source": "the stored page (ST) with the page as it was sent (SE)",
    "descriptor": "what the descriptors of both sides cover with what they must",
    "wire": "the page as it was sent (SE) with the page at completion (RC)",
    "completion": "the page at completion (RC) with the page a little later (LT)",
    "destination": "the page at completion (RC) with the page as a read saw it (RD)",
    "table": "block table and lengths at the read with the allocator's record",
    "read-kernel": "the recorded logits with the reference's, on the bytes that the read saw",
    "top-k": "the recorded top-k with that of the recorded logits",
}
#: Lines of a timeline from its beginning and from its end; what lies between is counted.
_FIRST, _LAST = 60, 15
#: Requests of one kind that are told in full.
_REQUESTS = 3
_PAGES = 24


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: ``state`` is "finding", "clear", "not judged" or "not in scope"."""

    stage: str
    compares: str
    state: str
    said: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding: the requests that are told in full, and how many more there are."""

    title: str
    shown: tuple[Told, ...]
    more: int
    pages: tuple[tuple[str, ...], ...]  #: the first request's pages, one row of cells each
    more_pages: int


@dataclass(frozen=True, slots=True)
class ProcessTold:
    """One recorded process in words."""

    name: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Story:
    """All that a report says. Every text may hold names from the trace: escape it for the format."""

    verdict: str
    headline: str
    block: str
    rungs: tuple[Rung, ...]
    kinds: tuple[Kind, ...]
    pictures: tuple[Picture, ...]
    timelines: tuple[tuple[str, str], ...]
    not_judged: tuple[str, ...]
    hazards: tuple[str, ...]
    losses: str
    scope: str
    coverage: str
    processes: tuple[ProcessTold, ...]
    repeat: tuple[tuple[str, str], ...]
    version: str
    undrawn: tuple[str, ...]


#: Heads of the table of pages.
PAGE_HEADS = ("logical", "page", "rows: values", "rows: scales", "bytes", "differ", "holds instead")


def tell(trace: Trace, verdict: Verdict, name: str = "trace.h5", request: Lane | None = None) -> Story:
    """The story of ``verdict``.

    Args:
        trace: The trace that was judged.
        verdict: What the judge said.
        name: What the trace is called in the commands that repeat it.
        request: The request in the foreground; by default the first that a finding names.
    """
    chosen = request or busiest_request(trace, verdict)
    drawn, undrawn = _draw(trace, verdict, chosen)
    return Story(
        verdict=verdict.verdict,
        headline=headline(verdict).partition("  ")[2],
        block=verdict_text(verdict),
        rungs=tuple(_rungs(verdict)),
        kinds=tuple(_kind(group) for group in told(verdict)),
        pictures=tuple(drawn),
        timelines=tuple(_timelines(trace, verdict, chosen)),
        not_judged=tuple(dict.fromkeys(one_line(f"{item.what}: {item.why}") for item in verdict.not_judged)),
        hazards=tuple(dict.fromkeys(one_line(f"{item.what} ({item.where})") for item in verdict.hazards)),
        losses=one_line(facts_text(verdict.losses)),
        scope=one_line(facts_text(verdict.scope)),
        coverage=one_line(facts_text(verdict.coverage)),
        processes=tuple(_process(trace, number) for number in range(len(trace.processes))),
        repeat=tuple(_repeat(trace, verdict, one_line(name), chosen)),
        version=_version(),
        undrawn=tuple(undrawn),
    )


def _version() -> str:
    try:
        return metadata.version("kv-replay")
    except metadata.PackageNotFoundError:
        return ""


def _rungs(verdict: Verdict) -> Iterable[Rung]:
    outside = set(verdict.scope.get("not_in_scope", ()))
    for stage in STAGES:
        found = [finding for finding in verdict.findings if finding.stage == stage]
        if found:
            rooms = len({finding.request.room for finding in found})
            kinds = ", ".join(dict.fromkeys(f"{f.kind.replace('-', ' ')} ({f.code})" for f in found))
            said = f"{kinds}: {counted(rooms, 'request')}"
            yield Rung(stage, COMPARES[stage], "finding", one_line(said))
        elif stage in verdict.cleared:
            yield Rung(stage, COMPARES[stage], "clear", reproduced_text(stage, verdict.scope))
        elif stage in outside:
            yield Rung(stage, COMPARES[stage], "not in scope", "the trace holds nothing to judge it by")
        else:
            yield Rung(stage, COMPARES[stage], "not judged", "see below")


def _kind(group: Sequence[Told]) -> Kind:
    first = group[0]
    pages = first.findings[0].pages
    rows = []
    for page in pages[:_PAGES]:
        donor = page.donor
        rows.append(
            (
                str(page.logical),
                str(page.physical),
                _closed(page.value_rows),
                _closed(page.scale_rows),
                ", ".join(f"[{begin},{end})" for begin, end in page.byte_ranges[:4])
                + (" ..." if len(page.byte_ranges) > 4 else ""),
                "" if page.bytes_differing is None else f"{page.bytes_differing:,}",
                ""
                if donor is None
                else f"room {donor.room}, layer {donor.layer}, logical page {donor.logical}",
            )
        )
    return Kind(
        first.title,
        tuple(group[:_REQUESTS]),
        max(0, len(group) - _REQUESTS),
        tuple(rows),
        max(0, len(pages) - _PAGES),
    )


def _closed(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in ranges[:6])
    return shown + (" ..." if len(ranges) > 6 else "")


def _draw(trace: Trace, verdict: Verdict, request: Lane | None) -> tuple[list[Picture], list[str]]:
    """The pictures that the trace can give, and in words why it cannot give the others."""
    drawn, undrawn = [], []
    for kind in KINDS:
        if kind == "ownership" and not verdict.findings:
            continue
        try:
            drawn.append(picture(kind, trace, verdict, Wanted(request)))
        except NothingToDrawError as error:
            undrawn.append(one_line(f"{kind}: {error}"))
    return drawn, undrawn


def _timelines(trace: Trace, verdict: Verdict, request: Lane | None) -> Iterable[tuple[str, str]]:
    if request is None:
        return
    title = room_text(request)
    text = timeline_text(trace, title, request_entries(trace, *request))
    yield f"The request: {title}", _shortened(text)
    mine = [f for f in verdict.findings if (f.request.room, f.request.attempt) == request]
    accused = page_of(trace, mine)
    if accused is not None:
        place = accused[0]
        text = timeline_text(trace, page_title(trace, place), page_entries(trace, place), place_told=True)
        yield f"The {one_line(str(place))}", _shortened(text)


def _shortened(text: str) -> str:
    lines = text.splitlines()
    gone = len(lines) - _FIRST - _LAST
    if gone <= 1:
        return text
    return "\n".join([*lines[:_FIRST], f"  ... {gone:,} lines left out", *lines[-_LAST:]])


def _process(trace: Trace, number: int) -> ProcessTold:
    info = trace.processes[number]
    facts = [
        ("engine", info.engine),
        ("mode", info.mode),
        ("transport", info.transport),
        ("ended", "normally" if info.ended else f"not recorded {info.cut}"),
        ("options", _options(info)),
        ("versions", ", ".join(f"{key} {value}" for key, value in sorted(info.environment.items()))),
        *(("cache", text) for text in _caches(trace, number)),
    ]
    name = f"{info.role} rank {info.rank}"
    return ProcessTold(one_line(name), tuple((label, one_line(str(text))) for label, text in facts if text))


def _options(info: ProcessInfo) -> str:
    """Options that differ from their defaults."""
    defaults: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    changed = []
    for name, value in sorted(info.options.items()):
        default = defaults.get(name)
        if value != (list(default) if isinstance(default, tuple) else default):
            label = f"KV_REPLAY_{name.upper()}"
            changed.append(f"{label if label in BY_ENV else name}={value}")
    return ", ".join(changed)


def _caches(trace: Trace, number: int) -> list[str]:
    table = trace.table("buffer")
    layers: dict[tuple[str, str, int, int, int], list[int]] = {}
    columns = ("name", "format", "pages", "pitch", "item_length")
    for row in range(len(table)):
        if table["process"][row] == number:
            key = tuple(table[name][row] for name in columns)
            layers.setdefault(key, []).append(int(table["layer"][row]))
    return [
        f"{name}: {counted(len(found), 'layer')}, {counted(pages, 'page')}, format {form}, pitch {pitch:,}, "
        f"item length {length:,}"
        for (name, form, pages, pitch, length), found in layers.items()
    ]


def _repeat(trace: Trace, verdict: Verdict, name: str, request: Lane | None) -> Iterable[tuple[str, str]]:
    """Commands that show the same again, and what each shows."""
    yield f"replay {name}", "the verdict again"
    yield f"replay {name} --verbose", "every finding with all of its evidence"
    yield f"replay info {name}", "what was recorded, and first of all what is missing"
    if request is not None:
        room = f"{request[0]}" + (f".{request[1]}" if request[1] else "")
        yield f"replay timeline {name} --request {room}", "all events of this request"
    accused = page_of(trace, verdict.findings)
    if accused is not None:
        place = accused[0]
        yield (
            f"replay timeline {name} --page {one_line(place.name)}/{place.layer}/{place.page} "
            f"--process {place.process}",
            "all events of this page",
        )
        yield f"replay plot {name} --kind bytes -o bytes.png", "the page byte by byte"
