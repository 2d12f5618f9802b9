"""Other layouts that the bytes of a page could have: what F07 tries, in a transfer and at the read.

A hypothesis is a permutation of the bytes of one page. Sources of the layouts: planar and interleaved index-K pages
(vLLM, SGLang), the 16 x 16 tiles of the pre-shuffled index-K cache on ROCm (vLLM), head-major and token-major pages
(HND and NHD, vLLM and TensorRT-LLM).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

TILE = 16
HEADS = (2, 4, 8, 16)


#: Numbers of groups in which the rows of a page could be dealt out.
GROUPS = (2, 4, 8, 16, 32)


@lru_cache(maxsize=16)
def row_orders(rows: int) -> tuple[tuple[str, I64], ...]:
    """(name, order) of layouts that move whole rows, values and scale: a right page *dealt* row by row to groups."""
    return tuple(
        (f"dealt to {groups} groups of rows", np.arange(rows).reshape(groups, -1).T.ravel())
        for groups in GROUPS
        if rows % groups == 0 and groups < rows
    )


@lru_cache(maxsize=16)
def hypotheses(layout: Layout) -> tuple[tuple[str, I64], ...]:
    """(name, permutation) of each layout that a page of ``layout`` could be mistaken for.

    ``page[permutation]``, with ``permutation`` as ``int64[page_bytes]``, is a right page *written as* the other layout
    (what a copy into that layout leaves), or a right page *read as* it (what a reader that assumes it takes for values
    and scales, in their planar places). Each layout is there in both directions; the identity is not.
    """
    values = np.arange(layout.scale_base).reshape(layout.rows, layout.value_bytes)
    scales = np.arange(layout.scale_base, layout.page_bytes).reshape(layout.rows, layout.scale_bytes)
    found: list[tuple[str, I64]] = []

    def add(name: str, permutation: I64) -> None:
        inverse = np.empty_like(permutation)
        inverse[permutation] = np.arange(len(permutation))
        for how, candidate in (("written", permutation), ("read", inverse)):
            known = any(np.array_equal(candidate, other) for _, other in found)
            if not known and not np.array_equal(candidate, np.arange(len(candidate))):
                candidate.flags.writeable = False
                found.append((f"{how} as {name}", candidate))

    def shuffled(name: str, moved: I64) -> None:
        """Values in another order, scales where they are."""
        add(name, np.concatenate([moved.ravel(), scales.ravel()]))

    if layout.scale_bytes:
        add("interleaved rows", np.concatenate([values, scales], axis=1).ravel())
        add("scales before values", np.concatenate([scales.ravel(), values.ravel()]))
    element = 2 if layout.value_type == "bf16" else 1
    for width in sorted({TILE, TILE * element}):
        if layout.rows % TILE or layout.value_bytes % width:
            continue
        tiles = values.reshape(layout.rows // TILE, TILE, layout.value_bytes // width, width)
        named = "16 x 16 tiles" if width == TILE else f"tiles of 16 rows x {width} bytes"
        shuffled(named, tiles.transpose(0, 2, 1, 3))
        shuffled(f"{named}, columns first", tiles.transpose(2, 0, 1, 3))
    for heads in HEADS:
        if layout.value_bytes % (heads * element) == 0:
            split = values.reshape(layout.rows, heads, layout.value_bytes // heads)
            shuffled(f"HND with {heads} heads", split.transpose(1, 0, 2))
    for name, order in row_orders(layout.rows):
        moved = np.concatenate([values[order].ravel(), scales[order].ravel()])
        if not any(np.array_equal(moved, other) for _, other in found):
            found.append((name, moved))
    by_element = values.reshape(layout.rows, layout.value_bytes // element, element)
    shuffled("dimensions before rows", by_element.transpose(1, 0, 2))
    return tuple(found)


@lru_cache(maxsize=16)
def unit_orders(layout: Layout) -> tuple[tuple[str, I64], ...]:
    """(name, order) of each hypothesis as far as digests can follow it.

    ``order``, ``int64[2 * rows]``, is the unit (a row's values; behind all of these its scale word) that each unit
    holds whole, -1 where its bytes are pieces.
    """
    rows = layout.rows

    def order(permutation: I64) -> I64:
        found = np.full(2 * rows, -1, np.int64)
        if not layout.scale_bytes:
            found[rows:] = np.arange(rows, 2 * rows)
        for first, base, size in ((0, 0, layout.value_bytes), (rows, layout.scale_base, layout.scale_bytes)):
            if not size:
                continue
            source = permutation[base : base + rows * size].reshape(rows, size)
            unit, inside = np.divmod(source[:, 0] - base, size)
            whole = (inside == 0) & (unit >= 0) & (unit < rows)
            whole &= (source == source[:, :1] + np.arange(size)).all(axis=1)
            found[first : first + rows][whole] = first + unit[whole]
        return found

    return tuple((name, order(permutation)) for name, permutation in hypotheses(layout))


def same_bytes(first: U8, second: U8) -> bool:
    """Whether two pages hold the same bytes in any order (an order-free checksum cannot tell them apart)."""
    if len(first) != len(second):
        return False
    return np.array_equal(np.bincount(first, minlength=256), np.bincount(second, minlength=256))
