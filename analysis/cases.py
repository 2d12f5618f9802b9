"""What a finding stands on, as arrays that need nothing of this program: pages, tables, reads and stores.

``repro.py`` of a bundle shows the difference from them with numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from analysis.diff.page_bytes import wrong_look
from analysis.diff.reads import read_reference
from analysis.diff.seen import SNAPSHOTS
from capture_hooks.layouts import LAYOUTS, Layout
from replay.kernels.reference import check_store, store_reference
from replay.recorded import Skipped, read_case, read_snapshots, store_cases
from replay.tables import judge_tables
from replay.timeline import Timeline
from replay.verdict import Finding, PageFinding, Verdict

if TYPE_CHECKING:
    from replay.trace.reader import Trace

Arrays = dict[str, npt.NDArray[Any]]

#: Cases of one bundle, and bytes of all their arrays.
MAX_CASES, MAX_BYTES = 48, 4_000_000
#: Tables, reads or pages of one store that are enough for one finding.
_OF_ONE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One difference: ``kind`` is "page", "rows", "table", "read" or "store"; ``told`` are plain JSON values."""

    kind: str
    told: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def cases_of(trace: Trace, verdict: Verdict) -> list[Case]:
    """Cases of the findings in their order, one layer of each request first, within the limits."""
    timeline = Timeline(trace)
    found: list[Case] = []
    size = 0
    for finding in _spread(verdict.findings):
        for case in _cases(trace, timeline, finding):
            if len(found) >= MAX_CASES or size + case.size > MAX_BYTES:
                return found
            size += case.size
            found.append(case)
    return found


def arrays_of(cases: Iterable[Case]) -> Arrays:
    """All arrays under one roof, and what is told of them as JSON bytes under ``cases``."""
    arrays: Arrays = {}
    told = []
    for number, case in enumerate(cases):
        told.append({"kind": case.kind, **case.told})
        arrays.update({f"{number}.{name}": array for name, array in case.arrays.items()})
    arrays["cases"] = np.frombuffer(json.dumps(told, indent=1).encode(), np.uint8)
    return arrays


def _spread(findings: Iterable[Finding]) -> list[Finding]:
    """One finding of each request and kind first, then the other layers."""
    first: dict[tuple[Any, ...], Finding] = {}
    rest: list[Finding] = []
    for finding in findings:
        key = (finding.code, finding.stage, finding.request.room, finding.request.attempt)
        if key in first:
            rest.append(finding)
        else:
            first[key] = finding
    return [*first.values(), *rest]


def _cases(trace: Trace, timeline: Timeline, finding: Finding) -> Iterator[Case]:
    about: dict[str, Any] = {
        "finding": f"{finding.code} {finding.kind}",
        "stage": finding.stage,
        "room": finding.request.room,
        "attempt": finding.request.attempt,
        "cache": finding.buffer,
        "layer": finding.layer,
    }
    special = {"table": _table, "read-kernel": _read, "top-k": _read, "store": _store}.get(finding.stage)
    if special is not None:
        yield from islice(special(timeline, finding, about), _OF_ONE)
    else:
        yield from _pages(trace, timeline, finding, about)


def _pages(trace: Trace, timeline: Timeline, finding: Finding, about: dict[str, Any]) -> Iterator[Case]:
    """Each page as it was first seen and as it was seen wrong, with whose bytes are there and the pages beside it."""
    room, attempt = finding.request.room, finding.request.attempt
    contents = trace.contents
    for page in finding.pages:
        looks = wrong_look(trace, room, attempt, finding.buffer, finding.layer, page.logical)
        if looks is None:
            continue
        seen, first, look = looks
        layout = LAYOUTS[seen.format[first]]
        ids = np.array([seen.content[first], seen.content[look]])
        told = {
            **about,
            **_layout(layout),
            "logical": page.logical,
            "page": int(seen.page[look]),
            "right_at": SNAPSHOTS[int(seen.stage[first])][0],
            "wrong_at": SNAPSHOTS[int(seen.stage[look])][0],
            "value_rows": [list(rows) for rows in page.value_rows],
            "scale_rows": [list(rows) for rows in page.scale_rows],
            "bytes_differing": page.bytes_differing,
        }
        if not contents.has_data[ids].all():
            if (contents.rows[ids] == layout.rows).all():
                values, scales = contents.row_values(ids), contents.row_scales(ids)
                names = ("right_values", "seen_values", "right_scales", "seen_scales")
                yield Case("rows", told, dict(zip(names, (*values, *scales), strict=True)))
            continue
        right, wrong = contents.data(ids)
        count = _differing(layout, right, wrong, page)
        if count == 0:
            continue  # what the finding means lies between other looks, such as at a row that was appended
        told["bytes_differing"] = count
        arrays = {"right": right, "seen": wrong}
        if page.donor is not None:
            told["donor"] = (
                f"room {page.donor.room}, layer {page.donor.layer}, logical page {page.donor.logical}"
            )
            arrays.update(
                _donor(trace, finding, page.donor.room, page.donor.layer, page.donor.logical, layout)
            )
        process = int(seen.process[look])
        arrays.update(_beside(timeline, process, finding, int(seen.page[look])))
        yield Case("page", told, arrays)


