"""Other ways to go wrong at the read, which no kind of fault stands for: they keep F25 from being named.

Where one of them gives the recorded logits, the finding stays unclassified and says what was seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay.classify.hypotheses import Hypothesis, Keys, Question, at_addresses

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: Layers whose pages are tried in place of the right one's.
_LAYERS = 64


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Whole pages of zeros, the same pages of another layer, pages of the read in another order."""
    zero = _zero_pages(question)
    if zero.any():
        yield Hypothesis("", "whole pages give exactly zero", _replaced(question, zero, None), zero=True)
    for other in question.others[:_LAYERS]:
        address = other.address + question.case.physical * other.pitch
        yield Hypothesis(
            "", f"the same pages of layer {other.layer} are read", at_addresses(question, address)
        )
    moved = _moved(question)
    if moved is not None:
        first = int(np.flatnonzero(moved != np.arange(len(moved)))[0])
        yield Hypothesis(
            "",
            f"logical page {first} has the logits of logical page {int(moved[first])}",
            _replaced(question, moved != np.arange(len(moved)), moved),
        )


def _zero_pages(question: Question) -> Bool:
    """Logical pages of which every recorded logit is zero and some should not be."""
    rows, count = question.case.layout.rows, len(question.case.physical)
    seen = np.zeros(count * rows)
    seen[: question.case.rows] = question.case.logits[: question.case.rows]
    wrong = np.zeros(count * rows, bool)
    wrong[: question.case.rows] = question.wrong
    with np.errstate(invalid="ignore"):
        zero = (seen.reshape(count, rows) == 0).all(axis=1)
    return np.asarray(zero & wrong.reshape(count, rows).any(axis=1))


def _replaced(question: Question, hit: Bool, by: I64 | None) -> Keys:
    """The right keys, and in some pages zeros or those of another page of the read."""

    def keys(pages: I64) -> tuple[F64, Bool]:
        found = question.keys(pages)
        chosen = hit[pages]
        if chosen.any():
            found[chosen] = 0.0 if by is None else question.keys(by[pages[chosen]])
        return found, np.ones(found.shape[:2], bool)

    return keys


def _moved(question: Question) -> I64 | None:
    """For each wrong page the page of the read whose right logits it has; None where one of them has none."""
    case, rows = question.case, question.case.layout.rows
    count = len(case.physical)
    moved = np.arange(count)
    for page in np.unique(np.flatnonzero(question.wrong) // rows).tolist():
        mine = np.arange(page * rows, min((page + 1) * rows, case.rows))
        whole = np.arange(case.rows // rows if len(mine) == rows else -(-case.rows // rows))
        index = whole[:, None] * rows + np.arange(len(mine))
        index = np.minimum(index, case.rows - 1)
        with np.errstate(invalid="ignore"):
            close = np.abs(case.logits[mine] - question.right[index]) <= question.bound[index]
        fitting = np.flatnonzero(close.all(axis=1))
        if not len(fitting):
            return None
        moved[page] = fitting[0]
    return moved if (moved != np.arange(count)).any() else None
