"""A user's kernel in its child process: right results come back, and whatever goes wrong comes back as words."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.layouts import LAYOUTS
from replay.kernels import userkernel
from replay.kernels.check import make_case
from replay.kernels.reference import check_store, logits_reference, wrong_logits
from replay.kernels.userkernel import NotJudgedError, UserKernelError, find_kernels, parse_spec, run_jobs

LAYOUT = LAYOUTS["fp8"]
MODULE = """
import ctypes, os, sys, time
import torch, triton
import triton.language as tl
from replay.kernels.twins import read_torch, store_torch

def read(layout, cache, table, rows, query, weights, k):
    "What it does follows from k, so that one child can be asked for many things."
    if k == 1:
        raise RuntimeError("no such luck")
    if k == 2:
        return torch.zeros(1, 1), None
    if k == 3:
        return None
    if k == 4:
        x = query.reshape(-1)[:64].contiguous()
        _round[(1,)](x, 64)
    if k == 5:
        print("about to fall")
        sys.stdout.flush()
        ctypes.string_at(0)
    if k == 6:
        time.sleep(600)
    if k == 7:
        sys.exit(9)
    logits, top_k = read_torch(layout, cache, table, rows, query, weights, k)
    logits = torch.cat([logits, torch.full_like(logits[:, :9], 7.0)], dim=1)  # wider, and with rubbish past the end
    logits[1, rows[1]:] = 99.0
    return logits, (None if k == 64 else top_k)

@triton.jit
def _round(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at).to(tl.bfloat16).to(tl.float32))

store = store_torch
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_kernels.py").write_text(MODULE)
    (tmp_path / "numpy.py").write_text("raise ImportError('a file in the current folder shadows numpy')")
    monkeypatch.chdir(tmp_path)
    made = make_case(LAYOUT, np.random.default_rng(1), 2, 200, False)
    made.rows[1] = 70
    return made


def job(case, k: int, spec: str = "my_kernels:read") -> userkernel.Job:
    return userkernel.read_job(spec, "fp8", case.cache, case.table, case.rows, case.query, case.weights, k)


