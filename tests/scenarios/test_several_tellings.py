"""Completion is told by each prefill rank to each decode rank: what the order of the tellings proves, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, two_receivers

ONE, TWO = "0a1b2c3d4e.0", "0a1b2c3d4e.1"


def told(scene: Scene, *steps: str, lost: bool = True, late: bool = False) -> Scene:
    """The transfer's end and the tellings come in this order.

    ``lost``: the most part of page 6 does not land, or only after the first read where it is ``late``.
    """
    job = begun(scene)
    transfer = scene.post(job)
    if lost:
        scene.land(transfer, only=(0, 4096), pages=[6])
    else:
        scene.land(transfer)
    for step in steps:
        if step == "done":
            scene.done(transfer)
        else:
            scene.tell(job, step)
    scene.arrive(job, told=True)
    scene.read(job)
    if late:
        scene.land(transfer)
    scene.look("LT", job)
    return scene


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("steps", [(ONE, "done"), (ONE, TWO, "done")])
def test_an_end_after_every_telling_proves_that_completion_came_early(
    tmp_path: Path, steps: tuple[str, ...], threads: bool
) -> None:
    verdict = verdict_of(told(Scene(tmp_path, threads=threads), *steps))
    (finding,) = expect(verdict, "F09", "completion-early", "completion", room=7000)
    assert [page.logical for page in finding.pages] == [1]


@pytest.mark.parametrize("steps", [("done", ONE), (ONE, "done", TWO), ("done", ONE, TWO)])
def test_an_end_before_some_telling_may_have_been_waited_for(tmp_path: Path, steps: tuple[str, ...]) -> None:
    verdict = verdict_of(told(Scene(tmp_path), *steps))
    expect(verdict, "F31", "lost-on-wire", "wire", room=7000)


@pytest.mark.parametrize(("steps", "open"), [((ONE, "done", TWO), False), ((ONE,), True)])
def test_only_an_end_that_nothing_orders_is_called_open(
    tmp_path: Path, steps: tuple[str, ...], open: bool
) -> None:
    verdict = verdict_of(told(Scene(tmp_path), *steps, late=True))
    (finding,) = expect(verdict, "F09", "completion-early", "completion", room=7000)
    assert any("nothing orders the end of the transfer" in line for line in finding.evidence) == open


@pytest.mark.parametrize("steps", [("done", ONE), (ONE, "done", TWO), ("done", ONE, TWO)])
def test_whole_pages_are_clean_however_often_completion_is_told(
    tmp_path: Path, steps: tuple[str, ...]
) -> None:
    expect_clean(verdict_of(told(Scene(tmp_path), *steps, lost=False)))


def test_a_rank_whose_telling_has_no_order_to_the_end_proves_nothing(tmp_path: Path) -> None:
    """Another prefill rank tells as well: its telling may have come after the end of this one's transfer."""
    first = Scene(tmp_path)
    second = Scene(tmp_path, beside=first)
    job = begun(first)
    transfer = first.post(job)
    first.land(transfer, only=(0, 4096), pages=[6])
    first.tell(job, ONE)
    first.edge(second.prefill, first.decode, "status", f"{job.key}/{TWO}")
    first.done(transfer)
    first.arrive(job, told=True)
    first.read(job)
    first.look("LT", job)
    (finding,) = verdict_of(first).findings
    assert (finding.code, finding.stage, finding.confidence) == ("unclassified", "wire", "likely")


@pytest.mark.parametrize("heard", [False, True])
def test_a_telling_of_which_only_one_end_was_seen_is_not_passed_over(tmp_path: Path, heard: bool) -> None:
    """``heard``: decode's end of the second telling is in the trace; else prefill's, which may have been for it."""
    scene = Scene(tmp_path)
    job = begun(scene)
    transfer = scene.post(job)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.tell(job, ONE)
    scene.done(transfer)
    side, end = (scene.decode, "head") if heard else (scene.prefill, "tail")
    side.emit("order", what="status", key=f"{job.key}/{TWO}", end=end)
    scene.arrive(job, told=True)
    scene.read(job)
    scene.look("LT", job)
    (finding,) = verdict_of(scene).findings
    assert finding.code != "F09"


def ended_for_both(first: Scene, other: Scene, job: Job, same: Job) -> Scene:
    for scene, its in ((first, job), (other, same)):
        scene.arrive(its, told=True)
        scene.read(its)
        scene.look("LT", its)
    return first


def test_what_another_receiver_was_told_later_says_nothing_of_this_one(tmp_path: Path) -> None:
    first, other, job, same = two_receivers(tmp_path)
    transfer = first.post(job)
    other.send(same)
    first.land(transfer, only=(0, 4096), pages=[6])
    first.tell(job, ONE)
    first.done(transfer)
    other.tell(same, TWO)
    (finding,) = expect(
        verdict_of(ended_for_both(first, other, job, same)),
        "F09",
        "completion-early",
        "completion",
        room=7000,
    )
    assert finding.rank == 0


def test_a_late_transfer_to_another_receiver_proves_nothing_of_this_one(tmp_path: Path) -> None:
    first, other, job, same = two_receivers(tmp_path)
    transfer, theirs = first.post(job), other.post(same)
    first.land(transfer, only=(0, 4096), pages=[6])
    first.done(transfer)
    first.tell(job, ONE)
    other.tell(same, TWO)
    other.land(theirs)
    other.done(theirs)
    verdict = verdict_of(ended_for_both(first, other, job, same))
    (finding,) = expect(verdict, "F31", "lost-on-wire", "wire", room=7000)
    assert finding.rank == 0


def test_a_late_transfer_of_another_page_proves_nothing_of_this_one(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    transfer, rest = scene.post(job, [0, 1]), scene.post(job, [2])
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    scene.tell(job, ONE)
    scene.land(rest)
    scene.done(rest)
    scene.arrive(job, told=True)
    scene.read(job)
    scene.look("LT", job)
    (finding,) = verdict_of(scene).findings
    assert finding.code != "F09"
