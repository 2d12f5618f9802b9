"""The Triton kernels on the interpreter: bytes equal to the twin's, logits within the bound, and their self-check.

All of it runs in one child process, because Triton decides at import whether it interprets. Run as a program
this file is that child: it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("bf16", "fp4", "fp8")


def child_environment(**more: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__],
        env=child_environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_the_store_writes_the_bytes_of_the_twin(name: str, found: dict[str, Any]) -> None:
    store = found["store"][name]
    assert store["rows"] == 3000
    assert store["unequal_bytes"] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_reads_are_within_the_bound(name: str, found: dict[str, Any]) -> None:
    results = [r for r in found["read"] if r["format"] == name]
    assert {(r["batch"], r["lengths"]) for r in results} == {
        (b, v) for b in (1, 8) for v in ("uniform", "varied")
    }
    for result in results:
        assert result["status"] == "right", result
        assert result["error"] < 0.2
        assert result["jaccard"] > 0.99


def test_any_number_of_heads_wide_pages_and_empty_requests_are_read(found: dict[str, Any]) -> None:
    assert found["odd read"] == {"wrong": 0, "past": True, "top_k": [-1, -1, -1]}


def test_bytes_are_decoded_by_the_kernel_as_by_the_tables(found: dict[str, Any]) -> None:
    assert found["decode"] == {"e4m3": 0, "e2m1": 0, "ue8m0": 0, "bf16": 0}


def test_numbers_are_encoded_by_the_kernel_as_by_the_tables(found: dict[str, Any]) -> None:
    assert found["encode"] == {"e4m3": 0, "e2m1": 0, "bf16": 0}


def test_bad_slots_and_page_ids_never_reach_the_kernel(found: dict[str, Any]) -> None:
    assert "slots[1] is 64" in found["refused"]["slot"]
    assert "table[0, 0] is 1" in found["refused"]["page"]
    assert "multiple of 4" in found["refused"]["alignment"]


def test_launches_from_several_threads_are_right(found: dict[str, Any]) -> None:
    assert found["threads"] == [True] * 4


def test_the_self_check_sees_what_the_interpreter_does_wrong_and_what_is_right(found: dict[str, Any]) -> None:
    casts = found["casts"]
    # Ours depend on these. The others are Triton's business: if a release mends them, so much the better.
    for name in ("fp32 dot product", "fp32 root and division"):
        assert casts[name] == ["right", ""]
    for name in (
        "fp32 to e4m3",
        "fp32 to e4m3 past 448",
        "fp32 to bf16",
        "e4m3 NaN to fp32",
        "bf16 dot product",
    ):
        assert name in casts
        assert casts[name][0] == "right" or "wrong, the first is" in casts[name][1]
    assert found["watched"] == ["bf16 dot product", "fp32 to bf16"]


def test_a_compiled_kernel_refuses_tensors_on_the_cpu() -> None:
    code = """
import torch
from capture_hooks.layouts import LAYOUTS
from replay.kernels.store import store
one = torch.zeros((1, 128))
try:
    cache = torch.zeros((1, 8448), dtype=torch.uint8)
    store(LAYOUTS["fp8"], cache, torch.zeros(1, dtype=torch.int64), one, one[:, :64].contiguous(), one[0], 1e-6)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "set TRITON_INTERPRET=1 before triton is imported" in done.stdout


