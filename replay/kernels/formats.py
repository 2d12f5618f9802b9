"""Number formats bit by bit: e4m3fn, bf16, e2m1 and ue8m0, decoded from tables and encoded by integer operations.

Everything here is numpy and says how a format is *defined*; the casts of a library or of a device are what is
to be checked, so none is used. Rounding is to nearest, ties to even. Encoders take float32; a float64
argument is rounded to float32 first, so pass float32 where double rounding would matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
BF16_MAX = float(np.float64(2.0) ** 127 * (2.0 - 2.0**-7))

_EXPONENT = 0x7F800000  # fp32 exponent field; a larger magnitude is a NaN


def _tiny_float_table(bits: int, mantissa: int, bias: int) -> F64:
    """Values of a sign/exponent/mantissa format with subnormals and neither infinity nor NaN."""
    codes = np.arange(1 << bits)
    exponent = (codes >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1)
    fraction = (codes & ((1 << mantissa) - 1)) / float(1 << mantissa)
    sign = np.where(codes >> (bits - 1) == 1, -1.0, 1.0)
    magnitude = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1.0 + fraction) * 2.0 ** (exponent.astype(np.float64) - bias),
    )
    return np.asarray(sign * magnitude, np.float64)


def _e4m3_table() -> F64:
    table = _tiny_float_table(8, 3, 7)
    table[[0x7F, 0xFF]] = np.nan  # "fn": no infinities, the two all-ones codes are NaN
    return table


def _ue8m0_table() -> F64:
    table = np.ldexp(1.0, np.arange(256) - 127)
    table[0xFF] = np.nan
    return table


def _bf16_table() -> F64:
    words = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaN codes become quiet ones
        return words.view(np.float32).astype(np.float64)


#: ``float64[256]``: value of each e4m3fn code (NaN at 0x7F and 0xFF).
E4M3: F64 = _e4m3_table()
#: ``float64[16]``: value of each e2m1 code.
E2M1: F64 = _tiny_float_table(4, 1, 1)
#: ``float64[256]``: value of each ue8m0 code, ``2 ** (code - 127)`` (NaN at 0xFF).
UE8M0: F64 = _ue8m0_table()
#: ``float64[65536]``: value of each bf16 code.
BF16: F64 = _bf16_table()

for _table in (E4M3, E2M1, UE8M0, BF16):
    _table.setflags(write=False)

#: Value type of a page format -> value of each of its codes.
TABLES: dict[str, F64] = {"e4m3": E4M3, "bf16": BF16, "e2m1": E2M1}


def _split(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Sign bit and magnitude bits of float32 values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bits >> np.uint32(31), (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)


def _round_subnormal(magnitude: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.int64]:
    """``round(x / 2**step)``, ties to even, for the non-negative fp32 numbers with these bits.

    Only for results that are small; shifts beyond 30 give 0, as they must for a 24-bit significand.
    """
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | np.where(exponent > 0, 0x800000, 0)
    # x = significand * 2**(max(exponent, 1) - 150)
    shift = np.clip(150 + step - np.maximum(exponent, 1), 1, 30)
    odd = (significand >> shift) & 1
    rounded: npt.NDArray[np.int64] = (significand + (np.int64(1) << (shift - 1)) - 1 + odd) >> shift
    return rounded


def _round_normal(magnitude: npt.NDArray[np.int64], mantissa: int, bias: int) -> npt.NDArray[np.int64]:
    """Exponent and mantissa fields after rounding to ``mantissa`` bits; a carry moves into the exponent."""
    drop = 23 - mantissa
    odd = (magnitude >> drop) & 1
    return ((magnitude + (1 << (drop - 1)) - 1 + odd) >> drop) - ((127 - bias) << mantissa)


def encode_e4m3(values: npt.NDArray[Any], *, saturate: bool = True) -> U8:
    """e4m3fn codes (uint8, same shape) of float32 values.

    With ``saturate`` magnitudes beyond 448 and infinities become 448; without it whatever would round past 448
    becomes NaN. NaN becomes 0x7F with its sign.
    """
    sign, magnitude = _split(values)
    normal = _round_normal(magnitude, 3, 7)
    code = np.where(magnitude >= 121 << 23, normal, _round_subnormal(magnitude, -9))
    code = np.where(code > 0x7E, 0x7E if saturate else 0x7F, code)
    code = np.where(magnitude > _EXPONENT, 0x7F, code)
    return np.asarray(code | (sign.astype(np.int64) << 7), np.uint8)


def encode_e2m1(values: npt.NDArray[Any]) -> U8:
    """e2m1 codes 0..15 (uint8, same shape) of float32 values; saturating at 6. NaN becomes +6, as on NVIDIA."""
    sign, magnitude = _split(values)
    code = np.where(magnitude >= 127 << 23, _round_normal(magnitude, 1, 1), _round_subnormal(magnitude, -1))
    code = np.minimum(code, 7) | (sign.astype(np.int64) << 3)
    return np.where(magnitude > _EXPONENT, 7, code).astype(np.uint8)


def encode_bf16(values: npt.NDArray[Any]) -> U16:
    """bf16 codes (uint16, same shape) of float32 values. Overflow gives infinity; NaN becomes 0x7FC0 with its sign."""
    sign, magnitude = _split(values)
    odd = (magnitude >> 16) & 1
    code = np.where(magnitude > _EXPONENT, 0x7FC0, (magnitude + 0x7FFF + odd) >> 16)
    return np.asarray(code | (sign.astype(np.int64) << 15), np.uint16)


def encode_ue8m0_ceil(values: npt.NDArray[Any]) -> U8:
    """ue8m0 codes (uint8, same shape) of the least power of two >= each positive float32 value.

    NaN becomes 0xFF. Infinity and values beyond 2**127 become 0xFE, the largest; zero and negative values become 0.
    """
    sign, magnitude = _split(values)
    code = np.minimum((magnitude + 0x7FFFFF) >> 23, 0xFE)
    # An fp32 subnormal in (2**-127, 2**-126) needs exponent -126, one at or below 2**-127 fits code 0.
    code = np.where(magnitude <= 0x400000, 0, code)
    code = np.where(sign == 1, 0, code)
    return np.where(magnitude > _EXPONENT, 0xFF, code).astype(np.uint8)


def decode_e4m3(codes: U8) -> F64:
    """Values of e4m3fn codes: float64, same shape."""
    return E4M3[codes]


def decode_bf16(codes: U16) -> F64:
    """Values of bf16 codes: float64, same shape."""
    return BF16[codes]


def decode_e2m1(codes: U8) -> F64:
    """Values of e2m1 codes 0..15: float64, same shape."""
    return E2M1[codes]


def decode_ue8m0(codes: U8) -> F64:
    """Values of ue8m0 codes: float64, same shape."""
    return UE8M0[codes]


def pack_nibbles(codes: U8) -> U8:
    """``uint8[..., 2k]`` codes 0..15 to ``uint8[..., k]`` bytes; the low nibble is the even element."""
    return np.asarray((codes[..., 0::2] & 15) | (codes[..., 1::2] << 4), np.uint8)


def unpack_nibbles(packed: U8) -> U8:
    """``uint8[..., k]`` bytes to ``uint8[..., 2k]`` codes 0..15; the low nibble is the even element."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
