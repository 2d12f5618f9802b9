"""F23 in the reserved page: a padding row leaves NaN in slot 0, and a read's logits are no numbers from some row on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from replay.verdict import Verdict
from tests.scenarios import readers
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Side
from tests.scenarios.test_kinds_of_local_writes import padded

ROWS = 165
NOBODY = Job(-1, 0, 0, [], [])


def spoilt(scene: Scene, *, slots: Sequence[int] = (0, 0), nan: bool = True, thread: int = 0) -> None:
    """A padded batch stores its padding to ``slots``; slot 0 is seen to hold NaN, or what it stored."""
    padded(scene.decode, 0, list(slots), 5, thread=thread)
    if nan:
        scene.decode.memory[0][0, :128] = 0x7F
    scene.decode.snapshot("ST", "", NOBODY, [-1], [0], rows=-1)


def read(scene: Scene, job: Job, lost: slice | None) -> None:
    """A read whose keys are no numbers in the rows ``lost``."""

    def keys(side: Side, layer: int, table: Sequence[int], rows: int) -> npt.NDArray[np.float64]:
        found = readers.planar(side.memory[layer][list(table)], rows)
        if lost is not None:
            found[lost] = np.nan
        return found

    scene.read(job, logits=True, change=readers.told(scene.decode, 0, job.decode, job.rows, keys))


def begun(scene: Scene, *, first: int = 5) -> Job:
    return scene.healthy(Job(7000, 0, ROWS, [21, 22, 23], [first, 6, 7]), reads=0)


def unnamed(verdict: Verdict) -> None:
    (finding,) = verdict.findings
    assert (finding.code, finding.stage) == ("unclassified", "read-kernel")


@pytest.mark.parametrize("first", [0, 128, 160])
def test_f23_a_read_takes_in_the_nan_of_slot_0(tmp_path: Path, first: int) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    spoilt(scene)
    read(scene, job, slice(first, None))
    verdict = verdict_of(scene)
    (finding,) = expect(
        verdict, "F23", "padding-row-written", "store", room=7000, role="decode", confidence="likely"
    )
    assert [page.logical for page in finding.pages] == list(range(first // 64, 3))
    assert any("row 0 of page 0" in line for line in finding.evidence)
    assert "store" not in verdict.cleared


def test_a_nan_in_slot_0_that_no_read_takes_in_is_clean(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    spoilt(scene)
    read(scene, job, None)
    expect_clean(verdict_of(scene))


def test_logits_that_are_no_numbers_are_not_slot_0s_where_it_holds_numbers(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    spoilt(scene, nan=False)
    read(scene, job, slice(128, None))
    unnamed(verdict_of(scene))


def test_rows_amidst_right_ones_are_not_slot_0s(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    spoilt(scene)
    read(scene, job, slice(64, 128))
    unnamed(verdict_of(scene))


@pytest.mark.parametrize(
    ("slots", "thread"), [([1], 0), ([6 * 64 - 1], 0), ([0], 3)], ids=["slot 1", "page 5", "unordered"]
)
def test_a_nan_that_no_padding_row_is_known_to_have_left_is_not_named(
    tmp_path: Path, slots: list[int], thread: int
) -> None:
    scene = Scene(tmp_path)
    job = begun(scene, first=8)
    spoilt(scene, slots=slots, thread=thread)
    read(scene, job, slice(128, None))
    unnamed(verdict_of(scene))


@pytest.mark.parametrize("before", [False, True])
def test_a_nan_that_comes_later_is_not_named(tmp_path: Path, before: bool) -> None:
    """``before``: a padding row of numbers was stored to slot 0 before the read."""
    scene = Scene(tmp_path)
    job = begun(scene)
    if before:
        spoilt(scene, nan=False)
    read(scene, job, slice(128, None))
    spoilt(scene)
    unnamed(verdict_of(scene))


def test_page_0_in_somebodys_hands_is_not_reserved(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(7001, 1, 64, [30], [0]), finish=True, reads=0)
    job = begun(scene)
    spoilt(scene)
    read(scene, job, slice(128, None))
    unnamed(verdict_of(scene))


def test_page_0_may_be_somebodys_where_allocations_are_not_seen(tmp_path: Path) -> None:
    scene = Scene(tmp_path, drop=("decode:alloc",))
    job = begun(scene)
    spoilt(scene)
    read(scene, job, slice(128, None))
    assert "F23" not in {finding.code for finding in verdict_of(scene).findings}


def test_rows_that_hold_nan_themselves_give_what_they_must(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    spoilt(scene)
    for side, page in ((scene.prefill, 23), (scene.decode, 7)):
        side.memory[0][page, :128] = 0x7F
    read(scene, job, slice(128, None))
    assert "F23" not in {finding.code for finding in verdict_of(scene).findings}
