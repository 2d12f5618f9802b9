"""What the reference accepts and refuses of a read and of a top-k."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from capture_hooks.layouts import LAYOUTS, Layout
from replay.kernels import formats
from replay.kernels.check import keys_for
from replay.kernels.reference import decode_pages, logits_reference, top_k_violations, wrong_logits
from replay.kernels.twins import decode_torch, store_torch

FORMATS = sorted(LAYOUTS)


def make_pages(layout: Layout, count: int, seed: int = 0) -> np.ndarray:
    rows = count * layout.rows
    inputs = keys_for(np.random.default_rng(seed), rows)
    cache = torch.zeros((count, layout.page_bytes), dtype=torch.uint8)
    keys, rope, weight = (torch.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight))
    store_torch(layout, cache, torch.arange(rows), keys, rope, weight, inputs.epsilon)
    return cache.numpy()


def make_query(seed: int, heads: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((heads, 128)).astype(np.float32)
    return query, rng.standard_normal(heads).astype(np.float32)


def key_by_hand(layout: Layout, page: bytes, row: int, dim: int) -> float:
    """One element, from the byte offsets in the table of formats."""
    if layout.name == "fp8":
        scale = np.frombuffer(page[8192 + 4 * row : 8196 + 4 * row], "<f4")[0]
        return float(formats.E4M3[page[128 * row + dim]]) * float(scale)
    if layout.name == "bf16":
        low, high = page[256 * row + 2 * dim], page[256 * row + 2 * dim + 1]
        return float(formats.BF16[low | high << 8])
    byte = page[64 * row + dim // 2]
    code = byte & 15 if dim % 2 == 0 else byte >> 4
    return float(formats.E2M1[code]) * 2.0 ** (page[4096 + 4 * row + dim // 32] - 127)


@pytest.mark.parametrize("name", FORMATS)
def test_pages_are_decoded_from_the_documented_offsets(name: str) -> None:
    layout = LAYOUTS[name]
    pages = make_pages(layout, 2)
    decoded = decode_pages(layout, pages)
    rng = np.random.default_rng(1)
    for page, row, dim in zip(
        rng.integers(0, 2, 300), rng.integers(0, 64, 300), rng.integers(0, 128, 300), strict=True
    ):
        assert decoded[page, row, dim] == key_by_hand(layout, pages[page].tobytes(), int(row), int(dim))


@pytest.mark.parametrize("name", FORMATS)
def test_the_torch_twin_decodes_any_bytes_alike(name: str) -> None:
    layout = LAYOUTS[name]
    pages = np.random.default_rng(2).integers(0, 256, (40, layout.page_bytes), dtype=np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        reference = decode_pages(layout, pages).astype(np.float32)
    twin = decode_torch(layout, torch.from_numpy(pages)).numpy()
    assert np.array_equal(reference, twin, equal_nan=True)


def in_float32(
    layout: Layout, pages: np.ndarray, rows: int, query: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """A slow fp32 read whose sums run from left to right: the worst order there is."""
    keys = decode_pages(layout, pages).astype(np.float32).reshape(-1, 128)[:rows]
    dots = np.zeros((len(query), rows), np.float32)
    for dim in range(128):
        dots += query[:, dim, None] * keys[None, :, dim]
    total = np.zeros(rows, np.float32)
    for head, weight in enumerate(weights):
        total += weight * np.maximum(dots[head], np.float32(0))
    return total


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_a_right_fp32_read_is_within_the_bound(name: str, heads: int) -> None:
    layout = LAYOUTS[name]
    pages = make_pages(layout, 40, seed=heads)
    query, weights = make_query(3, heads)
    rows = 40 * 64 - 7
    reference, bound = logits_reference(layout, pages, rows, query, weights)
    logits = in_float32(layout, pages, rows, query, weights)
    assert not wrong_logits(logits, reference, bound).any()
    assert np.isfinite(bound).all()
    assert np.max(np.abs(logits - reference) / bound) > 1e-3  # the bound is not absurdly wide


def wrong_share(layout: Layout, change: Any) -> float:
    pages = make_pages(layout, 20, seed=4)
    query, weights = make_query(5)
    reference, bound = logits_reference(layout, pages, 1280, query, weights)
    other = change(pages.copy(), query.copy(), weights.copy())
    logits = in_float32(layout, other[0], 1280, other[1], other[2])
    return float(wrong_logits(logits, reference, bound).mean())


@pytest.mark.parametrize("name", FORMATS)
def test_small_faults_of_a_read_are_outside_the_bound(name: str) -> None:
    layout = LAYOUTS[name]

    def rounded_query(pages: np.ndarray, query: np.ndarray, weights: np.ndarray) -> Any:
        return pages, formats.decode_bf16(formats.encode_bf16(query)).astype(np.float32), weights

    def one_head_lost(pages: np.ndarray, query: np.ndarray, weights: np.ndarray) -> Any:
        weights[17] = 0
        return pages, query, weights

    def last_dimensions_lost(pages: np.ndarray, query: np.ndarray, weights: np.ndarray) -> Any:
        query[:, 124:] = 0
        return pages, query, weights

    def scales_of_the_next_row(pages: np.ndarray, query: np.ndarray, weights: np.ndarray) -> Any:
        scales = layout.scales(pages)
        scales[:] = np.roll(scales, 1, axis=1)
        return pages, query, weights

    assert wrong_share(layout, lambda *a: a) == 0.0
    assert wrong_share(layout, rounded_query) > 0.6
    assert wrong_share(layout, one_head_lost) > 0.4  # half of the rows have a negative dot product there
    assert wrong_share(layout, last_dimensions_lost) > 0.8
    if layout.name == "fp8":
        assert wrong_share(layout, scales_of_the_next_row) > 0.8


def test_one_bad_row_among_thousands_is_found() -> None:
    layout = LAYOUTS["fp8"]
    pages = make_pages(layout, 64, seed=6)
    query, weights = make_query(7)
    reference, bound = logits_reference(layout, pages, 4096, query, weights)
    logits = reference.astype(np.float32)
    logits[1234] += np.float32(0.2)  # beside logits of +-100
    assert np.flatnonzero(wrong_logits(logits, reference, bound)).tolist() == [1234]


def test_short_accumulators_pass_with_their_own_allowance_only() -> None:
    """Products cut to 13 fraction bits of the largest addend, as fp8 tensor cores do on Hopper."""
    layout = LAYOUTS["fp8"]
    pages = make_pages(layout, 8, seed=8)
    query, weights = make_query(9)
    query = formats.decode_e4m3(formats.encode_e4m3(query)).astype(np.float32)
    keys = decode_pages(layout, pages).reshape(-1, 128)
    sums = np.zeros((64, len(keys)))
    for step in range(0, 128, 32):
        addends = query[:, None, step : step + 32] * keys[None, :, step : step + 32]
        addends = np.concatenate([addends, sums[..., None]], axis=2)
        unit = 2.0 ** (np.floor(np.log2(np.abs(addends).max(axis=2, keepdims=True) + 1e-300)) - 13)
        sums = (np.trunc(addends / unit) * unit).sum(axis=2)
    logits = weights @ np.maximum(sums, 0)
    arguments = (layout, pages, len(keys), query, weights)
    assert wrong_logits(logits, *logits_reference(*arguments)).mean() > 0.3
    assert not wrong_logits(logits, *logits_reference(*arguments, accumulator_bits=13)).any()


def test_rows_with_a_nan_key_are_not_judged() -> None:
    layout = LAYOUTS["fp8"]
    pages = make_pages(layout, 2, seed=10)
    pages[1, 5 * 128 + 3] = 0x7F
    query, weights = make_query(11)
    reference, bound = logits_reference(layout, pages, 128, query, weights)
    assert np.flatnonzero(np.isinf(bound)).tolist() == [69]
    assert not wrong_logits(np.where(np.isinf(bound), 7.0, reference), reference, bound).any()
    assert wrong_logits(np.full(128, np.nan), reference, bound).sum() == 127


def test_a_length_past_the_pages_is_refused() -> None:
    layout = LAYOUTS["fp8"]
    query, weights = make_query(12)
    with pytest.raises(ValueError, match=r"1 fp8 page holds 0\.\.64 rows, not 65"):
        logits_reference(layout, make_pages(layout, 1), 65, query, weights)
    assert len(logits_reference(layout, make_pages(layout, 1), 0, query, weights)[0]) == 0


def test_holes_in_a_top_k_are_counted() -> None:
    """Scenario S12 of the fault list: 8,320 scores, 924 slots left at -1."""
    logits = np.zeros(8320, np.float32)
    logits[:100] = 5.0
    top_k = np.full(2048, -1, np.int32)
    top_k[:1124] = np.arange(1124)
    found = top_k_violations(logits, top_k, 8320, 2048)
    assert len(found.invalid) == 924
    assert len(found.low) == len(found.repeated) == len(found.surplus) == 0
    assert found


def test_any_order_and_any_choice_among_equals_is_right() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 20, 3000).astype(np.float32)
    order = np.lexsort((rng.random(3000), -logits))[:512]
    assert not top_k_violations(logits, rng.permutation(order), 3000, 512)


def test_each_violation_of_a_top_k_is_told_apart() -> None:
    logits = np.arange(1000, dtype=np.float32)
    right = np.arange(999, 487, -1)
    assert not top_k_violations(logits, right, 1000, 512)
    low, twice, past = right.copy(), right.copy(), right.copy()
    low[3] = 12
    twice[9] = twice[4]
    past[511] = 1000
    assert top_k_violations(logits, low, 1000, 512).low.tolist() == [3]
    assert top_k_violations(logits, twice, 1000, 512).repeated.tolist() == [9]
    assert top_k_violations(logits, past, 1000, 512).invalid.tolist() == [511]
    assert top_k_violations(logits, right[:500], 1000, 512).invalid.tolist() == list(range(500, 512))
    short = np.concatenate([np.arange(10), np.full(502, -1)])
    assert not top_k_violations(logits, short, 10, 512)
    short[20] = 3
    assert top_k_violations(logits, short, 10, 512).surplus.tolist() == [20]
    assert not top_k_violations(logits, short, 0, 0).low.size


def test_slack_forgives_a_swap_near_the_border_and_a_nan_stops_the_judging() -> None:
    logits = np.arange(1000, dtype=np.float32)
    near = np.arange(999, 487, -1)
    near[-1] = 487  # instead of 488
    assert top_k_violations(logits, near, 1000, 512).low.tolist() == [511]
    assert not top_k_violations(logits, near, 1000, 512, slack=np.full(1000, 0.5))
    logits[7] = np.nan
    found = top_k_violations(logits, near, 1000, 512)
    assert not found.judged
    assert len(found.low) == 0