def _differing(layout: Layout, right: npt.NDArray[Any], seen: npt.NDArray[Any], page: PageFinding) -> int:
    """Bytes that differ in the rows that the finding names."""
    count = 0
    for area, ranges in ((layout.value_range, page.value_rows), (layout.scale_range, page.scale_rows)):
        for first, last in ranges:
            begin, end = area(first, last)
            count += int((right[begin:end] != seen[begin:end]).sum())
    return count


def _layout(layout: Layout) -> dict[str, Any]:
    names = ("rows", "head_dim", "value_type", "value_bytes", "scale_type", "scale_bytes", "scale_block")
    return {"format": layout.name, **{name: getattr(layout, name) for name in names}}


def _donor(trace: Trace, finding: Finding, room: int, layer: int, logical: int, layout: Layout) -> Arrays:
    """The page that the foreign bytes come from, as its own request first saw it."""
    attempts = trace.table("snapshot")["attempt"][trace.table("snapshot")["room"] == room]
    for attempt in np.unique(attempts).tolist():
        looks = wrong_look(trace, room, attempt, finding.buffer, layer, logical)
        if looks is not None:
            content = looks[0].content[[looks[1]]]
            if trace.contents.has_data[content].all() and looks[0].format[looks[1]] == layout.name:
                return {"donor": trace.contents.data(content)[0]}
    return {}


def _beside(timeline: Timeline, process: int, finding: Finding, page: int) -> Arrays:
    """The physical pages before and after, as last seen: a write that overran its page shows there."""
    snaps, contents = timeline.snapshots, timeline.trace.contents
    numbers = [
        b.number
        for b in timeline.buffers
        if (b.process, b.name, b.layer) == (process, finding.buffer, finding.layer)
    ]
    found: Arrays = {}
    for name, other in (("page_before", page - 1), ("page_after", page + 1)):
        mine = np.flatnonzero(np.isin(snaps.buffer, numbers) & (snaps.page == other) & (snaps.content >= 0))
        mine = mine[contents.has_data[snaps.content[mine]]]
        if len(mine):
            last = mine[np.argmax(snaps.seq[mine])]
            found[name] = contents.data(snaps.content[[last]])[0]
    return found


def _table(timeline: Timeline, finding: Finding, about: dict[str, Any]) -> Iterator[Case]:
    request = timeline.request_number(finding.request.room, finding.request.attempt)
    for case in judge_tables(timeline).cases:
        buffer = timeline.buffers[case.buffer]
        if case.request == request and (buffer.name, buffer.layer) == (finding.buffer, finding.layer):
            columns = {"logical": case.logical, "seen": case.seen, "given": case.given}
            yield Case("table", about, {name: np.array(column, np.int64) for name, column in columns.items()})


def _read(timeline: Timeline, finding: Finding, about: dict[str, Any]) -> Iterator[Case]:
    table = timeline.trace.table("read")
    request = timeline.request_number(finding.request.room, finding.request.attempt)
    mine = np.flatnonzero((timeline.request_column("read") == request) & (table.bulk_size("logits") > 0))
    looks, skipped = read_snapshots(timeline), Skipped({})
    for read in mine.tolist():
        case = read_case(timeline, read, int(table["process"][read]), request, looks, skipped)
        if case is None or timeline.buffers[case.buffer].layer != finding.layer:
            continue
        _, bound = read_reference(case, case.pages)
        told = {
            **about,
            **_layout(case.layout),
            "length": case.rows,
            "k": case.k,
            "step": int(table["step"][read]),
        }
        yield Case(
            "read",
            told,
            {
                "pages": case.pages,
                "query": case.query,
                "weights": case.weights,
                "logits": case.logits,
                "top_k": case.top_k,
                "bound": bound,
            },
        )


def _store(timeline: Timeline, finding: Finding, about: dict[str, Any]) -> Iterator[Case]:
    table = timeline.trace.table("store")
    request = timeline.request_number(finding.request.room, finding.request.attempt)
    mine = np.flatnonzero((timeline.request_column("store") == request) & (table.bulk_size("keys") > 0))
    for store in mine.tolist():
        for case in store_cases(timeline, store, Skipped({})):
            if timeline.buffers[case.buffer].layer != finding.layer:
                continue
            values = case.layout.values(case.data[None])[0][case.rows]
            scales = case.layout.scales(case.data[None])[0][case.rows]
            check = check_store(case.layout, case.inputs, values, scales)
            bad = ~check.reproduced
            if not bad.any():
                continue
            inputs = case.inputs
            reference = store_reference(
                case.layout, inputs.keys, inputs.rope, inputs.norm_weight, inputs.epsilon
            )
            told = {**about, **_layout(case.layout), "page": case.page, "logical": case.logical}
            yield Case(
                "store",
                told,
                {
                    "row": case.rows[bad].astype(np.int64),
                    "values": values[bad],
                    "scales": scales[bad],
                    "reference": reference.values[bad],
                    "wrong_codes": check.wrong_codes[bad],
                    "wrong_scales": check.wrong_scales[bad],
                },
            )
