"""F07: the bytes of every page arrived in another order: the two sides mean different layouts.

Signature: the page holds the same bytes as its source (an order-free checksum is equal), moved by one permutation that
is the same for all pages of the buffer. Either the descriptors say so themselves, or the bytes fit a known layout, or
the bytes of several pages fit one permutation that nobody named. At the read the bytes are right, and the logits are
those of a reader that takes values and scales from the places of another layout.

Chosen over F20, where page 0 is right and other pages hold another page's bytes; over F24, where the bytes are right
and decoded wrongly; over F31, where bytes are missing that no permutation brings back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, unit_mask
from replay.classify.hypotheses import Hypothesis, Question, of_bytes
from replay.classify.page_layouts import hypotheses, same_bytes, unit_orders
from replay.classify.undelivered import look
from replay.verdict import RunnerUp
from replay.words import counted

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: Bytes that must fit only thanks to the permutation: fewer fit by chance.
ENOUGH_BYTES = 64
#: Units (a row's values or its scale word) that must fit only thanks to their order, where only digests were kept.
ENOUGH_UNITS = 8
#: Pages that must fit one unnamed permutation: the more, the fewer bytes look alike in all of them.
ENOUGH_PAGES = 3
#: Pages that are compared for it.
MOST_PAGES = 16
#: One byte in so many is looked at before all are.
_PROBE = 61

KIND = Kind(
    code="F07",
    shows=(
        "every byte of the source page is there, in one other order that is the same for all pages (without bytes: "
        "every row that this order leaves whole, in all pages); at the read: "
        "the logits are those of the right bytes in another order"
    ),
    certain=(
        "the order is that of a known layout, or the descriptors' own; its bytes were kept, or it moves whole rows; "
        "nothing is left unexplained; at the read: "
        "pages and table were the same before and after the kernel, no other misreading fits"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F20", "every page holds its own bytes, and page 0 is permuted as well"),
        ("F31", "the same bytes are there in another order: none was lost"),
        ("F03", "each byte of the source is brought once, within its own page"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """All of ``bad`` where the page in ``stage`` is the expected one in another order."""
    expected = next((name for name in ("SE+", "SE", "ST") if case.has(name)), "")
    if stage != "RC" and case.has("RC"):
        expected = "RC"
    if expected == "":
        return None
    right, seen = case.data(expected), case.data(stage)
    said = _descriptors(case, evidence) if stage == "RC" else None
    if right is None or seen is None or len(right) != len(seen) or len(right) != case.layout.page_bytes:
        if said is None:
            return _units_moved(case, evidence, bad, expected, stage)
        return _told(case, bad & _moved(case, said), bad, said, expected, stage, bytes_fit=None)
    if said is not None and _fits(case, right, seen, said):
        return _told(case, bad & _moved(case, said), bad, said, expected, stage, bytes_fit=True)
    for name, permutation in hypotheses(case.layout):
        if _fits(case, right, seen, permutation):
            return _told(case, bad, bad, permutation, expected, stage, bytes_fit=True, name=name)
    if same_bytes(right, seen) and _one_order(case, evidence, expected, stage):
        return _told(case, bad, bad, None, expected, stage, bytes_fit=True)
    return None


def _told(
    case: Case,
    explained: Bool,
    bad: Bool,
    permutation: I64 | None,
    expected: str,
    stage: str,
    *,
    bytes_fit: bool | None,
    name: str = "",
    seen: str = "",
) -> Explanation | None:
    if not explained.any():
        return None
    if permutation is not None and not name:
        known = (label for label, other in hypotheses(case.layout) if np.array_equal(other, permutation))
        name = next(known, "in the order that the descriptors give")
    values, scales = halves(explained)
    lines = [
        f"{in_words(values, scales)}: the page holds its own bytes in another order "
        f"({name or 'one order for all pages, of no layout that was tried'})"
        if bytes_fit
        else f"{in_words(values, scales)} are there in another order ({name})"
    ]
    if seen:
        lines = [
            f"{in_words(values, scales)} differ; {seen} lie where a page {name} has them",
            "the other rows are cut up by that layout: without bytes they cannot be followed",
        ]
    if bytes_fit:
        lines.append("an order-free checksum of the page is that of its source")
    sure = permutation is not None and bool((explained == bad).all())
    return Explanation(
        code="F07",
        stage="descriptor",
        confidence="certain" if sure else "likely",
        explained=explained,
        expected=expected,
        observed=stage,
        evidence=tuple(lines),
        rule=f"the page is {name}" if name else "one order for all pages",
        runner_up=RunnerUp("F31", "the same bytes are there in another order: none was lost"),
    )


def _units_moved(case: Case, evidence: Evidence, bad: Bool, expected: str, stage: str) -> Explanation | None:
    """Rows and scale words in another order: their digests show it without bytes.

    Where a layout moves whole rows the page tells it alone. One that cuts rows leaves only some units whole: all pages
    of the request must agree in them, and none may keep a row that it cuts.
    """
    for name, order in unit_orders(case.layout):
        whole = bool((order >= 0).all())
        pages = [case] if whole else _alike(case, evidence, expected, stage)
        counts = [_followed(page, order, expected, stage) for page in pages]
        rows, words = (sum(numbers) for numbers in zip(*counts, strict=True))
        # Scale words repeat: alone they tell nothing.
        moved = rows if whole else rows + words
        if min(counts) < (0, 0) or not rows or moved < ENOUGH_UNITS:
            continue
        if whole:
            return _told(case, bad, bad, order, expected, stage, bytes_fit=None, name=name)
        seen = (
            f"{counted(moved, 'row or scale word', 'rows and scale words')} in {counted(len(pages), 'page')}"
        )
        return _told(case, bad, bad, None, expected, stage, bytes_fit=None, name=name, seen=seen)
    return None


def _alike(case: Case, evidence: Evidence, expected: str, stage: str) -> list[Case]:
    """The pages of the request that differ, in every buffer of this format."""
    found = evidence.siblings.buffers(case).values() if evidence.siblings is not None else ()
    pages = [page for _, cases in found for page in cases if page.layout == case.layout]
    return [page for page in pages if page.has(expected, stage)] or [case]


def _followed(case: Case, order: I64, expected: str, stage: str) -> tuple[int, int]:
    """Units (values, scales) that are right only by ``order``; (-1, -1) where one that it tells of is not."""
    right, seen, known = case.units[expected], case.units[stage], order >= 0
    if len(right) != len(seen) or len(right) != len(order):
        return -1, -1
    source = np.where(known, order, np.arange(len(order)))
    judged = case.valid & case.valid[source]
    values, scales = halves(judged & known & (right[source] != right))
    kept, _ = halves(judged & ~known & (right == seen))
    if bool((right[source] != seen)[judged & known].any()) or bool(kept.any()):
        return -1, -1
    return int(values.sum()), int(scales.sum())


def _fits(case: Case, right: U8, seen: U8, permutation: I64) -> bool:
    """Whether every byte of a valid row is what ``permutation`` puts there (bytes that come from rows past the valid
    ones are nobody's claim), and enough of them differ from where they should be.
    """
    valid = halves(case.valid)[0][_row_of_byte(case.layout)]
    # A few bytes rule out nearly every order.
    few = permutation[::_PROBE]
    if bool(((right[few] != seen[::_PROBE]) & valid[::_PROBE] & valid[few]).any()):
        return False
    judged = valid & valid[permutation]
    moved = right[permutation]
    same = moved == seen
    # What the rows past the valid ones held was looked at as well: without it, half a page could decide.
    return bool(same[judged].all()) and int((judged & (moved != right) & same).sum()) >= ENOUGH_BYTES


@lru_cache(maxsize=16)
def _row_of_byte(layout: Layout) -> I64:
    """The row that each byte of a page belongs to, ``int64[page_bytes]``."""
    rows = np.arange(layout.rows)
    found = np.concatenate([np.repeat(rows, layout.value_bytes), np.repeat(rows, layout.scale_bytes)])
    found.flags.writeable = False
    return found


def _descriptors(case: Case, evidence: Evidence) -> I64 | None:
    """The permutation that the request's own descriptors make of the page; None where they make none."""
    found = look(case, evidence)
    if found is None or len(found.here) < 2:
        return None
    pieces, size = evidence.descriptors.pieces, case.layout.page_bytes
    permutation = np.full(size, -1, np.int64)
    for row in found.here.tolist():
        start, stop, at = int(pieces.start[row]), int(pieces.stop[row]), int(pieces.source_start[row])
        own = int(pieces.source[row]) == found.source and int(pieces.source_page[row]) == found.source_page
        if not own or at + stop - start > size:
            return None
        permutation[start:stop] = np.arange(at, at + stop - start)
    identity = np.array_equal(permutation, np.arange(size))
    return None if identity or not np.array_equal(np.sort(permutation), np.arange(size)) else permutation


def _moved(case: Case, permutation: I64) -> Bool:
    """Units that the permutation fills with other bytes than their own."""
    return unit_mask(case.layout, permutation != np.arange(len(permutation)), some=True)


def _one_order(case: Case, evidence: Evidence, expected: str, stage: str) -> bool:
    """Whether the bytes of several pages of the buffer fit one permutation: at each place of the page stands what one
    other place should hold, in all pages alike.
    """
    if evidence.siblings is None:
        return False
    before, after = [], []
    for other in evidence.siblings.pages(case)[: 4 * MOST_PAGES]:
        right, seen = other.data(expected), other.data(stage)
        if right is None or seen is None or len(right) != len(seen) or not bool(other.valid.all()):
            continue
        if np.array_equal(right, seen):
            return False
        before.append(right)
        after.append(seen)
        if len(before) == MOST_PAGES:
            break
    if len(before) < ENOUGH_PAGES:
        return False
    return bool(np.array_equal(_places(before), _places(after)))


def _places(pages: list[U8]) -> npt.NDArray[np.bytes_]:
    """What stands at each place in all of ``pages``, sorted."""
    columns = np.ascontiguousarray(np.stack(pages).T)
    return np.sort(columns.view(f"S{columns.shape[1]}").ravel())


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Readers that assume another layout of the page."""
    for name, permutation in hypotheses(question.case.layout):
        yield Hypothesis("F07", f"a page {name}", of_bytes(question, _permuted(permutation)))


def _permuted(permutation: I64) -> Callable[[U8], U8]:
    return lambda pages: pages[:, permutation]
