"""What comes of comparing two traces: the places in which they differ, and what was compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.align import Pair
from replay.verdict import Ranges

SCHEMA = "kv-replay/diff/1"


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows of one page that differ in one look.

    ``page_good`` and ``page_bad`` are the physical pages. ``appended``: the reading side wrote the rows itself, so they
    follow from what was computed before. ``read`` counts the reads of the request, -1 for other looks.
    """

    stage: str
    look: str
    pair: Pair
    role: str
    rank: int
    buffer: str
    layer: int
    logical: int
    page_good: int
    page_bad: int
    read: int = -1
    appended: bool = False
    value_rows: Ranges = ()
    scale_rows: Ranges = ()
    byte_ranges: Ranges = ()
    bytes_differing: int | None = None
    detail: str = ""  #: in words, for what is no page


@dataclass(slots=True)
class Comparison:
    """What two traces have in common, and where they part, in the order of the ladder."""

    pairs: list[Pair]
    alone_good: list[tuple[int, int]]
    alone_bad: list[tuple[int, int]]
    compared: dict[str, int] = field(default_factory=dict)  #: stage -> looks at pages, or reads
    not_compared: dict[str, int] = field(default_factory=dict)  #: why -> how often
    differences: list[Difference] = field(default_factory=list)
    largest_logit_difference: float = 0.0  #: as a part of the largest logit of the read

    @property
    def comparable(self) -> bool:
        """Whether anything could be compared."""
        return any(self.compared.values())
