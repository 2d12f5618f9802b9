"""The stage x page grid of one request, as plain arrays.

Each prompt page of the request, in each layer, is compared at each stage with the first stage at which it was seen
(the store, where it was recorded). Only rows that the prompt fills count: what lies behind them is nobody's claim.
What the verdict found is laid over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.diff.seen import SNAPSHOTS, Seen, is_step, prompt_rows, references, snapshots_of
from capture_hooks.layouts import LAYOUTS
from replay.verdict import Finding, Verdict

if TYPE_CHECKING:
    from replay.trace.reader import Trace

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

#: More pages than this are a mistake in the trace, not a request.
MAX_PAGES = 1 << 16


class State(IntEnum):
    """What is known of one page at one stage."""

    NOT_SEEN = 0
    NOT_JUDGED = 1
    EQUAL = 2
    DIFFERS = 3


#: Rows of the grid that only the verdict can tell: label and stage of the ladder.
JUDGED = (("table", "table"), ("read kernel", "read-kernel"), ("top-k", "top-k"))
#: On which rows a finding of each ladder stage may be marked: on those that differ, else on the last one.
_MARKED = {
    "store": ("store",),
    "source": ("source, after", "source"),
    "descriptor": ("later", "arrival"),
    "wire": ("later", "arrival"),
    "completion": ("arrival",),
    "destination": ("later", "reads"),
    "table": ("table",),
    "read-kernel": ("read kernel",),
    "top-k": ("top-k",),
}


@dataclass(frozen=True, slots=True)
class StageGrid:
    """States of the pages of one request.

    Attributes:
        room: The request.
        attempt: Its attempt.
        stages: Labels of the S stages, in the order of the ladder.
        layers: (buffer name, layer id) of the L layers, sorted.
        logical: int64[P], logical page numbers.
        physical: int64[P], page ids on the reading side; -1 where it never had the page.
        states: uint8[S, L, P] of :class:`State`.
        found: bool[S, L, P], where a finding of the verdict lies.
    """

    room: int
    attempt: int
    stages: tuple[str, ...]
    layers: tuple[tuple[str, int], ...]
    logical: I64
    physical: I64
    states: U8
    found: Bool


def busiest_request(trace: Trace, verdict: Verdict) -> tuple[int, int] | None:
    """(room, attempt) of the first finding, else of the request with the most page snapshots; None without any."""
    if verdict.findings:
        request = verdict.findings[0].request
        return request.room, request.attempt
    snapshots = trace.table("snapshot")
    rooms = snapshots["room"]
    chosen = np.flatnonzero(rooms >= 0)
    if not len(chosen):
        return None
    pages = np.diff(snapshots.ragged("pages").offsets)[chosen]
    keys = np.stack([rooms[chosen], snapshots["attempt"][chosen]], 1)
    names, number = np.unique(keys, axis=0, return_inverse=True)
    best = names[np.argmax(np.bincount(number.ravel(), weights=pages))]
    return int(best[0]), int(best[1])


def stage_grid(trace: Trace, verdict: Verdict, room: int, attempt: int = 0) -> StageGrid | None:
    """The grid of one request, or None where the trace has no page of it.

    A page is compared by its row digests and scale words, so this works without page bytes.
    """
    seen = snapshots_of(trace, room, attempt)
    findings = [f for f in verdict.findings if (f.request.room, f.request.attempt) == (room, attempt)]
    rows = prompt_rows(trace, room, attempt)
    if not len(seen.content) and not findings:
        return None
    layers = tuple(sorted({*seen.slots, *((finding.buffer, finding.layer) for finding in findings)}))
    logical = _logical_pages(seen, findings, rows)
    stages = tuple(label for label, _, _ in SNAPSHOTS) + tuple(label for label, _ in JUDGED)
    states = np.full((len(stages), len(layers), len(logical)), State.NOT_SEEN, np.uint8)
    for layer, slot in enumerate(layers):
        _compare(trace, seen, layer, slot, rows, logical, states)
    for number, (_, stage) in enumerate(JUDGED, len(SNAPSHOTS)):
        states[number] = State.EQUAL if stage in verdict.cleared else State.NOT_JUDGED
    found = _mark(findings, stages, layers, logical, states)
    return StageGrid(room, attempt, stages, layers, logical, _physical(seen, logical), states, found)


def _logical_pages(seen: Seen, findings: Sequence[Finding], rows: int) -> I64:
    named = [page.logical for finding in findings for page in finding.pages if page.logical >= 0]
    found = np.unique(np.concatenate([seen.logical[seen.logical >= 0], np.array(named, np.int64)]))
    if rows >= 0 and len(seen.format):
        per_page = max(LAYOUTS[name].rows for name in set(seen.format) if name in LAYOUTS)
        prompt = found < -(-rows // per_page)
        found = found[prompt | np.isin(found, named)]
    return found[:MAX_PAGES].astype(np.int64)


def _compare(
    trace: Trace, seen: Seen, layer: int, slot: tuple[str, int], rows: int, logical: I64, states: U8
) -> None:
    """Fill the states of one layer."""
    mine = np.flatnonzero(np.array([name == slot for name in seen.slot], bool))
    mine = mine[np.isin(seen.logical[mine], logical)]
    column = np.searchsorted(logical, seen.logical[mine])
    for name in dict.fromkeys(seen.format[mine]):
        if name not in LAYOUTS:
            states[seen.stage[mine], layer, column] = State.NOT_JUDGED
    usable = mine[(seen.content[mine] >= 0) & np.isin(seen.format[mine], list(LAYOUTS))]
    reference = references(seen, usable)
    for number in range(len(SNAPSHOTS)):
        chosen = np.flatnonzero(seen.stage[mine] == number)
        for position in chosen:
            row, place = int(mine[position]), int(column[position])
            state = _state(trace, seen, row, reference.get(int(seen.logical[row])), rows)
            # Several looks at one page, as reads make: the worst of them is shown.
            states[number, layer, place] = max(states[number, layer, place], state)


def _state(trace: Trace, seen: Seen, row: int, reference: int | None, rows: int) -> State:
    content = int(seen.content[row])
    if reference is None or content < 0 or seen.format[row] != seen.format[reference]:
        return State.NOT_JUDGED
    if content == seen.content[reference] or is_step(seen, row, reference):
        return State.EQUAL
    layout = LAYOUTS[seen.format[row]]
    valid = layout.rows if rows < 0 else min(layout.rows, rows - int(seen.logical[row]) * layout.rows)
    ids = np.array([content, seen.content[reference]], np.int64)
    if (trace.contents.rows[ids] == 0).any():
        # Only whole pages can be told apart, and rows behind the prompt may differ.
        return State.DIFFERS if valid == layout.rows else State.NOT_JUDGED
    values, scales = trace.contents.row_values(ids), trace.contents.row_scales(ids)
    same = np.array_equal(values[0, :valid], values[1, :valid]) and np.array_equal(
        scales[0, :valid], scales[1, :valid]
    )
    return State.EQUAL if same else State.DIFFERS


def _mark(
    findings: Sequence[Finding],
    stages: Sequence[str],
    layers: Sequence[tuple[str, int]],
    logical: I64,
    states: U8,
) -> Bool:
    """Where findings lie. A row that only the verdict knows takes its state from them."""
    found = np.zeros(states.shape, bool)
    for finding in findings:
        labels = _MARKED.get(finding.stage, ())
        layer = layers.index((finding.buffer, finding.layer))
        named = np.array([page.logical for page in finding.pages], np.int64)
        columns = np.flatnonzero(np.isin(logical, named)) if len(named) else np.arange(len(logical))
        for label in labels:
            stage = stages.index(label)
            wrong = columns[states[stage, layer, columns] == State.DIFFERS]
            last = label == labels[-1]
            found[stage, layer, columns if last and not found[:, layer, columns].any() else wrong] = True
            if stage >= len(SNAPSHOTS):
                states[stage, layer, columns] = State.DIFFERS
    return found


def _physical(seen: Seen, logical: I64) -> I64:
    """Page id of each logical page on the reading side."""
    physical = np.full(len(logical), -1, np.int64)
    chosen = np.flatnonzero(seen.reading & np.isin(seen.logical, logical))
    physical[np.searchsorted(logical, seen.logical[chosen])] = seen.page[chosen]
    return physical
