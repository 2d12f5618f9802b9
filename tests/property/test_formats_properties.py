"""The number formats against two independent makers of them: torch, and ml_dtypes where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.kernels import formats

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)
#: Around every rounding boundary of the small formats: few mantissa bits set, one off to each side.
NEAR = st.lists(
    st.tuples(st.integers(0, 1), st.integers(100, 150), st.integers(0, 31), st.integers(-2, 2)),
    min_size=1,
    max_size=64,
)


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def near(parts: list[tuple[int, int, int, int]]) -> np.ndarray:
    return floats([((s << 31) | (e << 23) | (m << 18)) + d for s, e, m, d in parts])


def nearest(table: np.ndarray, value: float) -> int:
    """The code by search: least distance, ties to the even code, saturating; sign kept for zero."""
    negative = bool(np.signbit(value))
    half = table[: len(table) // 2]
    finite = np.flatnonzero(np.isfinite(half))
    magnitude = min(abs(float(value)), float(half[finite].max()))
    distance = np.abs(half[finite] - magnitude)
    best = [int(code) for code in finite[distance == distance.min()]]
    code = next((c for c in best if c % 2 == 0), best[0])
    return code + (len(half) if negative else 0)


def check_by_search(values: np.ndarray) -> None:
    values = values[~np.isnan(values)]
    assert formats.encode_e4m3(values).tolist() == [nearest(formats.E4M3, v) for v in values]
    assert formats.encode_e2m1(values).tolist() == [nearest(formats.E2M1, v) for v in values]


@given(BITS)
def test_encoders_give_the_nearest_code_of_any_float(bits: list[int]) -> None:
    check_by_search(floats(bits))


@given(NEAR)
def test_encoders_round_ties_to_even_and_carry_into_the_exponent(
    parts: list[tuple[int, int, int, int]],
) -> None:
    check_by_search(near(parts))


@given(NEAR)
def test_ue8m0_is_the_least_power_of_two_that_is_not_smaller(parts: list[tuple[int, int, int, int]]) -> None:
    values = np.abs(near(parts))
    scales = formats.decode_ue8m0(formats.encode_ue8m0_ceil(values))
    assert (scales >= values).all()
    assert (scales / 2 < values).all()


def test_every_code_survives_a_round_trip() -> None:
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[~np.isnan(formats.E4M3)]
    assert np.array_equal(formats.encode_e4m3(formats.decode_e4m3(finite).astype(np.float32)), finite)
    nibbles = codes[:16]
    assert np.array_equal(formats.encode_e2m1(formats.decode_e2m1(nibbles).astype(np.float32)), nibbles)
    powers = codes[:255]
    assert np.array_equal(formats.encode_ue8m0_ceil(formats.decode_ue8m0(powers).astype(np.float32)), powers)
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[~np.isnan(formats.BF16)]
    assert np.array_equal(formats.encode_bf16(formats.decode_bf16(words).astype(np.float32)), words)


def test_nibbles_pack_the_even_element_low() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (5, 128)).astype(np.uint8)
    packed = formats.pack_nibbles(codes)
    assert packed[2, 7] == codes[2, 14] | (codes[2, 15] << 4)
    assert np.array_equal(formats.unpack_nibbles(packed), codes)


def test_special_values_have_one_documented_code() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 1e30, 464.0, 465.0], np.float32)
    assert formats.encode_e4m3(special).tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E]
    assert formats.encode_e4m3(special, saturate=False).tolist() == [0x7F, 0x7F, 0xFF, 0x7F, 0x7E, 0x7F]
    assert formats.encode_e2m1(special[:3]).tolist() == [7, 7, 15]
    assert formats.encode_bf16(special[:3]).tolist() == [0x7FC0, 0x7F80, 0xFF80]
    assert formats.encode_ue8m0_ceil(np.array([np.nan, np.inf, 0, -1], np.float32)).tolist() == [
        255,
        254,
        0,
        0,
    ]


def sample() -> np.ndarray:
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    mantissa = rng.integers(0, 2**23, 200_000) & rng.choice([0x7FFFFF, 0x780000, 0x7C0001, 0x600000], 200_000)
    usual = (rng.integers(110, 140, 200_000) << 23 | mantissa).astype(np.uint32)
    values = np.concatenate([anything, usual, usual | np.uint32(1 << 31)]).view(np.float32)
    return values[~np.isnan(values)]


def test_torch_makes_the_same_codes_and_values() -> None:
    torch = pytest.importorskip("torch")
    values = sample()
    tensor = torch.from_numpy(values)
    bf16 = tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(formats.encode_bf16(values), bf16)
    inside = np.abs(values) <= 448.0
    e4m3 = tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(formats.encode_e4m3(values)[inside], e4m3[inside])
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = codes.view(torch.float8_e4m3fn).to(torch.float64).numpy()
    assert np.array_equal(formats.E4M3, decoded, equal_nan=True)


def test_ml_dtypes_makes_the_same_codes_and_values() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = sample()
    with np.errstate(all="ignore"):
        for table, dtype, raw in (
            (formats.E4M3, ml_dtypes.float8_e4m3fn, np.arange(256, dtype=np.uint8)),
            (formats.UE8M0, ml_dtypes.float8_e8m0fnu, np.arange(256, dtype=np.uint8)),
            (formats.E2M1, ml_dtypes.float4_e2m1fn, np.arange(16, dtype=np.uint8)),
            (formats.BF16, ml_dtypes.bfloat16, np.arange(1 << 16, dtype=np.uint16)),
        ):
            assert np.array_equal(table, raw.view(dtype).astype(np.float64), equal_nan=True), dtype
        e4m3 = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        e2m1 = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        bf16 = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(formats.encode_e4m3(values, saturate=False), e4m3)
    assert np.array_equal(formats.encode_e2m1(values), e2m1)
    assert np.array_equal(formats.encode_bf16(values), bf16)
