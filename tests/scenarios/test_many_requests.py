"""Among many requests that reuse each other's pages, exactly those that were hit are named, each by its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.million_trace import build
from tests.scenarios.outcome import verdict_of_paths


@pytest.mark.parametrize("seed", [1, 2])
def test_all_bad_pages_among_20_000_snapshots_are_named_and_no_others(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "many.h5"
    snapshots, wrong = build(path, requests=80, layers=4, seed=seed)
    assert snapshots > 20_000
    verdict = verdict_of_paths([path])
    found = {
        (finding.request.room, finding.layer, finding.code): tuple(page.logical for page in finding.pages)
        for finding in verdict.findings
    }
    assert len(found) == len(verdict.findings), "a fault of one layer is told once"
    assert found == wrong
    assert {code for *_, code in wrong} == {"F09", "F10", "F14"}


def test_a_trace_without_faults_of_the_same_kind_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.million_trace.Pair.plan", lambda pair: [""] * pair.requests)
    path = tmp_path / "many.h5"
    _, wrong = build(path, requests=70, layers=2)
    assert not wrong
    verdict = verdict_of_paths([path])
    assert verdict.findings == ()
    assert verdict.verdict == "clean"
