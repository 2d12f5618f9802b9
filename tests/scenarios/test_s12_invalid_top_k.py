"""S12: of 8,320 scores 100 are 5.0 and the others 0.0; of the top 2,048 the last 924 slots are -1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.layouts import layout
from replay.verdict import Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene

SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
ROWS, K, VALID = 8320, 2048, 1124
PAGES = ROWS // 64


def scored(folder: Path, scales: pattern.Scales, top_k: np.ndarray[Any, Any], k: int = K) -> Verdict:
    """One read whose logits are exactly 100 times 5.0 and 8,220 times 0.0, and that chose ``top_k``.

    Keys are one number in dimension 0 and zeros behind it; the scale makes it 5.0 in the first hundred rows, and the
    query is 1 there (with negative keys elsewhere, whose relu is 0).
    """
    scene = Scene(folder, scales=scales, pages=2 * PAGES + 8)
    job = Job(7000, 0, ROWS, list(range(PAGES)), list(range(PAGES, 2 * PAGES)))
    scene.start(job)
    scene.announce(job)
    slots = scene.write(scene.prefill, job, 0, ROWS)
    spec, memory = layout("fp8"), scene.prefill.memory[0]
    page, row = np.divmod(slots, 64)
    spec.values(memory)[page, row] = 0
    spec.values(memory)[page, row, 0] = np.where(np.arange(ROWS) < 100, 0x38, 0xB8)  # 1.0 and -1.0
    spec.scales(memory)[page[:100], row[:100]] = np.float32([5.0]).view(np.uint8)
    scene.tell_store(scene.prefill, job, 0, slots, scene.step())
    scene.seen_stored(scene.prefill, job, 0, ROWS, scene.step())
    scene.send(job)
    scene.arrive(job)
    scene.look("LT", job)

    def change(read: dict[str, Any]) -> None:
        query = np.zeros(128, np.float32)
        query[0] = 1.0
        logits = np.zeros(ROWS, np.float32)
        logits[:100] = 5.0
        read |= {"query": query, "weights": np.float32([1.0]), "logits": logits, "k": k, "top_k": top_k}

    scene.read(job, logits=True, change=change)
    return verdict_of(scene)


@SCALES
def test_s12_924_slots_that_name_no_row_are_an_invalid_top_k(tmp_path: Path, scales: pattern.Scales) -> None:
    top_k = np.full(K, -1, np.int32)
    top_k[:VALID] = np.arange(VALID)
    assert (top_k == -1).sum() == 924
    (finding,) = expect(
        scored(tmp_path, scales, top_k), "F26", "invalid-top-k", "top-k", room=7000, role="decode"
    )
    assert any("924 slots that name no row" in line for line in finding.evidence)
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F27"


@SCALES
def test_s12_clears_bytes_table_and_logits(tmp_path: Path, scales: pattern.Scales) -> None:
    top_k = np.full(K, -1, np.int32)
    top_k[:VALID] = np.arange(VALID)
    verdict = scored(tmp_path, scales, top_k)
    for stage in ("source", "descriptor", "wire", "completion", "destination", "table", "read-kernel"):
        assert stage in verdict.cleared
    assert "top-k" not in verdict.cleared


@SCALES
def test_any_choice_among_equal_scores_is_right(tmp_path: Path, scales: pattern.Scales) -> None:
    draw = np.random.default_rng(5)
    top_k = np.concatenate([draw.permutation(100), 100 + draw.permutation(ROWS - 100)[: K - 100]]).astype(
        np.int32
    )
    verdict = scored(tmp_path, scales, draw.permutation(top_k))
    expect_clean(verdict)
    assert "top-k" in verdict.cleared


@SCALES
def test_a_row_below_the_threshold_makes_it_a_wrong_top_k(tmp_path: Path, scales: pattern.Scales) -> None:
    """One of the hundred is left out for a row that scores 0: all indices are valid, once each."""
    top_k = np.arange(1, 101, dtype=np.int32)
    (finding,) = expect(scored(tmp_path, scales, top_k, k=100), "F27", "wrong-top-k", "top-k", room=7000)
    assert any("1 slots below the k-th score" in line for line in finding.evidence)
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F26"


def test_a_row_past_the_end_is_no_row(tmp_path: Path) -> None:
    top_k = np.arange(K, dtype=np.int32)
    top_k[-3:] = ROWS + np.arange(3)
    expect(scored(tmp_path, "standard", top_k), "F26", "invalid-top-k", "top-k", room=7000)


def test_slots_past_the_length_are_nobodys_claim(tmp_path: Path) -> None:
    """k is larger than the request: what stands behind the rows (a 0 as well as a -1) is not looked at."""
    top_k = np.zeros(ROWS + 50, np.int32)
    top_k[:ROWS] = np.arange(ROWS)
    expect_clean(scored(tmp_path, "standard", top_k, k=ROWS + 50))
