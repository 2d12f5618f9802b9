"""The user's own kernels on the bytes of a trace: the verdict names them, and what they cannot do is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from replay.verdict import Verdict
from tests.scenarios.scene import Job
from tests.scenarios.test_store_inputs import stored

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import torch
from replay.kernels.twins import read_torch, store_torch

def right(layout, cache, table, rows, query, weights, k):
    return read_torch(layout, cache, table, rows, query, weights, k)

def scaled(layout, cache, table, rows, query, weights, k):
    logits, _ = read_torch(layout, cache, table, rows, query, weights, k)
    logits[:, 70:] *= 1.1
    return logits, None

def interleaved(layout, cache, table, rows, query, weights, k):
    width = layout.value_bytes + layout.scale_bytes
    parts = cache.reshape(len(cache), layout.rows, width)
    cut = layout.value_bytes
    seen = torch.cat([parts[..., :cut].flatten(1), parts[..., cut:].flatten(1)], 1).contiguous()
    return read_torch(layout, seen, table, rows, query, weights, k)

def doubled(layout, cache, table, rows, query, weights, k):
    logits, top_k = read_torch(layout, cache, table, rows, query, weights, k)
    return 2 * logits, top_k

def strided(layout, cache, table, rows, query, weights, k):
    return read_torch(layout, cache, (2 * table) % len(cache), rows, query, weights, k)

def holes(layout, cache, table, rows, query, weights, k):
    logits, top_k = read_torch(layout, cache, table, rows, query, weights, k)
    top_k[:, 100:140] = -1
    return logits, top_k

def worst(layout, cache, table, rows, query, weights, k):
    logits, top_k = read_torch(layout, cache, table, rows, query, weights, 2 * k)
    return logits, torch.flip(top_k, [1])[:, :k].contiguous()

def raises(layout, cache, table, rows, query, weights, k):
    raise RuntimeError("not for this format")

def store(layout, cache, slots, keys, rope, norm_weight, epsilon):
    store_torch(layout, cache, slots, keys, rope, norm_weight, epsilon)

def heavy(layout, cache, slots, keys, rope, norm_weight, epsilon):
    store_torch(layout, cache, slots, keys, rope, norm_weight * 1.05, epsilon)

def idle(layout, cache, slots, keys, rope, norm_weight, epsilon):
    pass
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    scene = stored(tmp_path, "fp8")
    scene.read(Job(7000, 0, 150, [21, 22, 23], [5, 6, 7]), logits=True)
    scene.close()
    return list(scene.paths)


def judged(trace: list[Path], read: str | None = None, store: str | None = None) -> Verdict:
    with open_trace(*trace) as opened:
        return judge(opened, JudgeOptions(read_kernel=read, store_kernel=store))


def test_right_kernels_leave_the_verdict_clean(trace: list[Path]) -> None:
    verdict = judged(trace, "mine:right", "mine:store")

    assert verdict.verdict == "clean"
    assert (verdict.scope["triton"]["read_kernel"], verdict.scope["triton"]["store_kernel"]) == (
        "mine:right",
        "mine:store",
    )


def test_a_bad_read_kernel_is_named_and_not_the_recorded_logits(trace: list[Path]) -> None:
    verdict = judged(trace, read="mine:scaled")

    (finding,) = verdict.findings
    assert (finding.code, finding.stage, finding.confidence) == ("F25", "read-kernel", "certain")
    assert finding.rule == "your kernel mine:scaled: from row 70 on"
    assert "your kernel mine:scaled" in finding.evidence[0]
    said = " ".join((*finding.evidence, finding.rule, str(finding.runner_up)))
    assert "recorded logits" not in said
    assert "recorded 0" not in said


@pytest.mark.parametrize(
    ("kernel", "code", "rule"),
    [("heavy", "F30", ""), ("idle", "unclassified", "the rows still hold what was there before the store")],
)
def test_a_bad_store_kernel_is_named(trace: list[Path], kernel: str, code: str, rule: str) -> None:
    verdict = judged(trace, store=f"mine:{kernel}")

    (finding,) = verdict.findings
    assert (finding.code, finding.stage) == (code, "store")
    assert finding.rule == f"your kernel mine:{kernel}" + (f": {rule}" if rule else "")
    assert any(
        f"your kernel mine:{kernel} did it again in an empty page" in said for said in finding.evidence
    )


def test_a_kernel_that_raises_is_one_sentence_and_its_traceback_comes_with_verbose(trace: list[Path]) -> None:
    command = [sys.executable, "-m", "replay", *map(str, trace), "--read-kernel", "mine:raises"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    more = subprocess.run([*command, "-v"], capture_output=True, text=True, check=False, env=environment)

    line = 1 + MODULE.splitlines().index('    raise RuntimeError("not for this format")')
    reason = f"it raised RuntimeError: not for this format (mine.py:{line})"
    assert (done.returncode, more.returncode) == (3, 3), done.stderr
    assert f"your read kernel mine:raises, 1 of 1 call: {reason}" in " ".join(done.stdout.split())
    assert "in raises" not in done.stdout
    assert reason in " ".join(more.stdout.split())
    assert f'mine.py", line {line}, in raises' in " ".join(more.stdout.split())


def test_a_kernel_for_which_the_trace_has_no_inputs_is_not_judged(tmp_path: Path) -> None:
    scene = stored(tmp_path, "fp8", inputs=False)
    scene.close()

    verdict = judged(list(scene.paths), read="mine:right")

    assert verdict.verdict == "inconclusive"
    (unclear,) = verdict.not_judged
    assert unclear.what == "your read kernel mine:right"
    assert "nothing to run it on" in unclear.why


def test_the_json_has_no_traceback(trace: list[Path]) -> None:
    verdict = judged(trace, read="mine:raises")

    (unclear,) = verdict.to_json()["not_judged"]
    assert sorted(unclear) == ["what", "why"]


@pytest.mark.parametrize(
    ("name", "code", "stage", "words"),
    [
        ("interleaved", "F07", "read-kernel", "interleaved"),
        ("doubled", "F24", "read-kernel", "2 times"),
        ("strided", "F20", "read-kernel", "page 2 * p"),
        ("holes", "F26", "top-k", ""),
    ],
)
def test_a_kernel_with_a_fault_of_a_known_kind_is_told_which(
    trace: list[Path], name: str, code: str, stage: str, words: str
) -> None:
    verdict = judged(trace, f"mine:{name}")
    (finding,) = verdict.findings
    assert (finding.code, finding.stage, finding.confidence) == (code, stage, "certain")
    assert str(finding.rule).startswith(f"your kernel mine:{name}")
    assert words in str(finding.rule)
    assert {page.physical for page in finding.pages} <= {5, 6, 7}
