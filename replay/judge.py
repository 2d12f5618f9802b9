"""From a trace to a verdict: every rung of the ladder, then what may be said about the whole.

    divergent     a finding whose own evidence is whole; losses elsewhere do not cancel it
    clean         every rung within the stated scope was judged, nothing was lost inside it, nothing differs
    inconclusive  anything else

docs/order.md and docs/verdicts.md give the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from capture_hooks.layouts import OPAQUE
from replay.bisect import Case, Ladder, climb
from replay.bookkeeping import judge_bookkeeping
from replay.classify import list_too_short, stride_at_store
from replay.classify.base import Evidence, Explanation
from replay.classify.dispatch import explain_case
from replay.classify.registry import NAMED
from replay.coverage import coverage, taps
from replay.descriptors import DescriptorMap
from replay.donors import Donors
from replay.findings import PageEvidence, group, hazard, page_evidence
from replay.judge_options import JudgeOptions
from replay.reexecute import Rung, replay_reads, replay_stores
from replay.runs import check_one_run
from replay.siblings import Siblings
from replay.tables import TableRung
from replay.timeline import Timeline
from replay.trace.reader import Trace
from replay.verdict import STAGES, Finding, Hazard, NotJudged, Verdict
from replay.words import counted

Progress = Callable[[str, int, int], None]

#: Snapshot -> the stages that cannot be judged without it.
_LOOKS = {
    "ST": ("source",),
    "SE": ("source", "descriptor", "wire", "completion"),
    "RC": ("descriptor", "wire", "completion", "destination"),
}
#: The tap that takes each look (``KV_REPLAY_TAPS``).
TAP_OF_LOOK = {"ST": "store", "SE": "send", "RC": "receive"}


def judge(trace: Trace, options: JudgeOptions | None = None, progress: Progress | None = None) -> Verdict:
    """Judge a trace.

    Raises:
        TraceError: the trace is damaged, or holds two runs whose rooms cannot be told apart.
    """
    options = options or JudgeOptions()
    check_one_run(trace)
    timeline = Timeline(trace, options.scope)
    scope = timeline.scope
    seen = coverage(trace, scope.apart)
    evidence = Evidence(timeline, DescriptorMap(timeline), seen.complete)
    tell = progress or (lambda what, done, total: None)
    tell("sorting the looks at pages", 0, 0)
    ladder = climb(timeline, progress, evidence.local)
    tell("descriptors", 0, 0)
    evidence.siblings, evidence.donors = Siblings(ladder), Donors(timeline, ladder.cases)
    pages, hazards, doubts = _byte_rungs(ladder, evidence)
    tell("block tables", 0, 0)
    books = judge_bookkeeping(timeline, evidence)
    hazards += books.hazards
    pages += books.pages + stride_at_store.own(timeline, evidence)
    tables = books.tables
    limit = 1 << 30 if options.exhaustive else max(options.sample, 0)
    stores = replay_stores(timeline, evidence, limit, progress)
    reads = replay_reads(timeline, evidence, tables.changed, limit, progress)
    pages += stores.pages + reads.pages + list_too_short.unannounced(timeline, evidence)
    findings, beyond = scope.limit(_sorted(group(timeline, [_claim(page, timeline) for page in pages])))
    extra: dict[str, Any] = {}
    unclear: list[NotJudged] = []
    yours = options.read_kernel or options.store_kernel
    if options.reexecute and (stores.judged or reads.judged or yours):
        from replay import triton_replay  # torch is imported only on this path

        extra, more, unclear = triton_replay.run(timeline, evidence, stores, reads, options, progress)
        findings += scope.limit(more)[0]
    missing = [*doubts.values(), *beyond, *unclear, *seen.not_judged, *_missing(ladder, tables, timeline)]
    judged = frozenset(filter(scope.has_stage, _judged(ladder, tables, stores, reads, evidence)))
    guilty = {finding.stage for finding in findings} | {stage for stage, _ in doubts}
    problems = getattr(trace, "problems", ())
    missing += [NotJudged("a file of the capture", str(problem)) for problem in problems]
    return Verdict(
        verdict=_verdict(findings, missing, ladder, tables),
        findings=tuple(findings),
        hazards=tuple(hazards),
        cleared=tuple(stage for stage in STAGES if stage in judged and stage not in guilty),
        not_judged=tuple(missing),
        scope=_scope(timeline, ladder, tables, stores, reads)
        | {"not_in_scope": [stage for stage in STAGES if stage not in judged]}
        | ({} if scope.whole else {"cut_to": scope.to_json()})
        | extra,
        coverage=seen.hooks,
        losses=seen.losses,
        environment=_environment(trace),
    )


def _claim(page: PageEvidence, timeline: Timeline) -> PageEvidence:
    """The page with no more confidence than its kind allows in the capture mode of its process."""
    kind = NAMED.get(page.code)
    if kind is None:
        return page
    mode = timeline.trace.processes[page.process].mode
    return replace(page, confidence=kind.claim(mode, page.confidence))


def _byte_rungs(
    ladder: Ladder, evidence: Evidence
) -> tuple[list[PageEvidence], list[Hazard], dict[tuple[str, int], NotJudged]]:
    """Pages of findings, hazards, and (stage, room) -> a difference that cannot be laid at anybody's door."""
    judged, delivered = evidence.descriptors.delivered(ladder.cells)
    pages: list[PageEvidence] = []
    hazards: dict[str, Hazard] = {}
    doubts: dict[tuple[str, int], NotJudged] = {}
    bad_cells: set[int] = set()
    for case in ladder.cases:
        if judged[case.cell]:
            case.delivery = "right" if delivered[case.cell] else "wrong"
        for found in explain_case(case, evidence):
            if not ladder.cells.said[case.cell] and (found.harmless or found.code == "unclassified"):
                continue
            if found.harmless or evidence.never_read(case.process, case.request):
                item = hazard(case, found)
                hazards.setdefault(f"{found.code} {case.room}", item)
                continue
            why = _doubt(case, found, evidence)
            if why is not None:
                what = f"{found.stage} of room {case.room}: bytes differ there"
                doubts.setdefault((found.stage, case.room), NotJudged(what, why))
                continue
            bad_cells.add(case.cell)
            pages.append(page_evidence(case, found))
        _early_but_right(case, hazards)
    _geometry_hazards(ladder, evidence, judged & ~delivered, bad_cells, hazards)
    return pages, list(hazards.values()), doubts


