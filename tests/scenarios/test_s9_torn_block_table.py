"""S9: the kernel reads through a block table whose last entries are another request's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene

OWN = [11, 12, 13, 14, 15, 16]
FOREIGN = [41, 42, 43]


def torn_table(scene: Scene, *, logits: bool = False, torn: bool = True) -> Scene:
    """q3 (room 7003) owns 41 to 43; q0 (room 7000) owns 11 to 16 and is read through [11, 12, 13, 41, 42, 43]."""
    q3 = Job(7003, 3, 192, [31, 32, 33], FOREIGN)
    q0 = Job(7000, 0, 384, [21, 22, 23, 24, 25, 26], OWN)
    scene.healthy(q3)
    scene.healthy(q0, reads=1)
    scene.read(q3, logits=logits)
    scene.read(q0, table=OWN[:3] + FOREIGN if torn else OWN, logits=logits)
    return scene


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_foreign_entries_are_a_torn_block_table_and_nothing_else(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = verdict_of(torn_table(Scene(tmp_path, scales=scales, keep=keep)))
    (finding,) = expect(verdict, "F18", "torn-block-table", "table", room=7000, role="decode")
    assert [page.logical for page in finding.pages] == [3, 4, 5]
    # Either what the table said or what it should have said names the place; both are in the evidence.
    assert [page.physical for page in finding.pages] in (FOREIGN, OWN[3:])
    donors = [page.donor for page in finding.pages]
    assert [(d.room, d.layer, d.logical) for d in donors if d] == [(7003, 0, k) for k in range(3)]
    for stage in ("source", "descriptor", "wire", "completion", "destination"):
        assert stage in verdict.cleared
    assert "table" not in verdict.cleared


def test_the_kernel_is_cleared_by_its_logits_and_only_by_them(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    verdict = verdict_of(torn_table(Scene(tmp_path / "with"), logits=True))
    expect(verdict, "F18", "torn-block-table", "table", room=7000)
    assert "read-kernel" in verdict.cleared
    verdict = verdict_of(torn_table(Scene(tmp_path / "without")))
    assert "read-kernel" not in verdict.cleared


def test_a_table_that_is_torn_while_the_kernel_runs_is_found_in_its_second_look(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    torn_table(scene, torn=False)
    d = scene.decode
    d.emit(
        "read",
        room=7000,
        buffer=d.buffer(0),
        step=99,
        rows=384,
        table=OWN,
        table_after=OWN[:3] + FOREIGN,
    )
    verdict = verdict_of(scene)
    (finding,) = expect(verdict, "F18", "torn-block-table", "table", room=7000, confidence="likely")
    assert [page.logical for page in finding.pages] == [3, 4, 5]
    assert any("the table changed while the kernel ran" in line for line in finding.evidence)


def test_entries_past_the_length_are_nobodys_claim(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    torn_table(scene, torn=False)
    scene.read(Job(7000, 0, 384, [], OWN), pad=FOREIGN)
    expect_clean(verdict_of(scene))


def test_the_whole_table_is_clean(tmp_path: Path) -> None:
    expect_clean(verdict_of(torn_table(Scene(tmp_path), torn=False)))
