"""The Triton kernels compiled on a GPU: store bytes equal to the CPU twin's, logits within the bound."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from capture_hooks.layouts import LAYOUTS

FORMATS = sorted(LAYOUTS)
ROWS = 65_536


@pytest.fixture(scope="module")
def cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("TRITON_INTERPRET is set: nothing would be compiled")
    return torch


def extreme_inputs(seed: int) -> Any:
    """65,536 rows, one in eight extreme, and some that overflow or hold infinities and NaN."""
    from replay.kernels.check import keys_for

    inputs = keys_for(np.random.default_rng(seed), ROWS)
    keys = inputs.keys
    keys[0], keys[1], keys[2] = 1e30, 3e38, -0.0
    keys[3, 5], keys[4, 100], keys[5, 127] = np.nan, np.inf, -np.inf
    keys[6], keys[7], keys[8] = 1e-42, 1e-38, -1e-30
    keys[9] = np.linspace(-1e-5, 1e-5, 128)
    keys[10:1000] = np.exp(10 * np.random.default_rng(seed + 1).standard_normal((990, 128)))
    keys[1000:2000] = np.random.default_rng(seed + 2).integers(-2, 3, (1000, 128))
    return inputs


@pytest.mark.parametrize("pad", [0, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_the_compiled_store_writes_the_bytes_of_the_cpu_twin(cuda: Any, name: str, pad: int) -> None:
    from replay.kernels.reference import check_store
    from replay.kernels.store import store
    from replay.kernels.twins import store_torch

    layout = LAYOUTS[name]
    inputs = extreme_inputs(7)
    pages = ROWS // layout.rows + 9
    rng = np.random.default_rng(8)
    slots = rng.permutation(pages * layout.rows)[:ROWS].astype(np.int64)
    before = rng.integers(0, 256, (pages, layout.page_bytes + pad), dtype=np.uint8)
    given = [cuda.from_numpy(x) for x in (slots, inputs.keys, inputs.rope, inputs.norm_weight)]
    on_cpu = cuda.from_numpy(before.copy())
    store_torch(layout, on_cpu, *given, inputs.epsilon)
    on_gpu = cuda.from_numpy(before).cuda()
    store(layout, on_gpu, *(x.cuda() for x in given), inputs.epsilon)
    got, want = on_gpu.cpu().numpy(), on_cpu.numpy()
    page, row = slots // layout.rows, slots % layout.rows
    values, right = layout.values(got)[page, row], layout.values(want)[page, row]
    scales, right_scales = layout.scales(got)[page, row], layout.scales(want)[page, row]
    unequal = (values != right).any(axis=1) | (scales != right_scales).any(axis=1)
    first = np.flatnonzero(unequal)[:5].tolist()
    assert not unequal.any(), f"{unequal.sum()} rows differ, the first {first}"
    assert np.array_equal(got, want)  # and nothing beside them was written
    check = check_store(layout, inputs, values, scales)
    assert check.reproduced.all()
    assert check.judged.mean() > 0.97


@pytest.mark.parametrize("name", FORMATS)
def test_the_torch_twin_on_the_gpu_makes_the_same_bytes(cuda: Any, name: str) -> None:
    from replay.kernels.twins import store_rows_torch

    inputs = extreme_inputs(9)
    given = [cuda.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight)]
    on_cpu = store_rows_torch(LAYOUTS[name], *given, inputs.epsilon)
    on_gpu = store_rows_torch(LAYOUTS[name], *(x.cuda() for x in given), inputs.epsilon)
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert cuda.equal(cpu, gpu.cpu())


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("varied", [False, True], ids=["uniform", "varied"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_compiled_read_is_within_the_bound(cuda: Any, name: str, varied: bool, batch: int) -> None:
    from replay.kernels.check import TOP_K, judge_read, make_case
    from replay.kernels.read import read
    from replay.kernels.twins import read_torch

    case = make_case(LAYOUTS[name], np.random.default_rng(batch), batch, 4096 if batch < 32 else 2048, varied)
    arrays = (case.cache, case.table, case.rows, case.query, case.weights)
    for kernel in (read, read_torch):
        tensors = (cuda.from_numpy(x).cuda() for x in arrays)
        logits, top_k = (x.cpu().numpy() for x in kernel(case.layout, *tensors, TOP_K))
        result = judge_read(case, logits, top_k, kernel=kernel.__name__, seconds=0.0)
        assert result.status == "right", result
        assert result.unjudged_rows == 0
        assert result.jaccard > 0.99
        for request, rows in enumerate(case.rows):
            assert np.isneginf(logits[request, rows:]).all()


@pytest.mark.parametrize("heads", [1, 8, 12, 128])
def test_other_numbers_of_heads_are_read_rightly(cuda: Any, heads: int) -> None:
    from replay.kernels.check import TOP_K, make_case
    from replay.kernels.read import read
    from replay.kernels.reference import logits_reference, wrong_logits

    case = make_case(LAYOUTS["fp8"], np.random.default_rng(1), 2, 700, False)
    rng = np.random.default_rng(2)
    query = rng.standard_normal((2, heads, 128)).astype(np.float32)
    weights = rng.standard_normal((2, heads)).astype(np.float32)
    tensors = (cuda.from_numpy(x).cuda() for x in (case.cache, case.table, case.rows, query, weights))
    logits = read(case.layout, *tensors, TOP_K)[0].cpu().numpy()
    for request, rows in enumerate(case.rows):
        pages = case.cache[case.table[request, : -(-rows // 64)]]
        right = logits_reference(case.layout, pages, rows, query[request], weights[request])
        assert not wrong_logits(logits[request, :rows], *right).any()


def test_pages_past_two_gigabytes_are_read_from_their_own_place(cuda: Any) -> None:
    """Page 254,201 of an fp8 pool starts past byte 2**31, where 32-bit addresses wrap."""
    from replay.kernels.check import make_case
    from replay.kernels.read import read
    from replay.kernels.reference import logits_reference, wrong_logits
    from replay.kernels.store import store

    layout = LAYOUTS["fp8"]
    count = 2**31 // layout.page_bytes + 40
    case = make_case(layout, np.random.default_rng(3), 1, 640, False)
    pool = cuda.zeros((count, layout.page_bytes), dtype=cuda.uint8, device="cuda")
    pages = case.cache[case.table[0]]
    pool[-len(pages) :] = cuda.from_numpy(pages).cuda()
    table = cuda.arange(count - len(pages), count, device="cuda")[None]
    given = (cuda.from_numpy(x).cuda() for x in (case.rows, case.query, case.weights))
    logits = read(layout, pool, table, *given, 512)[0].cpu().numpy()
    right = logits_reference(layout, pages, 640, case.query[0], case.weights[0])
    assert not wrong_logits(logits[0], *right).any()
    inputs = extreme_inputs(4).part(slice(0, 64))
    tensors = [cuda.from_numpy(x).cuda() for x in (inputs.keys, inputs.rope, inputs.norm_weight)]
    slots = cuda.arange(64, device="cuda") + (count - 30) * 64
    store(layout, pool, slots, *tensors, inputs.epsilon)
    assert pool[count - 30, :8192].any()
    assert not pool[: count - 31].any()


def test_the_self_check_runs_here(cuda: Any) -> None:
    from replay.kernels.selfcheck import self_check

    check = self_check("cuda")
    assert not check.interpreted
    by_name = {c.name: c for c in check.conversions}
    for name in (
        "fp32 dot product",
        "fp32 root and division",
        "fp32 to bf16",
        "bf16 to fp32",
        "bf16 dot product",
    ):
        assert by_name[name].right, by_name[name]
    if cuda.cuda.get_device_capability() >= (8, 9):
        for name in (
            "fp32 to e4m3",
            "fp32 to e4m3 past 448",
            "e4m3 to fp32",
            "e4m3 NaN to fp32",
            "e4m3 dot product",
        ):
            assert by_name[name].right, by_name[name]
