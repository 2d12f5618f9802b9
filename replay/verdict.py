"""The result of a replay: verdict, findings, hazards, what was cleared and what was not judged.

JSON schema ``kv-replay/verdict/1``. Byte ranges are half-open, row ranges are closed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "kv-replay/verdict/1"

Confidence = Literal["certain", "likely", "possible"]
Ranges = tuple[tuple[int, int], ...]

#: The stages in the order of the ladder.
STAGES = (
    "store",
    "source",
    "descriptor",
    "wire",
    "completion",
    "destination",
    "table",
    "read-kernel",
    "top-k",
)


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request: room and attempt, and the other requests that share the finding's pages."""

    room: int
    attempt: int = 0
    aliases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Donor:
    """Where foreign bytes came from."""

    room: int
    layer: int
    logical: int


@dataclass(frozen=True, slots=True)
class PageFinding:
    """What is wrong in one page."""

    logical: int
    physical: int
    value_rows: Ranges = ()
    scale_rows: Ranges = ()
    byte_ranges: Ranges = ()
    bytes_differing: int | None = None  #: None where the bytes were not kept
    donor: Donor | None = None


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The next best kind, and the observation that ruled it out."""

    code: str
    ruled_out_by: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, where it is, and why this kind."""

    code: str  #: "F01".."F31" or "unclassified"
    kind: str
    stage: str
    confidence: Confidence
    request: RequestId
    role: str
    rank: int
    buffer: str
    layer: int
    pages: tuple[PageFinding, ...]
    rule: str | None = None
    evidence: tuple[str, ...] = ()
    runner_up: RunnerUp | None = None


@dataclass(frozen=True, slots=True)
class Hazard:
    """A disagreement that changed no byte that matters."""

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class NotJudged:
    """A rung that could not be judged, and why. ``detail`` is what ``--verbose`` adds; it is not in the JSON."""

    what: str
    why: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of a replay. ``scope`` says what was judged, ``coverage`` by which hooks, ``losses`` what is missing."""

    verdict: Literal["clean", "divergent", "inconclusive"]
    findings: tuple[Finding, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    cleared: tuple[str, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    scope: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON types, schema ``kv-replay/verdict/1``."""
        body = asdict(self)
        body["not_judged"] = [{"what": item.what, "why": item.why} for item in self.not_judged]
        return {"schema": SCHEMA, **body}


#: Exit codes of the commands (docs: README "Exit codes").
EXIT_CLEAN, EXIT_DIVERGENT, EXIT_USAGE, EXIT_INCONCLUSIVE = 0, 1, 2, 3
EXIT_UNREADABLE, EXIT_INTERNAL, EXIT_INTERRUPTED = 4, 70, 130