def test_the_compiled_store_rounds_every_operation_on_its_own() -> None:
    """No fused multiply-add, no approximate root or division: else its bytes would not be the twin's."""
    code = """
import json, re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from replay.kernels.store import _store_kernel as kernel
types = dict(cache="*u8", slots="*i64", keys="*fp32", rope="*fp32", weights="*fp32", epsilon="fp32")
types |= dict(count="i32", pitch="i32")
found = {}
for name, kind, value_bytes, scale_bytes in (("fp8", 0, 128, 4), ("bf16", 1, 256, 0), ("fp4", 2, 64, 4)):
    fixed = dict(KIND=kind, PAGE_ROWS=64, VALUE_BYTES=value_bytes, SCALE_BYTES=scale_bytes)
    fixed |= dict(ROWS=16, DIM=128, ROPE=64)
    names = kernel.arg_names
    constants = {(names.index(k),): v for k, v in fixed.items()}
    source = ASTSource(kernel, {n: types.get(n, "constexpr") for n in names}, constants)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    found[name] = sorted(set(re.findall(r"\\b(?:fma|mul|add|sub|div|sqrt|rsqrt|rcp)\\.[a-z.]*f32\\b", ptx)))
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "ptxas" in done.stderr and "Cannot find" in done.stderr:
        pytest.skip("this Triton brings no assembler for NVIDIA")
    assert done.returncode == 0, done.stderr[-2000:]
    exact = ["add.rn.f32", "div.rn.f32", "mul.rn.f32", "sqrt.rn.f32", "sub.rn.f32"]
    assert json.loads(done.stdout.splitlines()[-1]) == {"fp8": exact, "bf16": exact, "fp4": exact}


def main() -> None:
    import threading

    import numpy as np
    import torch
    import triton
    import triton.language as tl

    from capture_hooks.layouts import LAYOUTS
    from replay.kernels import bits, check, formats, reference, twins
    from replay.kernels.read import read
    from replay.kernels.selfcheck import self_check, watching
    from replay.kernels.store import store

    globals().update(bits=bits, tl=tl)  # interpreted kernels look names up in the module
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    found: dict[str, Any] = {"store": {}}

    def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(x) for x in arrays]

    for name in FORMATS:
        layout = LAYOUTS[name]
        rng = np.random.default_rng(1)
        inputs = check.keys_for(rng, 3000)
        inputs.keys[7], inputs.keys[8, 1], inputs.keys[9, 100] = 1e30, np.nan, np.inf
        inputs.keys[10], inputs.keys[11] = 1e-42, -0.0
        before = rng.integers(0, 256, (50, layout.page_bytes + 64), dtype=np.uint8)
        slots = rng.permutation(50 * 64)[:3000].astype(np.int64)
        a, b = tensors(before.copy(), before.copy())
        given = tensors(slots, inputs.keys, inputs.rope, inputs.norm_weight)
        twins.store_torch(layout, a, *given, inputs.epsilon)
        store(layout, b, *given, inputs.epsilon)
        found["store"][name] = {"rows": len(slots), "unequal_bytes": int((a != b).sum())}

    plan = check.Plan(formats=FORMATS, batches=(1, 8), rows={1: 1500, 8: 700})
    found["read"] = [check.as_json(result) for result in check.check_reads(plan)]

    layout = LAYOUTS["fp8"]
    case = check.make_case(layout, np.random.default_rng(2), 3, 600, False)
    wide = np.zeros((len(case.cache), layout.page_bytes + 192), np.uint8)
    wide[:, : layout.page_bytes] = case.cache
    rows = np.array([600, 0, 65])
    wrong, past = 0, True
    for heads in (5, 70):
        query = np.random.default_rng(heads).standard_normal((3, heads, 128)).astype(np.float32)
        weights = np.random.default_rng(heads).standard_normal((3, heads)).astype(np.float32)
        logits, top_k = read(layout, *tensors(wide, case.table, rows, query, weights), 3)
        for i in (0, 2):
            pages = case.cache[case.table[i, : -(-rows[i] // 64)]]
            right = reference.logits_reference(layout, pages, int(rows[i]), query[i], weights[i])
            wrong += int(reference.wrong_logits(logits[i, : rows[i]].numpy(), *right).sum())
        past = past and bool(torch.isneginf(logits[1]).all() and torch.isneginf(logits[2, 65:]).all())
    found["odd read"] = {"wrong": wrong, "past": past, "top_k": top_k[1].tolist()}

    @triton.jit
    def convert(source, target, how: tl.constexpr, count: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, count)
        x = tl.load(source + at)
        if how == 0:
            y = bits.decode_e4m3(x)
        elif how == 1:
            y = bits.decode_e2m1(x)
        elif how == 2:
            y = bits.decode_ue8m0(x)
        elif how == 3:
            y = bits.decode_bf16(x)
        elif how == 4:
            y = bits.encode_e4m3(x)
        elif how == 5:
            y = bits.encode_e2m1(x)
        else:
            y = bits.encode_bf16(x)
        tl.store(target + at, y)

    def run(how: int, source: np.ndarray, out: torch.dtype) -> np.ndarray:
        target = torch.zeros(len(source), dtype=out)
        convert[(1,)](torch.from_numpy(source), target, how, len(source))
        return target.numpy()

    found["decode"] = {}
    for how, (name, table) in enumerate(
        (("e4m3", formats.E4M3), ("e2m1", formats.E2M1), ("ue8m0", formats.UE8M0), ("bf16", formats.BF16))
    ):
        got = run(how, np.arange(len(table), dtype=np.int32), torch.float32)
        same = (got == table.astype(np.float32)) | (np.isnan(got) & np.isnan(table))
        found["decode"][name] = int((~same).sum())
    rng = np.random.default_rng(3)
    count = 1 << 17
    mantissa = rng.integers(0, 1 << 23, count) & rng.choice([8388607, 7864320], count)
    usual = (rng.integers(108, 142, count) << 23) | mantissa
    any_bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    any_bits[::2] = (usual | (rng.integers(0, 2, count) << 31))[::2]
    values = any_bits.view(np.float32)
    nan = np.isnan(values)
    found["encode"] = {}
    for how, name, right, nan_code in (
        (4, "e4m3", formats.encode_e4m3(values), 0x7F),
        (5, "e2m1", formats.encode_e2m1(values), 7),
        (6, "bf16", formats.encode_bf16(values), 0x7FC0),
    ):
        right = np.where(nan, nan_code, right)
        found["encode"][name] = int((run(how, values, torch.int32) != right).sum())

    found["refused"] = {}
    one = torch.zeros((2, 128))
    cache = torch.zeros((1, layout.page_bytes + 5), dtype=torch.uint8)
    odd = torch.zeros((2, layout.page_bytes + 1), dtype=torch.uint8)
    rope, weight, slots = one[:, :64].contiguous(), one[0], torch.tensor([3, 64])
    for what, call in (
        ("slot", lambda: store(layout, cache, slots, one, rope, weight, 1e-6)),
        (
            "page",
            lambda: read(
                layout, cache, torch.tensor([[1]]), torch.tensor([5]), one[:1, None], one[:1, :1], 4
            ),
        ),
        ("alignment", lambda: store(layout, odd, slots, one, rope, weight, 1e-6)),
    ):
        try:
            call()
        except ValueError as error:
            found["refused"][what] = str(error)

    right_logits, _ = twins.read_torch(
        layout, *tensors(case.cache, case.table, case.rows, case.query, case.weights), 5
    )
    agreed: list[bool] = []

    def one_thread() -> None:
        logits, _ = read(layout, *tensors(case.cache, case.table, case.rows, case.query, case.weights), 5)
        agreed.append(bool(torch.allclose(logits, right_logits, rtol=1e-4, atol=1e-2)))

    threads = [threading.Thread(target=one_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["threads"] = agreed

    casts = self_check()
    found["casts"] = {c.name: ["right" if c.right else "wrong", c.detail] for c in casts.conversions}

    @triton.jit
    def doubtful(x, y):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 16)
        a = tl.load(x + at[:, None] * 16 + at[None, :]).to(tl.bfloat16)
        tl.store(y + at[:, None] * 16 + at[None, :], tl.dot(a, a))

    with watching() as used:
        doubtful[(1,)](torch.ones(256), torch.ones(256))
    found["watched"] = sorted(used)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
