"""F24: the reader decodes right bytes as another number format.

Signature: every logit of the read follows from the same bytes decoded otherwise: off by a factor of two, no number
where a byte is 0x80 (e4m3fnuz has no negative zero), fp32 scales taken for powers of two, fp16 for bf16. Told apart
from a permuted layout and a wrong stride because each row is decoded from its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.classify.base import Kind, claims
from replay.classify.hypotheses import Hypothesis, Keys, Question
from replay.kernels import formats
from replay.kernels.pages import scale_values, value_codes

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

KIND = Kind(
    code="F24",
    shows="every logit follows from the same bytes in another number format, or is the same factor off",
    certain="pages and table were the same before and after the kernel; no other kind of misreading fits",
    best=claims(digest=None, pages="certain"),
    rivals=(
        ("F07", "each row is decoded from its own bytes in their places"),
        ("F20", "each page is read at its own address"),
        ("F25", "one format for all rows gives every logit"),
    ),
)

#: What a page format is called by kernels that are told one: ``Read.number_format``.
TAGS = {"fp8": "e4m3fn/fp32", "bf16": "bf16", "fp4": "e2m1/ue8m0"}

FACTORS = (2.0, 0.5, 4.0, 0.25)


def _fnuz() -> F64:
    """e4m3fnuz: the exponent is one less than in e4m3fn, 0x80 is NaN, 0x7F and 0xFF are numbers."""
    table = formats.E4M3 / 2.0
    table[[0x7F, 0xFF]] = [240.0, -240.0]
    table[0x80] = np.nan
    return table


def _e5m2() -> F64:
    codes = np.arange(256, dtype=np.uint16) << 8
    return codes.view(np.float16).astype(np.float64)


def _fp16() -> F64:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)


def _integers() -> F64:
    return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)


#: Value type -> tables that its codes could be looked up in by mistake.
VALUES: dict[str, tuple[tuple[str, Callable[[], F64]], ...]] = {
    "e4m3": (
        ("e4m3fn values read as e4m3fnuz", _fnuz),
        ("e4m3fn values read as e5m2", _e5m2),
        ("e4m3fn values read as 8-bit integers", _integers),
    ),
    "bf16": (("bf16 values read as fp16", _fp16),),
    "e2m1": (),
}


def _floor_power(words: U8) -> F64:
    """fp32 scales of which only the exponent is taken: float64[..., 1]."""
    bits = np.ascontiguousarray(words).view("<u4").astype(np.int64)
    return np.asarray(np.ldexp(1.0, ((bits >> 23) & 0xFF) - 127))


def _ceil_power(words: U8) -> F64:
    bits = np.ascontiguousarray(words).view("<u4").astype(np.int64)
    return np.asarray(np.ldexp(1.0, ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0)))


def _nearest_power(words: U8) -> F64:
    bits = np.ascontiguousarray(words).view("<u4").astype(np.int64)
    return np.asarray(np.ldexp(1.0, ((bits + 0x400000) >> 23 & 0xFF) - 127))


def _byte_power(byte: int) -> Callable[[U8], F64]:
    return lambda words: formats.decode_ue8m0(words[..., byte : byte + 1])


def _as_float(words: U8) -> F64:
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(words).view("<f4").astype(np.float64)


#: Scale type -> readings of its bytes by mistake: float64[..., scales a row].
SCALES: dict[str, tuple[tuple[str, Callable[[U8], F64]], ...]] = {
    "fp32": (
        ("fp32 scales read as ue8m0: the exponent alone", _floor_power),
        ("fp32 scales rounded up to powers of two", _ceil_power),
        ("fp32 scales rounded to powers of two", _nearest_power),
        ("the four bytes of an fp32 scale read as four ue8m0 scales", formats.decode_ue8m0),
    ),
    "ue8m0": (
        ("four ue8m0 scales read as one fp32 scale", _as_float),
        ("the first of four ue8m0 scales read for all", _byte_power(0)),
    ),
    "none": (),
}


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Readers that decode the right bytes as another format."""
    layout = question.case.layout
    for name, table in VALUES[layout.value_type]:
        yield Hypothesis("F24", name, _decoded(question, table=table()))
    for name, scales in SCALES[layout.scale_type]:
        yield Hypothesis("F24", name, _decoded(question, scales=scales))
    if layout.value_type == "e2m1":
        # No number format: a permutation within each byte, which no kind of fault stands for.
        yield Hypothesis("", "the two e2m1 values of a byte read in the other order", _nibbles(question))
    for factor in FACTORS:
        yield Hypothesis("F24", f"all keys {factor:g} times as large", _scaled(question, factor))


def _decoded(question: Question, table: F64 | None = None, scales: Callable[[U8], F64] | None = None) -> Keys:
    layout = question.case.layout

    def keys(pages: I64) -> tuple[F64, Bool]:
        data = question.case.pages[pages]
        codes = value_codes(layout, layout.values(data))
        values = (table if table is not None else formats.TABLES[layout.value_type])[codes]
        found = _with_scales(layout, values, data, scales)
        return found, np.ones(found.shape[:2], bool)

    return keys


def _with_scales(layout: Layout, values: F64, data: U8, scales: Callable[[U8], F64] | None) -> F64:
    if layout.scale_type == "none":
        return values
    stored = layout.scales(data)
    factor = scales(stored) if scales is not None else scale_values(layout, stored)
    block = layout.head_dim // factor.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        grouped = values.reshape(*values.shape[:-1], factor.shape[-1], block) * factor[..., None]
    return np.asarray(grouped.reshape(values.shape))


def _nibbles(question: Question) -> Keys:
    layout = question.case.layout

    def keys(pages: I64) -> tuple[F64, Bool]:
        data = question.case.pages[pages]
        stored = layout.values(data)
        codes = formats.unpack_nibbles(np.asarray((stored >> 4) | (stored << 4), np.uint8))
        found = _with_scales(layout, formats.E2M1[codes], data, None)
        return found, np.ones(found.shape[:2], bool)

    return keys


def _scaled(question: Question, factor: float) -> Keys:
    def keys(pages: I64) -> tuple[F64, Bool]:
        found = question.keys(pages) * factor
        return found, np.ones(found.shape[:2], bool)

    return keys
