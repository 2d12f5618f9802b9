"""The store in float64, and which bytes an fp32 store may rightly have written.

Torch is not imported and nothing here is taken from the kernels. What a kernel computed in fp32 cannot be compared byte
for byte with float64: on right rows an fp32 store differs from it in about 1 % of bf16 rows and in the last bit
of most scales. So every comparison has a bound that is derived, not tuned. ``u = 2**-24`` is the largest
relative error of one fp32 rounding.

A row is RMSNorm(weight, epsilon), rotation of the last 64 dimensions as interleaved (real, imaginary)
pairs, Hadamard of order 128 (Sylvester) / sqrt(128), quantisation. Errors of one fp32 kernel, whatever its order of
summation and whether it fuses multiply and add:

====================================  =======================================================================
inverse of the norm                   (128 u + 3 u) / 2 for the sum of 128 squares, the mean and epsilon, 4 u for a
                                      reciprocal square root (2**-22.9 on NVIDIA; IEEE root and division need 2 u):
                                      70 u in all, the same factor for every element of the row
times inverse, times weight           2 u of each element
rotation                              2 u more, relative to ``|a cos| + |b sin|``
Hadamard                              7 stages: 7 u of the sum of magnitudes
1 / sqrt(128)                         2 u (the constant and the product)
====================================  =======================================================================

With ``A = sum_i |a_i| / sqrt(128)``, where ``a_i`` are the magnitudes after the rotation, a value z before rounding
is wrong by at most ``E = 1.05 u (70 |z| + 13 A)`` (1.05 covers the products of errors) and a tiny absolute term for
subnormal numbers. ``hadamard_terms=127`` instead of 7 allows a Hadamard step made as a plain matrix product.

* fp32 scale: ``max(1e-4, m) / 448`` where m may be anything from ``max(|z| - E)`` to ``max(|z| + E)``, and 4 u for the
  constant and the division. That makes k ulp with k computed for each row (some 20 to 100).
* ue8m0 scale: ``ceil(log2(max(1e-4, m) / 6))`` for any such m, and 16 u for kernels that take an fp32 logarithm. At a
  power of two both neighbours may be right; elsewhere one code is.
* codes: a code is right if the interval ``z / scale +- (E / scale + 4 u |z| / scale)`` meets the closed interval that
  rounds to it (so both sides of a tie are right). ``scale`` is the *stored* scale where it is right itself, since the
  kernel divided by that one, else the reference's. Codes saturate. -0.0 equals 0.0. A NaN code is wrong for a
  finite value.

A row is *not judged* where an fp32 kernel may rightly overflow or where an input is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout
from replay.kernels import formats
from replay.kernels.formats import F32, F64, U8
from replay.kernels.pages import scale_values, value_codes

Bool = npt.NDArray[np.bool_]

HEAD_DIM = 128
ROPE_DIM = 64
LEAST_MAGNITUDE = 1e-4  #: the least magnitude that sets a scale

_U = 2.0**-24
_SPARE = 1.05
_COMMON = 70.0  # errors that multiply the whole row
_OWN = 6.0  # of each element: norm 2, rotation 2, 1/sqrt(128) 2
_SCALE = 4.0
_LOGARITHM = 16.0
_FLUSH = 2.0**-126  # fp32 numbers below it may become 0
_LIMIT = 2.0**127  # half of what fp32 can hold
_CHUNK = 2048  # rows at a time; their float64 values take 2 MiB


def _hadamard(values: F64) -> F64:
    """Each row times the Sylvester matrix H(2n) = [[H, H], [H, -H]], which is applied factor by factor.

    A factor acts on the lowest bit of the index and moves it to the top, so after all of them every bit is back. A
    product with the matrix would start the threads of a BLAS for a page of rows.
    """
    half = values.shape[1] // 2
    spare = np.empty_like(values)
    for _ in range(values.shape[1].bit_length() - 1):
        np.add(values[:, 0::2], values[:, 1::2], out=spare[:, :half])
        np.subtract(values[:, 0::2], values[:, 1::2], out=spare[:, half:])
        values, spare = spare, values
    return values


def unrotated(values: F64, rope: F32) -> F64:
    """Stored values ``float64[n, 128]`` as they were before the Hadamard step and the rotation by ``rope`` of each row.

    Both are orthogonal: lengths and angles between rows of one position stay.
    """
    turned = _hadamard(values.copy()) / np.sqrt(values.shape[1])
    tail = turned[:, -ROPE_DIM:]
    a, b = tail[:, 0::2].copy(), tail[:, 1::2].copy()
    cos, sin = (np.asarray(rope[:, i::2], np.float64) for i in (0, 1))
    tail[:, 0::2] = a * cos + b * sin
    tail[:, 1::2] = b * cos - a * sin
    return np.asarray(turned)


@dataclass(frozen=True, slots=True)
class StoreInputs:
    """What a store was given: keys float32[n, 128], rope float32[n, 64] (cos of pair i at 2i, sin at 2i + 1),
    norm_weight float32[128], epsilon.
    """

    keys: F32
    rope: F32
    norm_weight: F32
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        keys, rope, weight = (np.shape(x) for x in (self.keys, self.rope, self.norm_weight))
        if len(keys) != 2 or keys[1] != HEAD_DIM or rope != (keys[0], ROPE_DIM) or weight != (keys[1],):
            raise ValueError(
                f"a store takes keys[n, 128], rope[n, 64] and norm_weight[128], not {keys}, {rope} and {weight}"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, rows: slice | npt.NDArray[np.int64]) -> StoreInputs:
        """The inputs of some of the rows."""
        return StoreInputs(self.keys[rows], self.rope[rows], self.norm_weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class StoreReference:
    """A store in float64: n rows, G scales a row (0 for bf16, 1 for fp8, 4 for fp4)."""

    values: F64  #: [n, 128] before quantisation
    bound: F64  #: [n, 128] how far a right fp32 value may be from it
    scales: F64  #: [n, G] the reference's scales; a power of two for ue8m0
    least: F64  #: [n, G] the least right scale
    largest: F64  #: [n, G] the largest right scale
    judged: Bool  #: [n] False where an fp32 kernel may overflow or an input is not finite


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """Which stored rows an fp32 store of these inputs can have written.

    ``reproduced`` is False only where something stored is outside its bound; rows that are not ``judged`` count
    as reproduced, so look at both before a row is cleared.
    """

    reproduced: Bool  #: [n]
    judged: Bool  #: [n]
    wrong_codes: Bool  #: [n, 128]
    wrong_scales: Bool  #: [n, G]
    excess: F64  #: [n] largest distance of a value from its code's interval over its bound: 0 inside, 1 at the bound

    def part(self, rows: Bool) -> StoreCheck:
        """The check of some of the rows."""
        return StoreCheck(*(getattr(self, name)[rows] for name in StoreCheck.__slots__))


def rope_rows(positions: npt.NDArray[Any], *, base: float = 10000.0) -> F32:
    """``float32[n, 64]`` (cos of pair i at 2i, sin at 2i + 1) of positions[n], frequency ``base ** (-2i / 64)``."""
    frequency = base ** (-np.arange(0, ROPE_DIM, 2, dtype=np.float64) / ROPE_DIM)
    angle = np.asarray(positions, np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(len(angle), ROPE_DIM).astype(np.float32)


def _ceil_power(magnitudes: F64) -> F64:
    """The least power of two >= each positive number, exactly."""
    fraction, exponent = np.frexp(magnitudes)
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))


def store_reference(
    layout: Layout,
    keys: F32,
    rope: F32,
    norm_weight: F32,
    epsilon: float,
    *,
    hadamard_terms: int = 7,
) -> StoreReference:
    """A store in float64 with its error bounds; see the module for their derivation.

    Args:
        layout: page format.
        keys: float32[n, 128] before RMSNorm.
        rope: float32[n, 64], cos of pair i at 2i, sin at 2i + 1.
        norm_weight: float32[128].
        epsilon: of RMSNorm.
        hadamard_terms: additions that one Hadamard output may go through: 7 for butterflies, 127 for a product.
    """
    inputs = StoreInputs(keys, rope, norm_weight, epsilon)
    parts = [_reference(layout, part, hadamard_terms) for part, _ in _parts(inputs)]
    if not parts:
        parts = [_reference(layout, inputs, hadamard_terms)]
    return StoreReference(*(np.concatenate([getattr(p, f) for p in parts]) for f in StoreReference.__slots__))


def _parts(inputs: StoreInputs) -> Iterator[tuple[StoreInputs, slice]]:
    for start in range(0, len(inputs), _CHUNK):
        rows = slice(start, start + _CHUNK)
        yield inputs.part(rows), rows


def _reference(layout: Layout, inputs: StoreInputs, hadamard_terms: int) -> StoreReference:
    with np.errstate(all="ignore"):  # rows with infinities or NaN are computed along and marked at the end
        keys = np.asarray(inputs.keys, np.float64)
        weight = np.asarray(inputs.norm_weight, np.float64)
        total = np.einsum("nd,nd->n", keys, keys)
        argument = total / keys.shape[1] + inputs.epsilon
        inverse = np.where(argument > 0, 1.0 / np.sqrt(argument), np.inf)
        values = keys * inverse[:, None]
        values *= weight
        sizes = np.abs(values)

        tail = values[:, -ROPE_DIM:]
        a, b = tail[:, 0::2].copy(), tail[:, 1::2].copy()
        cos, sin = (np.asarray(inputs.rope[:, i::2], np.float64) for i in (0, 1))
        tail[:, 0::2] = a * cos - b * sin
        tail[:, 1::2] = a * sin + b * cos
        a, b, cos, sin = (np.abs(x) for x in (a, b, cos, sin))
        sizes[:, -ROPE_DIM::2] = a * cos + b * sin
        sizes[:, -ROPE_DIM + 1 :: 2] = a * sin + b * cos

        root = np.sqrt(keys.shape[1])
        size = sizes.sum(axis=1)
        values = _hadamard(values) / root

        # Subnormal fp32 numbers may be flushed to 0 on the way: keys, squares, products.
        heaviest = np.abs(weight).max()
        flush = _FLUSH * keys.shape[1] * (1.0 + np.maximum(inverse, 1.0) * (1.0 + heaviest))
        common = _COMMON * _U + 0.5 * _FLUSH / argument
        own = (_OWN + hadamard_terms) * _U / root * size
        bound = np.abs(values)
        bound *= (_SPARE * common)[:, None]
        bound += (_SPARE * own + flush)[:, None]

        judged = np.isfinite(size) & (total < _LIMIT) & (size < _LIMIT) & (common < 2.0**-10)
        judged &= np.abs(keys).max(axis=1, initial=0.0) * max(heaviest, 1.0) < _LIMIT

    scales, least, largest = _scale_range(layout, values, bound)
    return StoreReference(values, bound, scales, least, largest, judged)


def _scale_range(layout: Layout, values: F64, bound: F64) -> tuple[F64, F64, F64]:
    """Reference scale, least and largest right scale: float64[n, G] each."""
    count = len(values)
    if layout.scale_type == "none":
        nothing = np.zeros((count, 0))
        return nothing, nothing, nothing
    groups = layout.head_dim // layout.scale_block
    sizes = np.abs(values)
    middle = sizes.reshape(count, groups, layout.scale_block).max(axis=2)
    low = (sizes - bound).reshape(count, groups, layout.scale_block).max(axis=2)
    high = (sizes + bound).reshape(count, groups, layout.scale_block).max(axis=2)
    with np.errstate(invalid="ignore"):
        middle, low, high = (np.maximum(x, LEAST_MAGNITUDE) for x in (middle, low, high))
    if layout.scale_type == "fp32":
        return middle / 448.0, low / 448.0 * (1 - _SCALE * _U), high / 448.0 * (1 + _SCALE * _U)
    with np.errstate(invalid="ignore"):
        return (
            _ceil_power(middle / 6.0),
            _ceil_power(low / 6.0 * (1 - _LOGARITHM * _U)),
            _ceil_power(high / 6.0 * (1 + _LOGARITHM * _U)),
        )


def _intervals(table: F64, saturating: bool) -> tuple[F64, F64]:
    """For each code's magnitude: the closed interval of magnitudes that round to it. NaN codes take none."""
    magnitudes = table[: len(table) // 2].copy()
    finite = np.isfinite(magnitudes)
    limit = int(finite.sum())  # finite magnitudes come first, in rising order
    low = np.full(len(magnitudes), np.inf)
    high = np.full(len(magnitudes), -np.inf)
    between = (magnitudes[: limit - 1] + magnitudes[1:limit]) / 2
    low[1:limit] = between
    high[: limit - 1] = between
    low[0] = -high[0]
    if saturating:
        high[limit - 1] = np.inf
    else:
        edge = magnitudes[limit - 1] + (magnitudes[limit - 1] - magnitudes[limit - 2]) / 2
        high[limit - 1] = edge
        infinite = np.isposinf(magnitudes)
        low[infinite], high[infinite] = edge, np.inf
    return low, high


_INTERVALS = {
    "e4m3": _intervals(formats.E4M3, saturating=True),
    "e2m1": _intervals(formats.E2M1, saturating=True),
    "bf16": _intervals(formats.BF16, saturating=False),
}


def check_store(
    layout: Layout,
    inputs: StoreInputs,
    stored_values: U8,
    stored_scales: U8,
    *,
    hadamard_terms: int = 7,
) -> StoreCheck:
    """Judge stored rows: may an fp32 store of ``inputs`` have written these bytes?

    Args:
        layout: page format.
        inputs: what the store was given, n rows.
        stored_values: uint8[n, value_bytes].
        stored_scales: uint8[n, scale_bytes].
        hadamard_terms: see `store_reference`.
    """
    count = len(inputs)
    wanted = (count, layout.value_bytes), (count, layout.scale_bytes)
    if (stored_values.shape, stored_scales.shape) != wanted:
        raise ValueError(
            f"stored values and scales of {count} {layout.name} rows have shapes {wanted[0]} and {wanted[1]}, "
            f"not {stored_values.shape} and {stored_scales.shape}"
        )
    groups = layout.head_dim // layout.scale_block if layout.scale_bytes else 0
    check = StoreCheck(
        np.ones(count, np.bool_),
        np.zeros(count, np.bool_),
        np.zeros((count, layout.head_dim), np.bool_),
        np.zeros((count, groups), np.bool_),
        np.zeros(count),
    )
    for part, rows in _parts(inputs):
        reference = _reference(layout, part, hadamard_terms)
        _check_part(layout, reference, stored_values[rows], stored_scales[rows], check, rows)
    return check


def _check_part(
    layout: Layout, reference: StoreReference, values: U8, scales: U8, check: StoreCheck, rows: slice
) -> None:
    count = len(values)
    judged = reference.judged
    targets, errors = reference.values, reference.bound
    wrong_scales = np.zeros((count, 0), np.bool_)
    if layout.scale_bytes:
        stored = scale_values(layout, scales)
        wrong_scales = ~((stored >= reference.least) & (stored <= reference.largest)) & judged[:, None]
        with np.errstate(all="ignore"):
            used = np.where(wrong_scales, reference.scales, stored)
            inverse = np.repeat(1.0 / used, layout.head_dim // used.shape[1], axis=1)
            targets = targets * inverse
            errors = errors * inverse
            errors += (_SCALE * _U) * np.abs(targets)
    codes = value_codes(layout, values)
    bits = {"e4m3": 7, "e2m1": 3, "bf16": 15}[layout.value_type]
    low, high = _INTERVALS[layout.value_type]
    magnitude = codes & ((1 << bits) - 1)
    with np.errstate(all="ignore"):
        targets = np.where(codes >> bits != 0, -targets, targets)
        outside = np.maximum(low[magnitude] - targets, targets - high[magnitude])
        wrong_codes = ~(outside <= errors) & judged[:, None]
        excess = np.divide(outside, errors, out=np.full_like(outside, np.inf), where=errors > 0)
        excess = np.where(outside <= 0, 0.0, excess)
    check.judged[rows] = judged
    check.wrong_codes[rows] = wrong_codes
    check.wrong_scales[rows] = wrong_scales
    check.reproduced[rows] = ~(wrong_codes.any(axis=1) | wrong_scales.any(axis=1))
    check.excess[rows] = np.where(judged, excess.max(axis=1, initial=0.0), 0.0)
