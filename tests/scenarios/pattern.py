"""The test pattern: page contents in which every byte tells whose it is.

Each byte of a row follows from the request, the layer, the token position and the dimension, so that a
wrong byte in a scenario is wrong in a way that can be counted. There are no NaN codes (value bytes are 1 to
119) and all rows of requests 0-9, layers 0-3 and positions 0-2047 are distinct.

One row a token; a page holds 64 rows. ``standard`` scales name the row; ``powers`` are powers of two, as
real index-K scales often are, and repeat every seven rows: evidence from scales alone is weak there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import layout

U8 = npt.NDArray[np.uint8]
Scales = Literal["standard", "powers"]

ROWS = 64
SCALES: tuple[Scales, ...] = ("standard", "powers")


def value_rows(request: int, layer: int, tokens: npt.ArrayLike, width: int = 128) -> U8:
    """Value bytes ``uint8[len(tokens), width]`` of the rows at ``tokens``."""
    t = np.asarray(tokens, np.uint64)[:, None].astype(np.uint32)
    d = np.arange(width, dtype=np.uint32)[None, :]
    x = (
        (t + np.uint32(1)) * np.uint32(2654435761)
        + (d + np.uint32(1)) * np.uint32(2246822519)
        + np.uint32((request + 1) * 3266489917 % 2**32)
        + np.uint32((layer + 1) * 668265263 % 2**32)
    )
    x ^= x >> np.uint32(15)
    x *= np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return (1 + x % np.uint32(119)).astype(np.uint8)


def scale_rows(request: int, layer: int, tokens: npt.ArrayLike, scales: Scales = "standard") -> U8:
    """fp32 scales ``uint8[len(tokens), 4]`` of the rows at ``tokens``, as bytes."""
    t = np.asarray(tokens, np.int64)
    if scales == "standard":
        words = 1 + (t % 1024) / 1024 + request / 8 + layer / 64
    else:
        words = np.exp2((t + 3 * request) % 7 - 3.0)
    return words.astype("<f4").view(np.uint8).reshape(-1, 4)


def exponent_rows(request: int, layer: int, tokens: npt.ArrayLike) -> U8:
    """ue8m0 scales ``uint8[len(tokens), 4]`` for fp4 pages: one exponent per 32 elements."""
    t = np.asarray(tokens, np.int64)[:, None]
    block = np.arange(4)[None, :]
    return (110 + (t + 3 * request + 5 * block + layer) % 31).astype(np.uint8)


def rows(
    request: int,
    layer: int,
    tokens: npt.ArrayLike,
    *,
    scales: Scales = "standard",
    format: str = "fp8",
) -> tuple[U8, U8]:
    """Value bytes and scale bytes of the rows at ``tokens`` in a page format."""
    spec = layout(format)
    values = value_rows(request, layer, tokens, spec.value_bytes)
    if spec.scale_type == "fp32":
        return values, scale_rows(request, layer, tokens, scales)
    if spec.scale_type == "ue8m0":
        return values, exponent_rows(request, layer, tokens)
    return values, np.zeros((len(values), 0), np.uint8)


def page(request: int, layer: int, logical: int, *, scales: Scales = "standard", format: str = "fp8") -> U8:
    """P(q, l, k): the bytes of logical page ``logical``, ``uint8[page_bytes]``."""
    tokens = np.arange(ROWS * logical, ROWS * (logical + 1))
    values, words = rows(request, layer, tokens, scales=scales, format=format)
    return np.concatenate([values.ravel(), words.ravel()])


def pages(request: int, layer: int, logical: Iterable[int], **how: Any) -> U8:
    """``uint8[n, page_bytes]`` of several logical pages."""
    return np.stack([page(request, layer, k, **how) for k in logical])
