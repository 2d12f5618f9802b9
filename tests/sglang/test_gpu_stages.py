"""The script for a GPU goes its whole way on a CPU, with stand-ins for the two kernels and for the graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import sglang_pair

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "stages" / "run.py"
SITE = sglang_pair.ENVIRONMENT / "0.5.23"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=1000, check=False,
    )  # fmt: skip


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    asked = ["--site", str(tmp_path), "--out", str(tmp_path)]
    done = run(*asked, "--faults", "store,tail")
    assert (done.returncode, "no stage is called tail" in done.stderr) == (2, True)
    done = run(*asked, "--runs", "lazy")
    assert (done.returncode, "no run is called lazy" in done.stderr) == (2, True)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        done = run(*asked)
        assert (done.returncode, "no CUDA device here" in done.stderr) == (2, True)


@pytest.mark.skipif(bool(sglang_pair.why_not("0.5.23")), reason=sglang_pair.why_not("0.5.23"))
def test_what_a_side_imports_is_there_where_sglang_sees_a_gpu() -> None:
    """SGLang imports more where there is CUDA; none of that is installed for the tests."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("pretend.py"))], env=sglang_pair.environment("0.5.23"),
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["True"]), done.stderr[-3000:]


@pytest.mark.timeout(1100)
@pytest.mark.skipif(bool(sglang_pair.why_not("0.5.23")), reason=sglang_pair.why_not("0.5.23"))
def test_the_whole_way_with_stand_ins(tmp_path: Path) -> None:
    site = [f"--site={path}" for path in (SITE, sglang_pair.ENVIRONMENT / "deps")]
    done = run(*site, "--out", str(tmp_path), "--device", "cpu", "--faults", "source,read-kernel,top-k")
    logs = [path.read_text(errors="replace")[-1500:] for path in tmp_path.glob("*/*.log")]
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:], logs)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["complaints"] == []
    assert [(r["fault"], set(r["named"])) for r in result["eager"]["requests"]] == [
        ("", set()), *((stage, {stage}) for stage in ("source", "read-kernel", "top-k", "read-kernel")), ("", set())
    ]  # fmt: skip
    assert [(r["fault"], set(r["named"])) for r in result["graph"]["requests"]] == [
        ("", set()), ("store", {"store"}), ("", set())
    ]  # fmt: skip
    right = result["graph"]["without_a_fault"]["stores"]
    assert right["rows"] == right["rows_reproduced"] >= 2 * 3 * 250
