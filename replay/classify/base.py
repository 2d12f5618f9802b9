"""What a classifier gives back, and what all of them share.

A classifier is one module with a declaration ``KIND`` and a function ``explain(case, evidence, bad, stage) ->
Explanation | None``. It gets a case, the units that are still unexplained at its rung and the look (SE, RC, LT, RD)
that shows them, and answers for which of them its kind is the cause. It answers None rather than guess: units that
nobody explains become ``unclassified`` at their stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.descriptors import DescriptorMap
from replay.donors import Donors
from replay.local_writes import LocalWrites
from replay.ranges import ranges
from replay.siblings import Siblings
from replay.timeline import Timeline
from replay.verdict import Confidence, Donor, RunnerUp

Bool = npt.NDArray[np.bool_]

#: Code -> (kind as printed, stages at which it can show). Every kind that has a name, whether this version finds it
#: or not; the registry has those it finds.
VOCABULARY: dict[str, tuple[str, tuple[str, ...]]] = {
    "F01": ("buffer-missing", ("descriptor",)),
    "F02": ("list-too-short", ("descriptor",)),
    "F03": ("wrong-item-length", ("descriptor",)),
    "F04": ("wrong-page-id-space", ("descriptor",)),
    "F05": ("wrong-layer-pairing", ("descriptor",)),
    "F06": ("partial-slice", ("descriptor",)),
    "F07": ("layout-permuted", ("descriptor", "read-kernel")),
    "F08": ("truncated-copy", ("descriptor",)),
    "F09": ("completion-early", ("completion",)),
    "F10": ("sent-before-written", ("source",)),
    "F11": ("source-overwritten", ("source",)),
    "F12": ("component-late", ("completion",)),
    "F13": ("failed-transfer-used", ("wire",)),
    "F14": ("late-foreign-write", ("destination",)),
    "F15": ("local-clear", ("destination",)),
    "F16": ("freed-page-referenced", ("destination", "table")),
    "F17": ("stale-slot-mapping", ("table",)),
    "F18": ("torn-block-table", ("table",)),
    "F19": ("length-off-by-one", ("table",)),
    "F20": ("wrong-stride", ("table", "read-kernel", "store")),
    "F21": ("integer-wrap", ("read-kernel",)),
    "F22": ("token-index-as-page-index", ("store", "read-kernel")),
    "F23": ("padding-row-written", ("store",)),
    "F24": ("number-format", ("read-kernel",)),
    "F25": ("kernel-numerics", ("read-kernel",)),
    "F26": ("invalid-top-k", ("top-k",)),
    "F27": ("wrong-top-k", ("top-k",)),
    "F28": ("metadata-mix-up", ("completion",)),
    "F29": ("speculative-row-misuse", ("table", "destination")),
    "F30": ("wrong-store-bytes", ("store",)),
    "F31": ("lost-on-wire", ("wire",)),
}

#: Capture modes, from the one that keeps least (docs/options.md).
MODES = ("digest", "pages", "full")

#: Units that a copy may cut in the middle (the edges of what was written), so that they equal neither content.
TORN_UNITS = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """What one classifier declares about the kind it finds; the tables of the docs come from it.

    ``shows`` says what has to be seen for the kind to be named, ``certain`` what else for that claim. ``best`` is the
    most that may be claimed in each capture mode, None where that mode does not keep what the kind needs; the judge
    lowers a claim to it. ``rivals`` are (code, the observation that tells it apart).
    """

    code: str
    shows: str
    certain: str
    best: Mapping[str, Confidence | None]
    rivals: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The kind as printed."""
        return VOCABULARY[self.code][0]

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages at which it can show."""
        return VOCABULARY[self.code][1]

    def claim(self, mode: str, confidence: Confidence) -> Confidence:
        """``confidence``, lowered to the best that ``mode`` allows."""
        return lower(confidence, self.best.get(mode, "certain") or "possible")


def claims(
    *, digest: Confidence | None, pages: Confidence | None, full: Confidence | None = None
) -> dict[str, Confidence | None]:
    """``Kind.best``; ``full`` keeps no less than ``pages`` and claims the same unless said."""
    return {"digest": digest, "pages": pages, "full": full or pages}


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
    siblings: Siblings | None = None  #: once the ladder has been climbed
    donors: Donors | None = None  #: likewise
    local: LocalWrites = field(init=False)

    def __post_init__(self) -> None:
        """Stores and copies are resolved when somebody asks for them."""
        self.local = LocalWrites(self.timeline)

    def covers(self, process: int, *what: str) -> bool:
        """Whether absence is evidence: the hooks of ``process`` see every event of these kinds."""
        return set(what) <= self.complete.get(process, frozenset())

    def never_read(self, process: int, request: int) -> bool:
        """Whether a request gave its pages back without one read of them: nothing that is wrong there mattered."""
        owner = (process, request)
        return (
            self.covers(process, "read", "alloc")
            and owner not in self.timeline.readers
            and owner in self.timeline.owners.ended
        )

    def covers_sends(self, *senders: int) -> bool:
        """Whether every post of ``senders`` and of all prefill processes was seen: any of these may write anywhere."""
        prefill = [n for n, process in enumerate(self.timeline.trace.processes) if process.role == "prefill"]
        return all(self.covers(process, "send") for process in (*senders, *prefill))

    def covers_sends_to(self, buffer: int, sender: int) -> bool:
        """Whether every post of ``sender`` and of those that share its work for destination ``buffer`` was seen."""
        senders = self.descriptors.senders_of(buffer) | {sender}
        return all(self.covers(process, "send") for process in senders)


def unit_mask(layout: Layout, bytes_mask: Bool, *, some: bool = False) -> Bool:
    """Units whose bytes are all (or, with ``some``, partly) set in a byte mask of the page."""
    values = bytes_mask[: layout.scale_base].reshape(layout.rows, layout.value_bytes)
    reduce = np.any if some else np.all
    if layout.scale_bytes:
        scales = bytes_mask[layout.scale_base :].reshape(layout.rows, layout.scale_bytes)
        scale_mask = reduce(scales, axis=1)
    else:
        scale_mask = np.full(layout.rows, not some)
    return np.concatenate([reduce(values, axis=1), scale_mask])


def runs(mask: Bool) -> list[tuple[int, int]]:
    """Half-open ranges of the set entries."""
    return [(first, last + 1) for first, last in ranges(mask)]


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
    parts = [f"{a}" if a == b else f"{a}..{b}" for a, b in ranges(rows)]
    if not parts:
        return "no rows"
    shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    return f"row{'s' if int(rows.sum()) > 1 else ''} {shown}"


def in_words(values: Bool, scales: Bool) -> str:
    """Value rows and scale rows in words; what has no row is left out (formats without scales have none)."""
    named = [
        f"{name} of {span(rows)}" for name, rows in (("values", values), ("scales", scales)) if rows.any()
    ]
    return " and ".join(named) or "no rows"
