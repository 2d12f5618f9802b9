"""Ways in which a reader can go wrong, put to the test: which of them gives the recorded logits?

A :class:`Hypothesis` says which key a reader that is wrong in one way sees in each row, where that can be known. Its
logits follow from these keys, the recorded query and weights, with the same bound that a right kernel gets. It *fits*
a read when every logit of the read follows from it: those that are wrong, and those that are right by chance or because
the fault does not touch them. One row that fits is a coincidence; :data:`LEAST_ROWS` are not, for a bound is about a
millionth of a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from replay.kernels.reference import decode_pages, decode_rows, logits_of_keys
from replay.recorded import ReadCase

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: Logical pages -> (keys float64[n, rows, dim] that the reader sees for them, which of them are known: bool[n, rows]).
Keys = Callable[[I64], tuple[F64, Bool]]

#: Wrong logits that a hypothesis must give before it counts.
LEAST_ROWS = 4

#: Pages that are tried before a whole read is.
_PROBES = 3

#: Pages at a time: 64 pages of float64 keys take 4 MiB.
_CHUNK = 64

#: Share of the rows of which a hypothesis tells nothing that may be right all the same.
_CHANCE = 0.05


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One way to go wrong at the read."""

    code: str  #: kind of fault that it is a case of, "" where it belongs to none
    what: str  #: what the reader does, in words
    keys: Keys
    open: bool = False  #: it tells only which rows are touched, not what is read in them
    told: bool = False  #: the record of the read itself says that this was done
    zero: bool = False  #: it says that zeros are read: elsewhere a logit of zero is evidence of nothing
    bare: bool = False  #: it says so of every page: nothing tells it from a kernel that computed nothing


@dataclass(frozen=True, slots=True)
class Fit:
    """A hypothesis that gives the recorded logits."""

    hypothesis: Hypothesis
    matched: int  #: wrong logits that it gives
    unknown: int  #: wrong logits of which it tells nothing

    @property
    def whole(self) -> bool:
        """Whether it gives every wrong logit."""
        return self.unknown == 0


class Bytes(Protocol):
    """Memory by address: what a reader that goes astray may look at."""

    def gather(self, addresses: I64, length: int) -> tuple[U8, Bool]:
        """``uint8[n, length]`` from each address on, and which of these bytes are known."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of the process, as far as an address in it is concerned."""

    address: int
    pitch: int
    layer: int
    item_length: int


@dataclass(frozen=True, slots=True)
class Question:
    """One read with wrong logits, and the memory that a wrong reader may have looked at."""

    case: ReadCase
    right: F64  #: logits of the reference
    bound: F64
    wrong: Bool
    memory: Bytes
    buffer: Buffer  #: the one that was to be read
    others: tuple[Buffer, ...] = ()

    def keys(self, pages: I64) -> F64:
        """The right keys of some logical pages: float64[n, rows, dim]."""
        return decode_pages(self.case.layout, self.case.pages[pages])

    def keys_at(self, addresses: I64) -> tuple[F64, Bool]:
        """Keys of pages from these addresses on: float64[n, rows, dim], and which are known: bool[n, rows]."""
        layout = self.case.layout
        data, known = self.memory.gather(addresses, layout.page_bytes)
        parts = known.view(np.uint8)
        rows = np.asarray(layout.values(parts).all(axis=2), bool)
        if layout.scale_bytes:
            rows &= np.asarray(layout.scales(parts).all(axis=2), bool)
        return decode_pages(layout, data), rows

    def rows_at(self, addresses: I64, pages: I64, rows: I64) -> tuple[F64, Bool]:
        """Keys of row ``rows[i]`` of the page at ``addresses[pages[i]]``: float64[n, dim], and which are known."""
        layout = self.case.layout
        data, known = self.memory.gather(addresses, layout.page_bytes)
        parts = known.view(np.uint8)
        told = np.asarray(layout.values(parts)[pages, rows].all(axis=1), bool)
        told &= np.asarray(layout.scales(parts)[pages, rows].all(axis=1), bool)
        return decode_rows(layout, layout.values(data)[pages, rows], layout.scales(data)[pages, rows]), told


def of_bytes(question: Question, seen: Callable[[U8], U8]) -> Keys:
    """Keys of a reader to whom its own pages look like ``seen(pages)``, both uint8[n, page_bytes]."""

    def keys(pages: I64) -> tuple[F64, Bool]:
        found = decode_pages(question.case.layout, seen(question.case.pages[pages]))
        return found, np.ones(found.shape[:2], bool)

    return keys


