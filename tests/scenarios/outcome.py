"""Judging a scene, and saying exactly what the verdict must be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import Layout, layout
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from replay.verdict import (
    EXIT_CLEAN,
    EXIT_DIVERGENT,
    EXIT_INCONCLUSIVE,
    SCHEMA,
    STAGES,
    Donor,
    Finding,
    PageFinding,
    Verdict,
)
from tests.scenarios.scene import Scene

U8 = npt.NDArray[np.uint8]
ROOT = Path(__file__).resolve().parents[2]
EXIT = {"clean": EXIT_CLEAN, "divergent": EXIT_DIVERGENT, "inconclusive": EXIT_INCONCLUSIVE}


def verdict_of(scene: Scene) -> Verdict:
    """Seal the scene's trace, open it and judge it."""
    scene.close()
    return verdict_of_paths(scene.paths)


def verdict_of_paths(paths: Sequence[Path]) -> Verdict:
    with open_trace(*paths) as trace:
        verdict = judge(trace, JudgeOptions())
    assert json.loads(json.dumps(verdict.to_json()))["schema"] == SCHEMA
    for finding in verdict.findings:
        assert finding.stage in STAGES
        assert finding.evidence, "an accusation without evidence"
    assert (verdict.verdict == "divergent") == bool(verdict.findings)
    return verdict


def replay(paths: Iterable[Path]) -> tuple[int, dict[str, Any]]:
    """``replay PATHS --json`` in a fresh process: exit code and the verdict that it printed."""
    command = [sys.executable, "-c", "from replay.cli import main; main()", *map(str, paths), "--json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Closed ranges of the true entries."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    first, past = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(int(a), int(b) - 1) for a, b in zip(first, past, strict=True)]


def page_finding(
    logical: int,
    physical: int,
    seen: U8,
    right: U8,
    *,
    rows: int = 64,
    keep: str = "bytes",
    donor: Donor | None = None,
    spec: Layout | None = None,
) -> PageFinding:
    """What must be said about a page that holds ``seen`` where ``right`` belongs; ``rows`` of it are valid."""
    spec = spec or layout("fp8")
    differs = (seen != right)[: spec.page_bytes]
    valid = np.arange(spec.rows) < rows
    areas = [differs[: spec.scale_base].reshape(spec.rows, -1)]
    if spec.scale_bytes:
        areas.append(differs[spec.scale_base :].reshape(spec.rows, -1))
    bad = [area.any(1) & valid for area in areas]
    ranges = [spec.value_range(*run) for run in runs(bad[0])]
    if spec.scale_bytes:
        ranges += [spec.scale_range(*run) for run in runs(bad[1])]
    return PageFinding(
        logical=logical,
        physical=physical,
        value_rows=tuple(runs(bad[0])),
        scale_rows=tuple(runs(bad[1])) if spec.scale_bytes else (),
        byte_ranges=tuple(_merged(ranges)),
        bytes_differing=sum(int(area[valid].sum()) for area in areas) if keep == "bytes" else None,
        donor=donor,
    )


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def expect(
    verdict: Verdict,
    code: str,
    kind: str,
    stage: str,
    *,
    room: int,
    layers: Sequence[int] = (0,),
    pages: Sequence[PageFinding] | None = None,
    confidence: str | None = "certain",
    role: str = "",
) -> list[Finding]:
    """The verdict is divergent with exactly one finding a layer, and each says exactly this."""
    assert verdict.verdict == "divergent"
    found = sorted(verdict.findings, key=lambda finding: finding.layer)
    told = [(f.code, f.kind, f.stage, f.layer, f.request.room) for f in found]
    assert told == [(code, kind, stage, layer, room) for layer in layers]
    for finding in found:
        assert finding.buffer == "index_k"
        assert finding.request.attempt == 0
        assert finding.rank == 0
        if confidence is not None:
            assert finding.confidence == confidence
        if role:
            assert finding.role == role
        if pages is not None:
            assert _plain(finding.pages) == _plain(pages)
    return found


def expect_clean(verdict: Verdict) -> None:
    """Clean: nothing found, and the verdict says what that covers."""
    assert verdict.findings == ()
    assert verdict.verdict == "clean", verdict.not_judged
    assert verdict.scope


def _plain(pages: Sequence[PageFinding]) -> list[tuple[Any, ...]]:
    return [
        (
            page.logical,
            page.physical,
            [list(rows) for rows in page.value_rows],
            [list(rows) for rows in page.scale_rows],
            [list(span) for span in page.byte_ranges],
            page.bytes_differing,
            page.donor,
        )
        for page in sorted(pages, key=lambda page: page.logical)
    ]
