"""The torch twins: bytes and logits against the reference, argument checks, padding, ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capture_hooks.layouts import LAYOUTS
from replay.kernels import twins
from replay.kernels.check import TOP_K, keys_for, make_case
from replay.kernels.reference import check_store, logits_reference, wrong_logits

FORMATS = sorted(LAYOUTS)


def store_arguments(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = keys_for(np.random.default_rng(seed), count)
    keys, rope, weight = (torch.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight))
    return keys, rope, weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("pad", [0, 36])
def test_a_store_writes_its_slots_and_nothing_else(name: str, pad: int) -> None:
    layout = LAYOUTS[name]
    rng = np.random.default_rng(1)
    inputs = keys_for(rng, 700)
    keys, rope, weight = (torch.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight))
    whole = torch.from_numpy(rng.integers(0, 256, (21, layout.page_bytes + pad), dtype=np.uint8))
    cache = whole[1:]  # a view with an offset
    before = whole.clone()
    slots = torch.from_numpy(rng.permutation(20 * 64)[:700])
    twins.store_torch(layout, cache, slots, keys, rope, weight, inputs.epsilon)
    pages = cache[:, : layout.page_bytes].numpy()
    page, row = slots.numpy() // 64, slots.numpy() % 64
    check = check_store(layout, inputs, layout.values(pages)[page, row], layout.scales(pages)[page, row])
    assert check.reproduced.all()
    assert check.judged.all()
    free = np.ones((20, 64), bool)
    free[page, row] = False
    old = before[1:, : layout.page_bytes].numpy()
    assert np.array_equal(layout.values(pages)[free], layout.values(old)[free])
    assert np.array_equal(layout.scales(pages)[free], layout.scales(old)[free])
    assert torch.equal(cache[:, layout.page_bytes :], before[1:, layout.page_bytes :])
    assert torch.equal(whole[0], before[0])


@pytest.mark.parametrize("name", FORMATS)
def test_every_nan_is_stored_in_one_form(name: str) -> None:
    layout = LAYOUTS[name]
    keys, rope, weight = store_arguments(2, 2)
    keys[0, 3], keys[1, 70] = torch.nan, torch.inf
    values, scales = twins.store_rows_torch(layout, keys, rope, weight, 1e-6)
    nan_value = {"fp8": [0x7F], "bf16": [0xC0, 0x7F], "fp4": [0x77]}[name]
    nan_scale = {"fp8": [0, 0, 0xC0, 0x7F], "bf16": [], "fp4": [0xFF]}[name]
    assert (values.numpy().reshape(-1, len(nan_value)) == nan_value).all()
    if nan_scale:
        assert (scales.numpy().reshape(-1, len(nan_scale)) == nan_scale).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("varied", [False, True])
def test_reads_are_within_the_bound(name: str, varied: bool) -> None:
    case = make_case(LAYOUTS[name], np.random.default_rng(3), 9, 700, varied)
    tensors = (torch.from_numpy(x) for x in (case.cache, case.table, case.rows, case.query, case.weights))
    logits, top_k = twins.read_torch(case.layout, *tensors, TOP_K)
    assert logits.shape == (9, case.rows.max())
    assert top_k.shape == (9, TOP_K)
    assert top_k.dtype == torch.int32
    for request, rows in enumerate(case.rows):
        pages = case.cache[case.table[request, : -(-rows // 64)]]
        right = logits_reference(case.layout, pages, rows, case.query[request], case.weights[request])
        assert not wrong_logits(logits[request, :rows].numpy(), *right).any()
        assert torch.isneginf(logits[request, rows:]).all()
        found = top_k[request]
        assert (found[min(rows, TOP_K) :] == -1).all()
        assert sorted(set(found[: min(rows, TOP_K)].tolist())) == sorted(found[: min(rows, TOP_K)].tolist())


def test_small_batches_and_one_large_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(LAYOUTS["fp8"], np.random.default_rng(4), 7, 300, True)
    arrays = (case.cache, case.table, case.rows, case.query, case.weights)
    whole = twins.read_torch(case.layout, *(torch.from_numpy(x) for x in arrays), 64)
    monkeypatch.setattr(twins, "_READ_BYTES", 1)
    single = twins.read_torch(case.layout, *(torch.from_numpy(x) for x in arrays), 64)
    torch.testing.assert_close(whole[0], single[0], rtol=1e-5, atol=1e-3)


def test_ties_go_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -torch.inf], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    found = twins.top_k_torch(logits, torch.tensor([5, 6]), 4)
    assert found.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    logits = torch.tensor([[1.0, 3.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]])
    assert twins.top_k_torch(logits, torch.tensor([2, 0]), 4).tolist() == [[1, 0, -1, -1], [-1, -1, -1, -1]]


def test_entries_past_the_length_may_hold_anything() -> None:
    layout = LAYOUTS["fp8"]
    case = make_case(layout, np.random.default_rng(5), 2, 600, False)
    table = case.table.copy()
    rows = np.array([64, 0])
    table[0, 1:], table[1] = 10**15, -(10**15)
    arrays = (case.cache, table, rows, case.query, case.weights)
    logits, top_k = twins.read_torch(layout, *(torch.from_numpy(x) for x in arrays), 3)
    assert torch.isfinite(logits[0]).all()
    assert top_k[1].tolist() == [-1, -1, -1]


def test_bad_arguments_are_named() -> None:
    layout = LAYOUTS["fp8"]
    keys, rope, weight = store_arguments(3, 6)
    cache = torch.zeros((4, layout.page_bytes), dtype=torch.uint8)

    def stored(slots: list[int], **other: torch.Tensor) -> None:
        given = {"cache": cache, "keys": keys, "rope": rope, "norm_weight": weight} | other
        twins.store_torch(layout, slots=torch.tensor(slots), epsilon=1e-6, **given)

    for slots, words in (
        ([0, 256, 1], r"slots\[1\] is 256; a cache of 4 pages has 256, so it must lie in 0\.\.255"),
        ([0, 1, -1], r"slots\[2\] is -1"),
        ([9, 5, 9], r"slots\[2\] is 9, the slot of slots\[0\] too"),
    ):
        with pytest.raises(ValueError, match=words):
            stored(slots)
    with pytest.raises(ValueError, match=r"rope must be torch.float32\[3, 64\]"):
        stored([0, 1, 2], rope=rope[:2])
    with pytest.raises(ValueError, match="page has 8448 bytes; the cache has 8447 a page"):
        stored([0, 1, 2], cache=cache[:, 1:])
    with pytest.raises(ValueError, match="adjacent"):
        stored([0, 1, 2], cache=torch.zeros((4, 9000), dtype=torch.uint8)[:, ::1].t().contiguous().t())
    assert not cache.any()

    query, weights = torch.zeros((2, 8, 128)), torch.zeros((2, 8))
    table = torch.tensor([[0, 3], [1, 4]])
    for rows, words in (
        ([64, 65], r"table\[1, 1\] is 4; the cache's page count has 4"),
        ([129, 0], r"rows\[0\] is 129; a table of 2 pages holds 0\.\.128 rows"),
        ([0, -1], r"rows\[1\] is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            twins.read_torch(layout, cache, table, torch.tensor(rows), query, weights, 4)
    with pytest.raises(ValueError, match=r"query must be torch.float32\[2, 8, 128\]"):
        twins.read_torch(layout, cache, table, torch.tensor([1, 1]), query.double(), weights, 4)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_to_do_is_fine(name: str) -> None:
    layout = LAYOUTS[name]
    cache = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    keys, rope, weight = store_arguments(0, 7)
    none = torch.zeros(0, dtype=torch.int64)
    twins.store_torch(layout, cache, none, keys, rope, weight, 1e-6)
    logits, top_k = twins.read_torch(
        layout, cache, none.view(0, 0), none, torch.zeros((0, 8, 128)), torch.zeros((0, 8)), 5
    )
    assert logits.shape == (0, 0)
    assert top_k.shape == (0, 5)