def at_addresses(question: Question, address: I64) -> Keys:
    """Keys of a reader that takes logical page k from ``address[k]``."""

    def keys(pages: I64) -> tuple[F64, Bool]:
        return question.keys_at(address[pages])

    return keys


def fits(question: Question, hypotheses: Iterable[Hypothesis]) -> Iterator[Fit]:
    """Those of ``hypotheses`` that give the recorded logits of the whole read."""
    rows = question.case.layout.rows
    count = -(-question.case.rows // rows)
    wrong_pages = np.unique(np.flatnonzero(question.wrong) // rows)
    right_pages = np.setdiff1d(np.arange(count), wrong_pages)
    # The fullest wrong page first; the first and the last that are right.
    fullest = wrong_pages[np.argsort(-_per_page(question.wrong, rows)[wrong_pages], kind="stable")]
    probes = np.concatenate([fullest[:_PROBES], right_pages[:1], right_pages[-1:]])
    rest = np.setdiff1d(np.arange(count), probes)
    # One page rules out nearly every hypothesis.
    parts = [fullest[:1], np.setdiff1d(probes, fullest[:1])]
    parts += [rest[start : start + _CHUNK] for start in range(0, len(rest), _CHUNK)]
    for hypothesis in hypotheses:
        tally = _Tally()
        if all(tally.add(question, hypothesis, part) for part in parts if len(part)):
            fit = tally.fit(hypothesis)
            if fit is not None:
                yield fit


def _per_page(mask: Bool, rows: int) -> I64:
    whole = np.zeros(-(-len(mask) // rows) * rows, np.int64)
    whole[: len(mask)] = mask
    return np.asarray(whole.reshape(-1, rows).sum(axis=1))


@dataclass(slots=True)
class _Tally:
    """Rows of one read compared with one hypothesis."""

    matched: int = 0
    unknown: int = 0
    spared: int = 0  #: rows of which it tells nothing and that are right
    empty: int = 0  #: wrong rows that it makes zero, or so little that it cannot be told from zero

    def add(self, question: Question, hypothesis: Hypothesis, pages: I64) -> bool:
        """Compare the rows of ``pages``; whether none of them speaks against the hypothesis."""
        case, rows = question.case, question.case.layout.rows
        keys, known = hypothesis.keys(pages)
        index = (pages[:, None] * rows + np.arange(rows)).reshape(-1)
        inside = index < case.rows
        index, told = index[inside], known.reshape(-1)[inside]
        seen_keys = keys.reshape(-1, case.layout.head_dim)[inside]
        logits, bound = logits_of_keys(
            seen_keys, case.query, case.weights, accumulator_bits=case.accumulator_bits
        )
        seen, wrong = case.logits[index].astype(np.float64), question.wrong[index]
        judged = np.isfinite(question.bound[index])
        with np.errstate(invalid="ignore"):
            same = np.abs(seen - logits) <= bound
        # A key that is no number makes the logit none; a relu that drops NaN makes it 0.
        none = ~np.isfinite(seen_keys).all(axis=1)
        same[none] = (~np.isfinite(seen) | (seen == 0.0))[none]
        # Sums that may rightly overflow can be anything.
        told = told & (none | np.isfinite(bound))
        if hypothesis.told:
            # It was done; what lay there may have changed since it was looked at.
            told = told & (same | ~judged)
        if (told & judged & ~same).any():
            return False
        hit = told & wrong
        with np.errstate(invalid="ignore"):
            faint = ~none & (np.abs(logits) <= bound)
        self.matched += int((hit & np.where(none, ~np.isfinite(seen), ~faint)).sum())
        self.empty += int((hit & faint).sum())
        self.unknown += int((~told & wrong).sum())
        self.spared += int(
            (~told & judged & ~wrong & (np.abs(question.right[index]) > question.bound[index])).sum()
        )
        return True

    def fit(self, hypothesis: Hypothesis) -> Fit | None:
        """The fit, None where too little was told."""
        matched = self.matched + (self.empty if hypothesis.zero or hypothesis.told else 0)
        told = matched + (self.unknown if hypothesis.open or hypothesis.told else 0)
        if told < LEAST_ROWS or self.spared > _CHANCE * (self.unknown + self.spared):
            return None
        return Fit(hypothesis, matched, self.unknown)
