"""How far a verdict reaches: all of a trace, or the part to which it was cut down (``replay trim``).

Rooms bound what is judged at all. Layers, logical pages and stages bound what is said: what lies beside them may be
in the trace as evidence, and is judged along, but no finding and no gap outside the scope is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replay.verdict import STAGES, Finding, NotJudged

if TYPE_CHECKING:
    from replay.trace.reader import Trace

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

#: Why a finding at a stage outside the scope is not reported.
BESIDE = "the verdict is cut down to other stages"

#: Most numbers shown one by one.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Scope:
    """Limits of a verdict; None sets none.

    Attributes:
        rooms: requests, by room.
        layers: global layer ids.
        logical: logical pages.
        stages: stages of the ladder.
        apart: processes that were cut down without the others; what concerns both sides is not known there.
    """

    rooms: frozenset[int] | None = None
    layers: frozenset[int] | None = None
    logical: frozenset[int] | None = None
    stages: frozenset[str] | None = None
    apart: frozenset[int] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return all(limit is None for limit in (self.rooms, self.layers, self.logical, self.stages))

    def rooms_in(self, rooms: I64) -> Bool:
        """Which of ``rooms`` are in scope."""
        return _in(rooms, self.rooms)

    def layers_in(self, layers: I64) -> Bool:
        """Which of ``layers`` are in scope."""
        return _in(layers, self.layers)

    def places_in(self, layers: I64, logical: I64) -> Bool:
        """Which (layer, logical page) are in scope."""
        return _in(layers, self.layers) & _in(logical, self.logical)

    def has_stage(self, *stages: str) -> bool:
        """Whether one of ``stages`` is in scope."""
        return self.stages is None or not self.stages.isdisjoint(stages)

    def joined(self, other: Scope) -> Scope:
        """What both allow."""
        return Scope(
            _both(self.rooms, other.rooms),
            _both(self.layers, other.layers),
            _both(self.logical, other.logical),
            _both(self.stages, other.stages),
            self.apart | other.apart,
        )

    def limit(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[NotJudged]]:
        """Findings within the scope, and what is wrong at stages outside it.

        A finding that names pages keeps those of the scope; its kind, stage and confidence stay.
        """
        kept: list[Finding] = []
        beside: dict[str, NotJudged] = {}
        for finding in findings:
            pages = tuple(p for p in finding.pages if self.logical is None or p.logical in self.logical)
            if self.rooms is not None and finding.request.room not in self.rooms:
                continue
            beyond = self.layers is not None and finding.layer not in self.layers
            if beyond or (finding.pages and not pages):
                continue
            if self.has_stage(finding.stage):
                kept.append(finding if len(pages) == len(finding.pages) else replace(finding, pages=pages))
                continue
            beside.setdefault(
                finding.stage,
                NotJudged(
                    f"{finding.stage} of room {finding.request.room}: something differs there",
                    BESIDE,
                ),
            )
        return kept, list(beside.values())

    def to_json(self) -> dict[str, Any]:
        """The limits in plain words, for the scope of a verdict; empty where there are none."""
        found: dict[str, Any] = {}
        for name, limit in (("rooms", self.rooms), ("layers", self.layers), ("logical pages", self.logical)):
            if limit is not None:
                numbers = sorted(limit)
                many = len(numbers) > _SHOWN
                found[name] = f"{len(numbers)} from {numbers[0]} to {numbers[-1]}" if many else numbers
        if self.stages is not None:
            found["stages"] = [stage for stage in STAGES if stage in self.stages]
        return found


def scope_of(trace: Trace) -> Scope:
    """What ``trace`` was cut down to: the limits of all its ``trim`` records together."""
    table = trace.table("trim")
    scope = Scope()
    runs: dict[int, set[str]] = {number: set() for number in range(len(trace.processes))}
    for row in range(len(table)):
        stages = frozenset(filter(None, str(table["stages"][row]).split(",")))
        rooms, layers, logical = (_limit(table.ragged(name)[row]) for name in ("rooms", "layers", "logical"))
        scope = scope.joined(Scope(rooms, layers, logical, stages or None))
        runs[int(table["process"][row])].add(str(table["run"][row]))
    together = set.intersection(*runs.values()) if runs else set()
    apart = frozenset(number for number, found in runs.items() if found - together)
    return replace(scope, apart=apart)


def _limit(values: I64) -> frozenset[int] | None:
    return frozenset(values.tolist()) if len(values) else None


def _both(first: frozenset[Any] | None, second: frozenset[Any] | None) -> frozenset[Any] | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _in(values: I64, limit: frozenset[int] | None) -> Bool:
    if limit is None:
        return np.ones(np.shape(values), bool)
    return np.isin(values, np.array(sorted(limit), np.int64))
