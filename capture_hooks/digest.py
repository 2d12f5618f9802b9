"""Digests of pages and rows, in numpy. The Triton twin in ``digest_triton.py`` gives the same bits.

A digest must change with every byte and with every exchange of places, and must be cheap enough for each page at
each stage. All arithmetic is modulo 2**64; ``mix`` is the finaliser of splitmix64 (two multiplications, three
shifts), a bijection.

* Row: ``row = sum_i mix(word_i + (i + 1) * STEP)`` over the little-endian 8-byte words of the row's value bytes.
  Changing one word changes one term by a bijection, so the digest changes for certain; the place is part of
  the term, so an exchange of words changes two terms.
* Page: ``page[j] = sum_r mix(row_r + (2r + 1) * SEED_j) + mix(scale_r + (2r + 2) * SEED_j)`` for two seeds, over
  the row digests and the scale words. It needs nothing but those two, so a page digest can be had from a
  trace that kept no bytes.

Scales are kept as they are (one little-endian 4-byte word a row; 0 in formats without scales): they need no digest.
These are checks against accidents, not against somebody who builds collisions on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

STEP = 0x9E3779B97F4A7C15
SEEDS = (0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7)
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

# Two temporaries of this many words each (256 KiB): they stay in the second-level cache, and large inputs need no
# more memory than small ones.
_BLOCK_WORDS = 32_768


@dataclass(frozen=True, slots=True)
class PageDigests:
    """Digests of n pages with R rows each."""

    digests: U64  #: ``uint64[n, 2]``, one page digest a page
    row_values: U64  #: ``uint64[n, R]``, digest of each row's value bytes
    row_scales: U32  #: ``uint32[n, R]``, the scale bytes of each row as one word


def digest_pages(layout: Layout, pages: U8) -> PageDigests:
    """Digest ``pages`` (``uint8[n, page_bytes]``; rows of the array may be further apart than their length).

    Temporary memory is bounded (about 1 MiB). Raises ``ValueError`` for another shape or dtype.
    """
    _check(layout, pages)
    count, width = len(pages), layout.value_bytes // 8
    row_values = np.empty((count, layout.rows), np.uint64)
    places = (np.arange(1, width + 1, dtype=np.uint64)) * np.uint64(STEP)
    block = max(1, _BLOCK_WORDS // (layout.rows * width))
    terms = np.empty((min(block, count), layout.rows, width), np.uint64)
    spare = np.empty_like(terms)
    for first in range(0, count, block):
        values = np.ascontiguousarray(pages[first : first + block, : layout.scale_base])
        words = values.view("<u8").reshape(len(values), layout.rows, width)
        part = terms[: len(words)]
        np.add(words, places, out=part)
        _mix(part, spare[: len(words)])
        np.sum(part, axis=2, dtype=np.uint64, out=row_values[first : first + block])
    row_scales = layout.scale_words(pages)
    return PageDigests(page_digests(row_values, row_scales), row_values, row_scales)


def page_digests(row_values: U64, row_scales: U32) -> U64:
    """Page digests ``uint64[n, 2]`` from row digests ``uint64[n, R]`` and scale words ``uint32[n, R]``."""
    if row_values.ndim != 2 or row_values.shape != row_scales.shape:
        raise ValueError(
            "row digests and scale words must have one shape [pages, rows], "
            f"not {row_values.shape} and {row_scales.shape}"
        )
    count, rows = row_values.shape
    found = np.empty((count, 2), np.uint64)
    block = max(1, _BLOCK_WORDS // max(1, rows))
    odd = np.arange(1, 2 * rows, 2, dtype=np.uint64)
    terms = np.empty((min(block, count), rows), np.uint64)
    spare = np.empty_like(terms)
    for first in range(0, count, block):
        values, scales = row_values[first : first + block], row_scales[first : first + block]
        part, free = terms[: len(values)], spare[: len(values)]
        for half, seed in enumerate(SEEDS):
            np.add(values, odd * np.uint64(seed), out=part)
            _mix(part, free)
            total = part.sum(axis=1, dtype=np.uint64)
            np.add(scales, (odd + np.uint64(1)) * np.uint64(seed), out=part)
            _mix(part, free)
            found[first : first + block, half] = total + part.sum(axis=1, dtype=np.uint64)
    return found


def _mix(words: U64, spare: U64) -> None:
    """splitmix64's finaliser in place; ``spare`` is a temporary of the same shape."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(words, np.uint64(shift), out=spare)
        np.bitwise_xor(words, spare, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(31), out=spare)
    np.bitwise_xor(words, spare, out=words)


def _check(layout: Layout, pages: U8) -> None:
    if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != layout.page_bytes:
        raise ValueError(
            f"expected pages of format {layout.name} as uint8[n, {layout.page_bytes}], "
            f"not {pages.dtype}{list(pages.shape)}"
        )
    if layout.value_bytes % 8 or layout.scale_bytes not in (0, 4):
        raise ValueError(
            f"format {layout.name}: a digest needs rows of whole 8-byte words and scales of 4 bytes or none"
        )