def _doubt(case: Case, found: Explanation, evidence: Evidence) -> str | None:
    """Why a difference that no kind explains is not a finding: a writer or an owner may be unknown."""
    if found.code != "unclassified":
        return None
    source = case.rows.get("SE", case.rows.get("SE+", -1))
    sender = int(case.timeline.snapshots.process[source]) if source >= 0 else case.process
    lacking = [
        what
        for what in ("store", "alloc")
        if not all(evidence.covers(process, what) for process in {case.process, sender})
    ]
    if sender != case.process:
        lacking += [] if evidence.covers_sends(sender) else ["send"]
        lacking += [] if evidence.covers(case.process, "receive") else ["receive"]
        lacking += [] if evidence.covers(sender, "completion") else ["completion"]
    if lacking:
        return f"the record of {', '.join(lacking)} is not complete, so who wrote them is not known"
    return None


def _early_but_right(case: Case, hazards: dict[str, Hazard]) -> None:
    """A source that was not written yet at the post, and whose bytes arrived right all the same."""
    if not case.has("SE", "ST", "RC") or case.source_bad.any():
        return
    late = case.valid & ~case.same("SE", "ST") & case.same("RC", "ST")
    if late.any():
        name, layer = case.timeline.slots[case.slot]
        hazards.setdefault(
            f"F10 {case.room}",
            Hazard(
                "F10 sent-before-written, harmless this time: rows that were not written at the post arrived right",
                f"room {case.room}, {name} layer {layer}, logical page {case.logical}",
            ),
        )


def _geometry_hazards(
    ladder: Ladder, evidence: Evidence, odd: np.ndarray, bad: set[int], hazards: dict[str, Hazard]
) -> None:
    """Descriptors that do not bring a page whole from its own source page and changed no byte that matters."""
    timeline, cells = evidence.timeline, ladder.cells
    for cell in np.flatnonzero(odd & (cells.valid > 0)).tolist():
        look = max(int(cells.stage["SE"][cell]), int(cells.stage["SE+"][cell]))
        sender = int(timeline.snapshots.process[look]) if look >= 0 else -1
        target = timeline.buffers[int(timeline.snapshots.buffer[cells.stage["RC"][cell]])]
        if cell in bad or not evidence.covers_sends_to(target.number, sender):
            continue  # where records of sends were lost, those that are left say nothing of the page
        name, layer = timeline.slots[int(cells.slot[cell])]
        request = int(cells.request[cell])
        room = timeline.requests[request][0]
        if f"descriptor {room}" in hazards:
            continue
        lengths = evidence.descriptors.lengths_to(request, target)
        hazards.setdefault(
            f"descriptor {room}",
            Hazard(
                f"descriptors of {', '.join(map(str, lengths))} bytes do not bring the whole page "
                f"({target.layout.page_bytes} bytes) from its own source page; no byte that matters differs",
                f"room {room}, {name} layer {layer}, logical page {int(cells.logical[cell])}",
            ),
        )
    unlike = {
        (
            source.name,
            source.layer,
            source.item_length,
            target.item_length,
            source.layout.name,
            target.layout.name,
        )
        for source in timeline.buffers
        for target in timeline.buffers
        if _role(timeline, source.process) == "prefill"
        and _role(timeline, target.process) == "decode"
        and (source.name, source.layer) == (target.name, target.layer)
        and (source.item_length, source.layout.name) != (target.item_length, target.layout.name)
    }
    for name, layer, left, right, first, second in sorted(unlike):
        hazards.setdefault(
            f"geometry {name}",
            Hazard(
                f"item length {left} ({first}) at the sender, {right} ({second}) at the receiver",
                f"{name} layer {layer}",
            ),
        )


