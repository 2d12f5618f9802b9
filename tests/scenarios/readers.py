"""Readers with a fault: what a kernel computes that takes right bytes wrongly, written without the judge's code.

A reader gives the keys that it sees (float64[rows, 128]); :func:`told` turns them into what is recorded of a read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import layout
from tests.scenarios.side import Side

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

#: (side, layer, table, rows) -> keys.
Reader = Callable[[Side, int, Sequence[int], int], F64]


def e4m3(codes: U8, *, bias: int = 7) -> F64:
    """Values of e4m3fn codes; with ``bias`` 8 those of e4m3fnuz, in which 0x80 is the only NaN."""
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent, fraction = ((codes >> 3) & 15).astype(int), (codes & 7) / 8.0
    size = np.where(exponent, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    values = sign * size
    if bias == 8:
        values[codes == 0x80] = np.nan
    return np.asarray(values)


def words(scales: U8) -> F64:
    """fp32 scales ``uint8[..., 4]`` as numbers."""
    return np.ascontiguousarray(scales).view("<f4")[..., 0].astype(np.float64)


def planar(pages: U8, rows: int, *, bias: int = 7) -> F64:
    """Keys of fp8 pages in their own layout."""
    values = e4m3(pages[:, :8192].reshape(-1, 128), bias=bias)
    return np.asarray(values * words(pages[:, 8192:8448].reshape(-1, 4))[:, None])[:rows]


def interleaved(side: Side, layer: int, table: Sequence[int], rows: int) -> F64:
    """S6: values at r * 132, the scale at r * 132 + 128."""
    pairs = side.memory[layer][list(table)].reshape(-1, 132)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(e4m3(pairs[:, :128]) * words(pairs[:, 128:])[:, None])[:rows]


def of_pages(change: Callable[[U8], U8]) -> Reader:
    """A reader to whom its pages look like ``change(pages)``."""
    return lambda side, layer, table, rows: planar(change(side.memory[layer][list(table)]), rows)


def at_pages(other: Callable[[int], int]) -> Reader:
    """A reader that takes page ``other(p)`` for page p."""
    return lambda side, layer, table, rows: planar(side.memory[layer][[other(page) for page in table]], rows)


def by_row(place: Callable[[int, int], tuple[int, int]]) -> Reader:
    """A reader that takes for row r of page p the row ``place(p, r) = (page, row)``."""

    def read(side: Side, layer: int, table: Sequence[int], rows: int) -> F64:
        pages = [place(table[row // 64], row % 64) for row in range(rows)]
        keys = planar(side.memory[layer], side.pages * 64).reshape(side.pages, 64, 128)
        return keys[[page for page, _ in pages], [row for _, row in pages]]

    return read


def scaled(factor: Callable[[F64], F64]) -> Reader:
    """A reader that takes ``factor(scale)`` for each fp32 scale."""

    def read(side: Side, layer: int, table: Sequence[int], rows: int) -> F64:
        pages = side.memory[layer][list(table)]
        scales = words(pages[:, 8192:8448].reshape(-1, 4))[:rows]
        return np.asarray(planar(pages, rows) / scales[:, None] * factor(scales)[:, None])

    return read


def told(
    side: Side, layer: int, table: Sequence[int], rows: int, reader: Reader
) -> Callable[[dict[str, Any]], None]:
    """For ``Scene.read(change=...)``: logits and top-k that follow from what ``reader`` sees."""

    def change(read: dict[str, Any]) -> None:
        keys = reader(side, layer, table, rows)
        query = read["query"].reshape(-1, layout(side.format).head_dim).astype(np.float64)
        with np.errstate(invalid="ignore"):
            dots = np.maximum(query @ keys.T, 0.0)
            read["logits"] = (read["weights"].astype(np.float64) @ dots).astype(np.float32)
        best = np.argsort(-read["logits"], kind="stable")[: read["k"]]
        read["top_k"] = np.full(read["k"], -1, np.int32)
        read["top_k"][: len(best)] = best

    return change
