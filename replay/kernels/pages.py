"""The bytes of a page as numbers: exact, in float64, from the layout and the tables of ``formats.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.kernels import formats
from replay.kernels.formats import F64, U8


def value_codes(layout: Layout, stored: U8) -> npt.NDArray[Any]:
    """``uint8[..., value_bytes]`` to one integer code an element: [..., head_dim]."""
    if layout.value_type == "bf16":
        return np.ascontiguousarray(stored).view("<u2")
    return formats.unpack_nibbles(stored) if layout.value_type == "e2m1" else stored


def scale_values(layout: Layout, stored: U8) -> F64:
    """``uint8[..., scale_bytes]`` to one number a scale: float64[..., G]."""
    if layout.scale_type == "fp32":
        with np.errstate(invalid="ignore"):
            return np.ascontiguousarray(stored).view("<f4").astype(np.float64)
    return formats.decode_ue8m0(stored)


def decode_pages(layout: Layout, pages: U8) -> F64:
    """The keys in pages ``uint8[n, page_bytes]``: ``float64[n, rows, head_dim]``, exact."""
    if pages.ndim != 2 or pages.shape[1] < layout.page_bytes:
        raise ValueError(f"{layout.name} pages have {layout.page_bytes} bytes, not shape {pages.shape}")
    return decode_rows(layout, layout.values(pages), layout.scales(pages))


def decode_rows(layout: Layout, stored: U8, stored_scales: U8) -> F64:
    """Keys of ``uint8[..., value_bytes]`` with ``uint8[..., scale_bytes]``: ``float64[..., head_dim]``, exact."""
    values: F64 = formats.TABLES[layout.value_type][value_codes(layout, stored)]
    if layout.scale_type == "none":
        return values
    scales = scale_values(layout, stored_scales)
    with np.errstate(invalid="ignore"):
        grouped: F64 = values.reshape(*scales.shape, layout.scale_block) * scales[..., None]
    return grouped.reshape(values.shape)
