"""Conversions between number formats as Triton device functions: integer bit operations only.

The casts of Triton's interpreter lose the rounding carry, do not saturate and read the e4m3 NaN as 480, so no cast
between float types is used; int32 arithmetic is right on the interpreter and on a GPU. Encoders round to nearest even.
"""

# Device functions have tensors where Python has no type to name: mypy sees them as Any.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round_subnormal(magnitude, step: tl.constexpr):
    # round(x / 2**step) of a small fp32 number: its 24-bit significand, shifted right with ties to even
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
    shift = 150 + step - tl.maximum(exponent, 1)
    shift = tl.minimum(tl.maximum(shift, 1), 30)
    odd = (significand >> shift) & 1
    half = tl.full(magnitude.shape, 1, tl.int32) << (shift - 1)
    return (significand + half - 1 + odd) >> shift


@triton.jit
def encode_e4m3(x):
    """fp32 to e4m3 codes (int32): saturating at 448, every NaN 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude >= 0x3C800000, normal, _round_subnormal(magnitude, -9))
    code = tl.minimum(code, 0x7E) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def encode_bf16(x):
    """fp32 to bf16 codes (int32): every NaN 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # NaN first: the rounding of its bits may overflow
    number = tl.minimum(magnitude, 0x7F800000)
    code = ((number + 0x7FFF + ((number >> 16) & 1)) >> 16) | ((bits >> 16) & 0x8000)
    return tl.where(magnitude > 0x7F800000, 0x7FC0, code)


@triton.jit
def encode_e2m1(x):
    """fp32 to e2m1 codes 0..15 (int32): saturating at 6, every NaN +6."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 2**30 is far past saturation and keeps the sum below 2**31
    number = tl.minimum(magnitude, 0x7F000000)
    normal = ((number + 0x1FFFFF + ((number >> 22) & 1)) >> 22) - 252
    code = tl.where(number >= 0x3F800000, normal, _round_subnormal(number, -1))
    code = tl.minimum(code, 7) | ((bits >> 28) & 8)
    return tl.where(magnitude > 0x7F800000, 7, code)


@triton.jit
def decode_e4m3(code):
    """e4m3 codes (int32 0..255) to fp32."""
    magnitude = code & 0x7F
    # Subnormals by a product: as fp32 bits they would be subnormal fp32 numbers, which a GPU may flush.
    small = magnitude.to(tl.float32) * 0.001953125
    bits = tl.where(magnitude >= 8, (magnitude << 20) + 0x3C000000, small.to(tl.int32, bitcast=True))
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    # << 24 puts the sign of the code into the sign of the number
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def decode_bf16(code):
    """bf16 codes (int32 0..65535) to fp32."""
    return (code << 16).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """e2m1 codes (int32 0..15) to fp32."""
    magnitude = code & 7
    # 0 and 0.5 (0x3F000000) are the subnormals
    bits = tl.where(magnitude >= 2, (magnitude << 22) + 0x3F000000, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def decode_ue8m0(code):
    """ue8m0 codes (int32 0..255) to fp32 powers of two; 0xFF is NaN."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)
