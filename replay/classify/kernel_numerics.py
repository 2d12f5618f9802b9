"""F25: the read kernel's arithmetic.

Signature: bytes, table and lengths are right and known (the pages did not change while the kernel ran), and logits lie
outside the bound that any right kernel keeps. It is what remains when every other way to go wrong at the read was tried
on the same bytes and none gives these logits. Since a reader may also look at memory that nobody has seen,
the logits must still follow the right ones: arithmetic that is off keeps their order in the large.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from replay.classify.base import Kind, claims
from replay.classify.hypotheses import Question
from replay.kernels import formats
from replay.kernels.pages import value_codes
from replay.kernels.reference import logits_of_keys

F64 = npt.NDArray[np.float64]

KIND = Kind(
    code="F25",
    shows="logits outside the bound on known bytes, which no misreading of them gives and which follow the right ones",
    certain=(
        "pages and table were the same before and after the kernel; enough rows are wrong to have tried every "
        "layout, number format, stride and wrapped offset, and the logits are in the order of the right ones"
    ),
    best=claims(digest=None, pages="certain"),
    rivals=(
        ("F07", "no other layout of the same bytes gives these logits"),
        ("F24", "no other number format gives them"),
        ("F21", "the pages do not give zeros from some page id on"),
    ),
)

#: Wrong rows from which on a misreading would have shown as one.
SURE_ROWS = 8
#: Standard deviations of the rank correlation of unrelated logits that these must exceed for the kind to be certain;
#: of fewer than 26 rows, to which that would be out of reach or nearly so, a correlation of 0.9 is asked.
SURE_DEVIATIONS = 4.5
#: Of fewer wrong rows than these, unrelated ones come that close by chance more than once in 10,000 times.
SURE_BY_ORDER = 12


def doubt(question: Question) -> str | None:
    """Why the wrong logits may be no matter of arithmetic."""
    index = np.flatnonzero(question.wrong)
    seen = question.case.logits[index].astype(np.float64)
    if not np.isfinite(seen).all():
        return "logits that are no numbers"
    if len(index) < SURE_ROWS:
        return None
    least = min(0.9, max(0.3, 3.0 / np.sqrt(len(index))))
    if max(_correlation(seen, question.right[index]), _correlation(seen, _unscaled(question)[index])) < least:
        return "the wrong logits have nothing to do with the right ones: other keys were read"
    return None


def sure(question: Question) -> bool:
    """Whether so many of the wrong logits are in the order of the right ones that no other keys can have given them.

    By their ranks, for a few large scales make any two lists alike by value. Of ``n`` unrelated pairs the rank
    correlation has a standard deviation of ``1 / sqrt(n - 1)``, whatever the distribution (Spearman).
    """
    index = np.flatnonzero(question.wrong)
    if len(index) < SURE_BY_ORDER:
        return False
    seen = _ranks(question.case.logits[index].astype(np.float64))
    found = max(_correlation(seen, _ranks(right[index])) for right in (question.right, _unscaled(question)))
    return found >= min(0.9, max(0.3, SURE_DEVIATIONS / math.sqrt(len(index) - 1)))


def _ranks(values: F64) -> F64:
    """Rank of each value; equal ones share theirs."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: F64 = (np.cumsum(count) - (count - 1) / 2)[number]
    return ranks


def _correlation(first: F64, second: F64) -> float:
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / size if size > 0 else 0.0


def _unscaled(question: Question) -> F64:
    """Logits of the same values with every scale 1: what a kernel that takes a wrong scale still follows."""
    case = question.case
    codes = value_codes(case.layout, case.layout.values(case.pages))
    keys = formats.TABLES[case.layout.value_type][codes].reshape(-1, case.layout.head_dim)[: case.rows]
    return logits_of_keys(np.nan_to_num(keys), case.query, case.weights)[0]
