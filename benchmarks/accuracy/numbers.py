"""Number formats of the simulated caches: rows of floats to bytes and back, and what a kernel with wrong tags sees.

Written from the formats, not from ``replay.kernels``: the world must not share arithmetic with what judges it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_LEAST = np.float32(1e-4)


def _e4m3_table(bias: int, *, fnuz: bool) -> F32:
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent, (1 + fraction / 8) * 2.0 ** (exponent - bias), fraction / 8 * 2.0 ** (1 - bias))
    found = sign * size
    if fnuz:
        found[0x80] = np.nan
    else:
        found[[0x7F, 0xFF]] = np.nan
    return found.astype(np.float32)


E4M3FN = _e4m3_table(7, fnuz=False)
E4M3FNUZ = _e4m3_table(8, fnuz=True)


def to_e4m3(values: F32) -> U8:
    """Round to nearest even, saturating at 448."""
    size = np.minimum(np.abs(values), np.float32(448))
    bits = size.view(np.uint32).astype(np.int64)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = np.rint(size * np.float32(512)).astype(np.int64)
    code = np.where(size < np.float32(2.0**-6), small, normal)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def to_bf16(values: F32) -> U8:
    """Round to nearest even; two little-endian bytes a value."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    high = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return high.astype("<u2").view(np.uint8)


def to_e2m1(values: F32) -> U8:
    """Codes of four bits, one a byte; ties to the even code, saturating at 6."""
    size = np.abs(values)
    middles = (_E2M1[:-1] + _E2M1[1:]) / 2
    code = np.searchsorted(middles, size, side="left")
    tie = np.isin(size, middles) & (code % 2 == 1)
    code = np.where(tie, code + 1, code)
    return (code | np.where(np.signbit(values), 8, 0)).astype(np.uint8)


def quantise(layout: Layout, values: F32, *, powers: bool = False) -> tuple[U8, U8]:
    """What a right store writes for float32[n, 128]: ``(uint8[n, value_bytes], uint8[n, scale_bytes])``.

    ``powers`` rounds fp32 scales up to powers of two, as engines with ue8m0 scales do.
    """
    count = len(values)
    if layout.scale_type == "none":
        return to_bf16(values).reshape(count, layout.value_bytes), np.zeros((count, 0), np.uint8)
    if layout.scale_type == "fp32":
        scale = np.maximum(np.abs(values).max(1), _LEAST) / np.float32(448)
        if powers:
            scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
        codes = to_e4m3(values / scale[:, None])
        return codes, scale.astype("<f4").view(np.uint8).reshape(count, 4)
    blocks = values.reshape(count, layout.head_dim // layout.scale_block, layout.scale_block)
    largest = np.maximum(np.abs(blocks).max(2), _LEAST)
    fraction, exponent = np.frexp(largest.astype(np.float64) / 6)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    scaled = blocks / np.exp2(exponent).astype(np.float32)[..., None]
    codes = to_e2m1(scaled.astype(np.float32)).reshape(count, layout.head_dim)
    return codes[:, 0::2] | codes[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


#: Format -> tags of its numbers, as a kernel is told them.
TAGS = {"fp8": "e4m3fn/fp32", "bf16": "bf16", "fp4": "e2m1/ue8m0"}


def decode(layout: Layout, values: U8, scales: U8, tags: str = "") -> F32:
    """Keys float32[n, 128] of value rows uint8[n, value_bytes] and scale rows, read with ``tags``."""
    tags = tags or TAGS[layout.name]
    kind, _, scale_kind = tags.partition("/")
    count = len(values)
    with np.errstate(all="ignore"):
        if kind in ("bf16", "fp16"):
            words = np.ascontiguousarray(values).view("<u2")
            if kind == "fp16":
                return words.view("<f2").astype(np.float32)
            return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if kind == "e2m1":
            codes = np.stack([values & 15, values >> 4], -1).reshape(count, -1)
            numbers = np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7]).astype(np.float32)
            blocks = numbers.reshape(count, 4, -1)
            shift = 128 if scale_kind == "ue8m0-128" else 127
            return (blocks * np.exp2(scales.astype(np.float32) - shift)[..., None]).reshape(count, -1)
        table = E4M3FNUZ if kind == "e4m3fnuz" else E4M3FN
        words = np.ascontiguousarray(scales).view("<u4")[:, 0]
        if scale_kind == "ue8m0":  # only the exponent is looked at
            words = words & np.uint32(0x7F800000)
        return table[values] * words.view(np.float32)[:, None]
