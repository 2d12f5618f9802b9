"""F22: an index of a token is taken for an index of a page. Here at the read; at the store in ``moved_as_pages.py``.

Signature: the rows of a page give the logits of the first row of other pages, those whose number is the index of the
token or of its slot, or one row is repeated for the whole page.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay.classify.base import Kind, claims
from replay.classify.hypotheses import Hypothesis, Keys, Question

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F22",
    shows=(
        "at the read: each row gives the logit of a row of the page whose number is the row's token or slot; at the "
        "store: a move of rows was given the length of a page and landed on a page as a whole"
    ),
    certain=(
        "at the read: pages and table were the same before and after the kernel, most of these pages are known; at the "
        "store: the move is ordered between the two looks, and the page holds what it took"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F20", "rows of one page come from different pages, or are all the same"),
        ("F07", "rows are whole, and taken from another place"),
    ),
)


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Readers that take a token's or a slot's index for a page's."""
    rows = question.case.layout.rows
    yield Hypothesis("F22", "one row is read for the whole page: its first", _first_row(question))
    inside = np.arange(rows)
    slots = question.case.physical[:, None] * rows + inside
    tokens = np.arange(len(question.case.physical))[:, None] * rows + inside
    for name, index in (
        ("the slot of a row is used as a page id", slots),
        ("the index of a row is used as a page id", tokens),
        ("the index of a row is used as an index into the table", _entries(question, tokens)),
    ):
        yield Hypothesis("F22", f"{name}: the first row there is read", _rows(question, index, first=True))
        yield Hypothesis("F22", f"{name}: the same row there is read", _rows(question, index, first=False))


def _entries(question: Question, tokens: I64) -> I64:
    """Page that the table names at the index of a row, -1 past its end."""
    physical = question.case.physical
    inside = tokens < len(physical)
    return np.where(inside, physical[np.minimum(tokens, len(physical) - 1)], -1)


def _first_row(question: Question) -> Keys:
    def keys(pages: I64) -> tuple[F64, Bool]:
        found = question.keys(pages)
        found[:] = found[:, :1]
        return found, np.ones(found.shape[:2], bool)

    return keys


def _rows(question: Question, index: I64, *, first: bool) -> Keys:
    """Row r of logical page k is taken from page ``index[k, r]``, its first row or row r."""
    case, buffer = question.case, question.buffer
    rows = case.layout.rows

    def keys(pages: I64) -> tuple[F64, Bool]:
        found = np.zeros((len(pages), rows, case.layout.head_dim))
        known = np.zeros((len(pages), rows), bool)
        for number, page in enumerate(pages.tolist()):
            wanted, back = np.unique(index[page], return_inverse=True)
            row = np.zeros(rows, np.int64) if first else np.arange(rows)
            there, told = question.rows_at(buffer.address + wanted * buffer.pitch, back, row)
            found[number], known[number] = there, told & (wanted >= 0)[back]
        return found, known

    return keys