def test_results_and_failures_of_one_child(case) -> None:
    found = run_jobs([job(case, k) for k in (100, 64, 1, 2, 3, 4, 5, 64)], timeout=120)
    for outputs, k in zip(found[:2], (100, 64), strict=True):
        assert not isinstance(outputs, UserKernelError), outputs
        logits = userkernel.mask_past(outputs["logits"], case.rows)
        assert logits.shape == (2, 200)
        assert np.isneginf(logits[1, 70:]).all()
        assert outputs["top_k"].shape == (2, k)
        assert (outputs["top_k"][1, 70:] == -1).all()
        for request, rows in enumerate(case.rows):
            pages = case.cache[case.table[request, : -(-rows // 64)]]
            right = logits_reference(LAYOUT, pages, rows, case.query[request], case.weights[request])
            assert not wrong_logits(logits[request, :rows], *right).any()
    assert all(isinstance(error, UserKernelError) for error in found[2:])
    assert all(str(error) == f"kernel my_kernels:read: {error.reason}" for error in found[2:])
    reasons = [error.reason for error in found[2:]]
    assert not any("\n" in reason or "Traceback" in reason for reason in reasons), "one sentence each"
    line = 1 + MODULE.splitlines().index('        raise RuntimeError("no such luck")')
    assert reasons[0] == f"it raised RuntimeError: no such luck (my_kernels.py:{line})"
    assert "my_kernels.py" in found[2].detail
    assert "kernel_child.py" not in found[2].detail
    assert "its logits have shape [1, 1], fewer than 200 columns" in reasons[1]
    assert "returns (logits, top_k), this one NoneType" in reasons[2]
    # Triton's interpreter truncates this cast; a release that mends it may judge the kernel.
    assert isinstance(found[5], NotJudgedError) or not isinstance(found[5], UserKernelError)
    assert "it uses fp32 to bf16, which the interpreter of Triton" in reasons[3]
    assert "killed by SIGSEGV: an address outside its buffer is the usual cause" in reasons[4]
    assert "about to fall" in found[6].detail
    assert "not reached" in reasons[5]


def test_a_kernel_that_hangs_is_ended_with_all_that_it_started(case) -> None:
    with pytest.raises(UserKernelError, match="not done after 6 s; its process was ended"):
        userkernel.run_read_kernel(
            "my_kernels:read",
            "fp8",
            case.cache,
            case.table,
            case.rows,
            case.query,
            case.weights,
            6,
            timeout=6,
        )
    assert not [p for p in Path("/proc").glob("[0-9]*/environ") if _is_ours(p)]


def _is_ours(environ: Path) -> bool:
    try:
        return f"PWD={Path.cwd()}".encode() in environ.read_bytes() and str(os.getpid()) not in str(environ)
    except OSError:
        return False


def test_a_call_has_its_own_time(case) -> None:
    """The limit is for a call, not for all of them: what was done before one that hangs stays."""
    done, lost, after = run_jobs([job(case, k) for k in (8, 6, 8)], timeout=10)
    assert not isinstance(done, UserKernelError)
    assert lost.reason == "not done after 10 s; its process was ended"
    assert "not reached" in after.reason


def test_a_name_that_leads_nowhere_is_told_with_the_nearest_right_one(case, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "kernels.py").write_text("def read(): ...")
    (tmp_path / "broken.py").write_text("import no_such_library")
    (tmp_path / "unfinished.py").write_text("\ndef read(:")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "late.py").write_text("import triton\nread = 7\n@triton.jit\ndef kernel(x): ...")
    told = {
        "my_kernels:read": None,
        "pack.kernels:read": None,
        "my_kernel:read": "there is no module my_kernel in the current folder or on PYTHONPATH; "
        "did you mean my_kernels:read?",
        "pack.kernls:read": "there is no module pack.kernls in package pack; did you mean pack.kernels:read?",
        "my_kernels.x:read": "there is no module my_kernels.x in my_kernels, which is no package",
        "my_kernels:raed": "module my_kernels has no function raed; did you mean my_kernels:read?",
        "my_kernels:other": "module my_kernels has no function other; there is read",
        "late:read": "read in module late is an int, not a function; there is kernel",
        "late:kernel": "kernel in module late is a Triton kernel: name the function that launches it",
        "broken:read": "module broken cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_library' (broken.py:1)",
        "unfinished:read": "module unfinished cannot be imported: SyntaxError: invalid syntax (unfinished.py:2)",
        "leaves:read": "module leaves cannot be imported: SystemExit: 3 (leaves.py:1)",
    }
    found = find_kernels(list(told), timeout=120)
    reasons = {name: error and error.reason for name, error in zip(told, found, strict=True)}
    assert reasons == told


def test_a_store_kernel_works_on_a_copy(case) -> None:
    from replay.kernels.check import keys_for

    inputs = keys_for(np.random.default_rng(2), 100)
    slots = np.random.default_rng(3).permutation(128)[:100].astype(np.int64)
    pages = np.full((2, LAYOUT.page_bytes), 9, np.uint8)
    after = userkernel.run_store_kernel(
        "my_kernels:store", "fp8", pages, slots, inputs.keys, inputs.rope, inputs.norm_weight, inputs.epsilon
    )
    assert (pages == 9).all()
    page, row = slots // 64, slots % 64
    check = check_store(LAYOUT, inputs, LAYOUT.values(after)[page, row], LAYOUT.scales(after)[page, row])
    assert check.reproduced.all()
    assert (after == 9).sum() >= 28 * 132


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        ("read", "my_kernels:read"),
        ("my_kernels.other", "my_kernels:other"),
        ("a.b.c", "a.b:c"),
        ("kernels/mine.py:other", "kernels.mine:other"),
        ("./mine.py:other", "mine:other"),
        ("mine.py:other", "mine:other"),
        ("a:b:c", "my_kernels:read"),
        ("a b:c", "my_kernels:read"),
        (":read", "my_kernels:read"),
        ("my_kernels:", "my_kernels:read"),
        ("", "my_kernels:read"),
    ],
)
def test_what_does_not_name_a_kernel_is_refused_with_the_nearest_form(spec: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"does not name a kernel: write module:function, such as {near}$"):
        parse_spec(spec)


def test_addresses_outside_the_cache_never_reach_the_kernel(case) -> None:
    case.table[0, 1] = len(case.cache)
    with pytest.raises(ValueError, match=rf"table\[0, 1\] is {len(case.cache)}"):
        job(case, 8)
    with pytest.raises(ValueError, match=r"slots\[0\] is 64, not one of the 64 rows of 1 page"):
        userkernel.store_job(
            "a:b",
            "fp8",
            case.cache[:1],
            np.array([64]),
            np.zeros((1, 128)),
            np.zeros((1, 64)),
            np.ones(128),
            1e-6,
        )
