"""``replay kernels`` as a person runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["kernels", "--format", "fp8", "--batch", "1", "--rows", "700"]
MODULE = """
from replay.kernels import twins
from replay.kernels.twins import store_torch as store

def wrong(layout, cache, table, rows, query, weights, k):
    logits, top_k = twins.read_torch(layout, cache, table, rows, query.bfloat16().float(), weights, k)
    top_k[:, 5] = top_k[:, 6]
    return logits, top_k

def falls(*arguments):
    raise RuntimeError("not today")

def spills(layout, cache, slots, keys, rope, norm_weight, epsilon):
    twins.store_torch(layout, cache, slots, keys, rope, norm_weight, epsilon)
    free = sorted(set(range(cache.shape[0] * 64)) - set(slots.tolist()))[0]
    cache[free // 64, (free % 64) * layout.value_bytes] ^= 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = "import sys; from replay.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_our_kernels_pass_and_the_self_check_comes_first(folder: Path) -> None:
    done = run(folder, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["schema"] == "kv-replay/kernels/1"
    assert body["right"] is True
    assert {"fp32 to e4m3", "fp32 dot product"} <= {cast["name"] for cast in body["casts"]}
    (store,) = body["store"]
    assert (store["format"], store["status"], store["unequal_rows"], store["stray_bytes"]) == (
        "fp8",
        "right",
        0,
        0,
    )
    assert [(r["batch"], r["lengths"], r["status"]) for r in body["read"]] == [
        (1, "uniform", "right"),
        (1, "varied", "right"),
    ]
    assert all(0 < r["error"] < 1 and r["jaccard"] > 0.99 for r in body["read"])


def test_a_users_wrong_kernels_are_found(folder: Path) -> None:
    done = run(folder, *SMALL, "--read-kernel", "mine:wrong", "--store-kernel", "mine:spills")
    assert done.returncode == 1, done.stderr
    order = [
        done.stdout.index(words) for words in ("Casts and dot products", "Store against", "Read against")
    ]
    assert order == sorted(order)
    assert max(map(len, done.stdout[: order[1]].splitlines())) <= 80
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert lines["mine:wrong"].endswith("WRONG: top-k of 1 request does not follow from its logits")
    assert int(lines["mine:wrong"].split()[6]) > 300  # rows outside their bound
    assert lines["mine:spills"].endswith("WRONG: 1 byte changed outside the rows")
    assert "WRONG" not in lines["triton"]
    assert "3 outside their bounds" in done.stdout


def test_a_right_kernel_passes_and_one_that_raises_is_not_judged(folder: Path) -> None:
    done = run(folder, *SMALL, "--read-kernel", "mine:falls", "--store-kernel", "mine:store", "--json")
    assert done.returncode == 3, done.stderr
    body = json.loads(done.stdout)
    assert [r["status"] for r in body["read"]] == ["right", "right", "not judged", "not judged"]
    assert "not today" in body["read"][2]["why"]
    assert [s["status"] for s in body["store"]] == ["right", "right"]


def test_a_kernel_that_is_not_named_rightly_is_a_usage_error(folder: Path) -> None:
    done = run(folder, "kernels", "--read-kernel", "mine")
    assert done.returncode == 2
    assert "write module:function" in done.stderr


def test_the_kernels_of_the_documentation_pass(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    begin = text.index("    import torch\n\n    def read(")
    block = text[begin : text.index("Whatever `logits` holds")]
    (tmp_path / "my_kernels.py").write_text(textwrap.dedent(block))

    kernels = ["--read-kernel", "my_kernels:read", "--store-kernel", "my_kernels:store"]
    done = run(tmp_path, *SMALL, *kernels, "--json")

    body = json.loads(done.stdout)
    mine = [r for r in (*body["store"], *body["read"]) if r["kernel"].startswith("my_kernels:")]
    assert {(r["kernel"], r["status"], r["why"]) for r in mine} == {
        ("my_kernels:store", "right", ""),
        ("my_kernels:read", "right", ""),
    }
    assert done.returncode == 0
