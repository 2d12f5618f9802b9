"""The read in float64: logits and how far an fp32 kernel may rightly be from them, and what is wrong with a top-k.

``u = 2**-24`` is the largest relative error of one fp32 rounding.

``logit[row] = sum_h weights[h] * relu(dot_h)`` with ``dot_h = sum_d query[h, d] * key[row, d]``:

* Summed in fp32 in any order, ``dot_h`` errs by at most ``e_h = 1.05 u (128 + 1) s_h`` with
  ``s_h = sum_d |query[h, d] * key[row, d]|``: 128 for a product and 127 additions, 1 for the decoded key; 1.05
  covers the products of errors.
* relu does not enlarge an error, and a head with ``dot_h <= -e_h`` gives exactly 0.
* The weighted sum over H heads adds ``1.05 u (H + 2) sum_h |weights[h]| relu(dot_h)``: a product, H - 1 additions, 2
  for a scale that is multiplied last.

The bound of a row is the sum of ``|weights[h]| e_h`` over the heads with ``dot_h > -e_h``, plus that term (and a tiny
absolute term for subnormal numbers). It is one number for each row; a norm over all rows would hide a single
bad one.

Tensor cores that keep only B = ``accumulator_bits`` fraction bits while they add fp8 products (about 13 on Hopper)
cut every addend at that fraction of the largest one, in each of 4 steps of 32 products. That needs
``2**-B (128 max_d |query[h, d]| max_d |key[row, d]| + 4 s_h)`` more in ``e_h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.kernels.formats import F32, F64, U8
from replay.kernels.pages import decode_pages
from replay.words import counted, verb

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

_U = 2.0**-24
_SPARE = 1.05
_FLUSH = 2.0**-126  # fp32 numbers below it may become 0
_LIMIT = 2.0**127  # half of what fp32 can hold
_CHUNK = 8192  # rows at a time


def logits_reference(
    layout: Layout,
    pages: U8,
    rows: int,
    query: F32,
    weights: F32,
    *,
    accumulator_bits: int | None = None,
) -> tuple[F64, F64]:
    """Logits in float64 and, for each row, how far a right fp32 kernel may be from them.

    Args:
        layout: page format.
        pages: uint8[p, page_bytes] in table order.
        rows: length in rows, at most ``p * layout.rows``.
        query: float32[H, 128], the values that the kernel used.
        weights: float32[H].
        accumulator_bits: fraction bits that a tensor core keeps while it adds products (13 for fp8 on Hopper);
            None for fp32 sums.

    Returns:
        ``(logits float64[rows], bound float64[rows])``. The bound is infinite where fp32 may overflow or a key, a
        query or a weight is not finite: such a row is not judged.
    """
    if not 0 <= rows <= len(pages) * layout.rows:
        raise ValueError(
            f"{counted(len(pages), f'{layout.name} page')} {verb(len(pages), 'holds', 'hold')} "
            f"0..{len(pages) * layout.rows} rows, not {rows}"
        )
    if query.ndim != 2 or query.shape[1] != layout.head_dim or weights.shape != (query.shape[0],):
        raise ValueError(
            f"a read takes query[H, {layout.head_dim}] and weights[H], not {query.shape} and {weights.shape}"
        )
    logits = np.zeros(rows)
    bound = np.zeros(rows)
    step = max(1, _CHUNK // layout.rows)
    for first in range(0, -(-rows // layout.rows), step):
        part = slice(first * layout.rows, min(rows, (first + step) * layout.rows))
        keys = decode_pages(layout, pages[first : first + step]).reshape(-1, layout.head_dim)
        logits[part], bound[part] = logits_of_keys(
            keys[: part.stop - part.start], query, weights, accumulator_bits=accumulator_bits
        )
    return logits, bound


def logits_of_keys(
    keys: F64, query: F32, weights: F32, *, accumulator_bits: int | None = None
) -> tuple[F64, F64]:
    """As :func:`logits_reference`, for keys ``float64[n, dim]`` that were decoded before."""
    q = np.asarray(query, np.float64)
    w = np.asarray(weights, np.float64)
    heads, dim = q.shape
    with np.errstate(all="ignore"):
        # Subnormal keys, products and sums may be flushed to 0.
        flush = _FLUSH * (dim + 1) * (1.0 + heads * (1.0 + np.abs(w).max()) * (1.0 + np.abs(q).max()))
        dots = q @ keys.T
        sizes = np.abs(q) @ np.abs(keys).T
        errors = (_SPARE * _U * (dim + 1)) * sizes
        if accumulator_bits is not None:
            peaks = np.abs(q).max(axis=1)[:, None] * np.abs(keys).max(axis=1)
            errors += 2.0**-accumulator_bits * (dim * peaks + 4.0 * sizes)
        errors[dots <= -errors] = 0.0
        np.maximum(dots, 0.0, out=dots)
        logits: F64 = w @ dots
        total = np.abs(w) @ sizes
        error = np.abs(w) @ errors + (_SPARE * _U * (heads + 2)) * (np.abs(w) @ dots)
        error += flush
        return logits, np.where(np.isfinite(total) & (total < _LIMIT), error, np.inf)


def wrong_logits(logits: npt.NDArray[Any], reference: F64, bound: F64) -> Bool:
    """Rows whose logit is outside its bound (bool[rows]); rows with an infinite bound are not judged, so False."""
    with np.errstate(invalid="ignore"):
        return ~(np.abs(np.asarray(logits, np.float64) - reference) <= bound) & np.isfinite(bound)


@dataclass(frozen=True, slots=True)
class TopKViolations:
    """What is wrong with a top-k. Slots are indices into it; all empty and ``judged``: nothing."""

    invalid: I64  #: slots among the first min(rows, k) that hold no row of the request, or that do not exist
    repeated: I64  #: slots that hold a row which an earlier slot holds
    low: I64  #: slots whose row has a logit below the k-th largest (or ``slack`` below it)
    surplus: I64  #: slots past min(rows, k) that are not -1
    judged: bool  #: False where the logits have a NaN: then ``low`` is empty

    def __bool__(self) -> bool:
        return self.within or len(self.surplus) > 0

    @property
    def within(self) -> bool:
        """Whether anything is wrong with the slots that a reader of the top-k uses."""
        return any(len(x) for x in (self.invalid, self.repeated, self.low))


def top_k_violations(
    logits: npt.NDArray[Any], top_k: npt.NDArray[Any], rows: int, k: int, *, slack: F64 | None = None
) -> TopKViolations:
    """Compare a top-k with the logits it was taken from. Any order, and any choice among equal logits, is right.

    Args:
        logits: [>= rows] as the kernel computed them.
        top_k: integers [any length], row indices, -1 where there is none.
        rows: length of the request in rows.
        k: how many were asked for.
        slack: float64[rows], for logits that are not the kernel's own: how far each may be off.
    """
    wanted = min(rows, k)
    scores = np.asarray(logits[:rows], np.float64)
    if len(scores) < rows:
        raise ValueError(f"{len(scores)} logits for {rows} rows")
    entries = np.full(max(wanted, len(top_k)), -1, np.int64)
    entries[: len(top_k)] = top_k
    head = entries[:wanted]
    valid = (head >= 0) & (head < rows)
    invalid = np.flatnonzero(~valid)
    _, firsts = np.unique(head, return_index=True)
    later = np.ones(wanted, np.bool_)
    later[firsts] = False
    repeated = np.flatnonzero(later & valid)
    surplus = wanted + np.flatnonzero(entries[wanted:] != -1)
    judged = not np.isnan(scores).any()
    low = np.zeros(0, np.int64)
    if wanted and judged:
        upper = scores if slack is None else scores + slack
        lower = scores if slack is None else scores - slack
        threshold = np.partition(lower, rows - wanted)[rows - wanted]
        slots = np.flatnonzero(valid)
        low = slots[upper[head[slots]] < threshold]
    return TopKViolations(invalid, repeated, low, surplus, judged)
