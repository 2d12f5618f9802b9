"""A difference of no kind says at least whose rows they are, as far as the trace knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capture_hooks.layouts import layout
from replay.verdict import Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import arrived

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)


def mixed(scene: Scene, *, values: bool = True, source: int = 9, first: int = 0, target: int = 8) -> Verdict:
    """Eight rows of the request's page 1 become rows of another page, by nobody that was seen."""
    scene.healthy(Job(7005, 3, 128, [30, 31], [9, 10]))
    job = arrived(scene)
    spec, memory = layout("fp8"), scene.decode.memory[0]
    areas = (spec.values, spec.scales) if values else (spec.scales,)
    for area in areas:
        area(memory)[6, target : target + 8] = area(memory)[source, first : first + 8].copy()
    scene.look("LT", job)
    scene.read(job)
    return verdict_of(scene)


@KEEPS
@SCALES
def test_rows_of_another_request_are_recognised_where_they_do_not_belong(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    (finding,) = mixed(Scene(tmp_path, scales=scales, keep=keep), source=10, first=0).findings
    assert finding.code == "unclassified"
    said = " ".join(finding.evidence)
    assert "8 rows of it hold the values of room 7005's logical page 1" in said
    assert "8 rows down" in said


@KEEPS
def test_rows_of_another_page_of_the_request_are_its_own(tmp_path: Path, keep: Any) -> None:
    (finding,) = mixed(Scene(tmp_path, keep=keep), source=7, first=8).findings
    assert "the request's own logical page 2" in " ".join(finding.evidence)


@KEEPS
def test_scales_alone_are_nobodys(tmp_path: Path, keep: Any) -> None:
    (finding,) = mixed(Scene(tmp_path, scales="powers", keep=keep), values=False, first=1).findings
    assert finding.code == "unclassified"
    assert "hold the values" not in " ".join(finding.evidence)


@KEEPS
def test_empty_rows_are_nobodys(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep, drop=["copy"])
    job = arrived(scene)
    scene.decode.memory[0][6, :1024] = 0
    scene.look("LT", job)
    scene.read(job)
    (finding,) = verdict_of(scene).findings
    assert "hold the values" not in " ".join(finding.evidence)
