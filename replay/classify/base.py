"""What a classifier gives back, and what all of them share.

A classifier is one module with one function ``explain(case, evidence, bad) -> Explanation | None``. It gets
a case and the units that are still unexplained at its rung, and answers for which of them its kind is the cause.
It answers None rather than guess: units that nobody explains become ``unclassified`` at their stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replay.descriptors import DescriptorMap
from replay.timeline import Timeline
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

#: Code -> (kind as printed, stage), for the kinds that this version can name (docs/kinds).
KINDS: dict[str, tuple[str, str]] = {
    "F01": ("buffer-missing", "descriptor"),
    "F02": ("list-too-short", "descriptor"),
    "F03": ("wrong-item-length", "descriptor"),
    "F04": ("wrong-page-id-space", "descriptor"),
    "F05": ("wrong-layer-pairing", "descriptor"),
    "F09": ("completion-early", "completion"),
    "F10": ("sent-before-written", "source"),
    "F11": ("source-overwritten", "source"),
    "F13": ("failed-transfer-used", "wire"),
    "F14": ("late-foreign-write", "destination"),
    "F18": ("torn-block-table", "table"),
    "F25": ("kernel-numerics", "read-kernel"),
    "F26": ("invalid-top-k", "top-k"),
    "F27": ("wrong-top-k", "top-k"),
    "F30": ("wrong-store-bytes", "store"),
    "F31": ("lost-on-wire", "wire"),
}

#: Units that a copy may cut in the middle (the edges of what was written), so that they equal neither content.
TORN_UNITS = 4


@dataclass(frozen=True, slots=True)
class Explanation:
    """One cause for some units of one case.

    ``expected`` and ``observed`` name the stages whose bytes show the difference; ``at_source`` says that the
    page to name is the source page.
    """

    code: str
    stage: str
    confidence: Confidence
    explained: Bool
    expected: str
    observed: str
    evidence: tuple[str, ...] = ()
    runner_up: RunnerUp | None = None
    donor: Donor | None = None
    rule: str | None = None
    aliases: tuple[int, ...] = ()
    at_source: bool = False
    harmless: bool = False  #: a hazard: it changed no byte that was read


@dataclass(slots=True)
class Evidence:
    """Everything beside the case itself that a classifier may ask."""

    timeline: Timeline
    descriptors: DescriptorMap
    complete: dict[int, frozenset[str]] = field(
        default_factory=dict
    )  #: process -> what its hooks cover whole

    def covers(self, process: int, *what: str) -> bool:
        """Whether absence is evidence: the hooks of ``process`` see every event of these kinds."""
        return set(what) <= self.complete.get(process, frozenset())


def lower(first: Confidence, second: Confidence) -> Confidence:
    """The weaker of two confidences."""
    order: tuple[Confidence, ...] = ("certain", "likely", "possible")
    return order[max(order.index(first), order.index(second))]


def halves(units: Bool) -> tuple[Bool, Bool]:
    """Value units and scale units of a mask, one per row each."""
    count = len(units) // 2
    return units[:count], units[count:]


def span(rows: Bool) -> str:
    """Rows of a mask in words: ``rows 3``, ``rows 3..9`` or a list of ranges."""
    index = np.flatnonzero(rows)
    if not len(index):
        return "no rows"
    cuts = np.flatnonzero(np.diff(index) > 1)
    starts = index[np.concatenate([[0], cuts + 1])]
    ends = index[np.concatenate([cuts, [len(index) - 1]])]
    parts = [f"{a}" if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True)]
    shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    return f"row{'s' if len(index) > 1 else ''} {shown}"