def _role(timeline: Timeline, process: int) -> str:
    return timeline.trace.processes[process].role


def _sorted(findings: list[Finding]) -> list[Finding]:
    """First rung first; within a rung the surest, then by room and layer."""
    rank = {"certain": 0, "likely": 1, "possible": 2}
    return sorted(
        findings,
        key=lambda f: (
            f.code == "unclassified",
            STAGES.index(f.stage),
            rank[f.confidence],
            f.request.room,
            f.layer,
        ),
    )


def _missing(ladder: Ladder, tables: TableRung, timeline: Timeline) -> list[NotJudged]:
    # Looks of a tap that was off in every process are not missing: nobody asked for them, and the scope says so.
    ran = frozenset[str]().union(*(taps(process) for process in timeline.trace.processes))
    unasked = {stage for stage, tap in TAP_OF_LOOK.items() if tap not in ran}
    words = {"ST": "the store", "SE": "the source", "RC": "the destination at completion"}
    missing = [
        NotJudged(
            f"{words[stage]} of {counted(int(mask.sum()), 'page')}", f"no {stage} snapshot was recorded"
        )
        for stage, mask in ladder.missing.items()
        if mask.any() and timeline.scope.has_stage(*_LOOKS[stage]) and stage not in unasked
    ]
    unknown = int((~ladder.cells.rows_known & ladder.cells.said).sum())
    if unknown:
        missing.append(NotJudged(counted(unknown, "page"), "how many rows are valid was not recorded"))
    if ladder.unjudged_reads and timeline.scope.has_stage("destination"):
        missing.append(
            NotJudged(
                counted(ladder.unjudged_reads, "page snapshot at reads (RD)", "page snapshots at reads (RD)"),
                "no earlier snapshot to compare with",
            )
        )
    if tables.unknown and timeline.scope.has_stage("table"):
        missing.append(
            NotJudged(
                f"the block tables of {counted(tables.unknown, 'read')}", "allocations were not recorded"
            )
        )
    formats = timeline.trace.table("buffer")["format"]
    unknown_formats = int((formats != OPAQUE).sum()) - len(timeline.buffers)
    if unknown_formats:
        missing.append(
            NotJudged(
                counted(unknown_formats, "buffer"),
                "this version does not know the page format",
            )
        )
    return missing


def _verdict(
    findings: list[Finding], missing: list[NotJudged], ladder: Ladder, tables: TableRung
) -> Literal["clean", "divergent", "inconclusive"]:
    if any(finding.confidence != "possible" for finding in findings):
        return "divergent"
    judged = sum(ladder.pages_judged.values()) + ladder.reads_checked + tables.reads
    return "clean" if judged and not findings and not missing else "inconclusive"


def _judged(
    ladder: Ladder, tables: TableRung, stores: Rung, reads: Rung, evidence: Evidence
) -> frozenset[str]:
    """Stages of which something was judged."""
    counts = ladder.pages_judged
    judged = {
        "store": stores.judged > 0,
        "source": min(counts["ST"], max(counts["SE"], counts["SE+"])) > 0,
        "descriptor": len(evidence.descriptors.sends) > 0,
        "wire": min(counts["RC"], max(counts["SE"], counts["SE+"])) > 0,
        "completion": counts["LT"] > 0 and counts["RC"] > 0,
        "destination": ladder.reads_checked > 0,
        "table": tables.reads > 0,
        "read-kernel": reads.judged > 0,
        "top-k": reads.judged > 0 and any(case.k > 0 for case in (*reads.sample, *reads.suspects)),
    }
    return frozenset(stage for stage, yes in judged.items() if yes)


def _scope(
    timeline: Timeline, ladder: Ladder, tables: TableRung, stores: Rung, reads: Rung
) -> dict[str, Any]:
    rooms = sorted({timeline.requests[number][0] for number in ladder.requests.tolist()})
    layers = np.unique(np.array([layer for _, layer in timeline.slots], np.int64))
    return {
        "requests": len(ladder.requests),
        "rooms": [rooms[0], rooms[-1]] if rooms else [],
        "layers": int(timeline.scope.layers_in(layers).sum()),
        "pages": int(((ladder.cells.valid > 0) & ladder.cells.said).sum()),
        "pages_seen": ladder.pages_judged,
        "read_snapshots": ladder.reads_checked,
        "tables": tables.reads,
        "overshoot": tables.overshoot + ladder.cells.overshoot,
        "stores": _rung_scope(stores),
        "reads": _rung_scope(reads),
    }


def _rung_scope(rung: Rung) -> dict[str, Any]:
    return {
        "judged": rung.judged,
        "rows": rung.rows,
        "rows_reproduced": rung.rows - rung.wrong,
        "largest_error_of_bound": round(rung.worst, 4),
        "skipped": rung.skipped.counts,
    }


def _environment(trace: Trace) -> dict[str, Any]:
    return {
        f"{process.role} rank {process.rank}": {
            "engine": process.engine,
            "mode": process.mode,
            "transport": process.transport,
            **process.environment,
        }
        for process in trace.processes
    }


__all__ = ["JudgeOptions", "judge"]
