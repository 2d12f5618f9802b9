"""F20: page p is looked for at byte ``p * stride`` with another stride than the buffer's.

At the read: page 0 is right, and every other page gives the keys that lie at ``p * stride``: page c * p where the
stride is a multiple, another layer's where layers lie side by side in a slab. In the table: each entry is c times the
page that the allocator gave. At the store: ``stride_at_store.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import LAYOUTS
from replay.classify.base import Evidence, Kind, claims
from replay.classify.hypotheses import Hypothesis, Question, at_addresses
from replay.classify.table_entries import listed, recorded, wrong_entries
from replay.findings import PageEvidence
from replay.tables import TableCase
from replay.timeline import Timeline
from replay.verdict import RunnerUp
from replay.words import counted

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F20",
    shows=(
        "the logits of each page are those of the bytes at p * s, or each table entry is c * p, for one constant; at "
        "the store: the kernel was given another stride than the pages have, and its rows lie where that leads"
    ),
    certain=(
        "most of what lies there is known and gives the logits; at the table: two pages or more, and the "
        "allocation is ordered before the read; at the store: it is ordered before the look, and after the one before "
        "it where another page was hit"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F18", "one factor leads from the allocator's pages to all entries"),
        ("F07", "pages are right in themselves, and taken from another place"),
        ("F21", "pages below the 32-bit boundary are wrong as well"),
    ),
)

#: Factors between the stride that was used and the right one.
FACTORS = (2, 3, 4, 8, 16, 32, 64, 128)


def strides(question: Question) -> list[int]:
    """Strides that a reader could have used in place of the buffer's, the likeliest first."""
    right, layout = question.buffer.pitch, question.case.layout
    found = [question.case.stride, layout.page_bytes, question.buffer.item_length]
    found += [other.pitch for other in question.others] + [other.item_length for other in question.others]
    found += [spec.page_bytes for spec in LAYOUTS.values()]
    found += [right * factor for factor in FACTORS]
    found += [right // factor for factor in FACTORS if right % factor == 0]
    # A view of elements instead of bytes, and the values of a page without its scales.
    found += [layout.scale_base, layout.page_bytes * 2, layout.page_bytes // 2]
    return [stride for stride in dict.fromkeys(found) if stride > 0 and stride != right]


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Readers with another stride."""
    right = question.buffer.pitch
    if right <= 0:
        return
    for stride in strides(question):
        of = f" = page {stride // right} * p" if stride % right == 0 else ""
        what = f"page p is read at byte p * {stride:,}{of}, the stride of the buffer is {right:,}"
        address = question.buffer.address + question.case.physical * stride
        told = stride == question.case.stride
        yield Hypothesis("F20", what, at_addresses(question, address), told=told)


def at_table(timeline: Timeline, evidence: Evidence, case: TableCase) -> list[PageEvidence]:
    """A table whose entries are all c times the pages given; nothing where they are not, or where it is one alone."""
    factor = _factor(timeline, case)
    if factor == 0:
        return []
    step, rows = (int(timeline.trace.table("read")[name][case.read]) for name in ("step", "rows"))
    return wrong_entries(
        timeline,
        case,
        "F20",
        sure=recorded(timeline, evidence, case),
        evidence=(
            f"the allocator gave pages {listed(case.given)}; the table names {listed(case.seen)}: each is {factor} "
            "times its page",
            f"step {step}, {counted(rows, 'row')}",
        ),
        rule=f"entry = {factor} * page",
        runner_up=RunnerUp("F18", "one factor leads from the allocator's pages to all entries"),
    )


def _factor(timeline: Timeline, case: TableCase) -> int:
    """C where every entry of a table is c times the page given, two of them at least; 0 where there is no such c."""
    given, seen = np.array(case.given, np.int64), np.array(case.seen, np.int64)
    if len(given) < 2 or (given <= 0).any() or (seen % given != 0).any():
        return 0
    factors = np.unique(seen // given)
    if len(factors) != 1 or int(factors[0]) < 2:
        return 0
    # Page 0 is the same under every factor; any other entry that is right speaks against one.
    reads, rows = timeline.trace.table("read"), timeline.buffers[case.buffer].layout.rows
    needed = -(-int(reads["rows"][case.read]) // rows)
    entries = np.asarray(reads.ragged("table_after" if case.during else "table")[case.read], np.int64)[
        :needed
    ]
    right = np.setdiff1d(np.arange(len(entries)), np.array(case.logical, np.int64))
    return int(factors[0]) if not entries[right].any() else 0
