"""What speaks against a kind: each scene has the look of one, and one fact that forbids to name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay.verdict import Verdict
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended, ours

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def named(verdict: Verdict) -> set[tuple[str, str, str]]:
    return {(finding.code, finding.stage, finding.confidence) for finding in verdict.findings}


# F31


@KEEPS
@pytest.mark.parametrize("other", [False, True])
def test_bytes_are_not_lost_where_another_transfer_may_have_written_them(
    tmp_path: Path, keep: Any, other: bool
) -> None:
    """``other``: the page's last owner went away with a transfer in flight, of which nobody saw the end."""
    scene = Scene(tmp_path, keep=keep)
    job = ours()
    scene.earlier(job.prefill, job.decode)
    gone = Job(7001, 1, 64, [30], [6])
    scene.start(gone)
    scene.announce(gone)
    scene.store(gone, 0, 64)
    if other:
        scene.post(gone)
    scene.free(scene.decode, gone, "abort")
    begun(scene, job, used=False)
    transfer = scene.post(job)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    ended(scene, job)
    wanted = ("unclassified", "wire", "likely") if other else ("F31", "wire", "certain")
    assert named(verdict_of(scene)) == {wanted}


@KEEPS
@pytest.mark.parametrize("twice", [False, True])
def test_bytes_are_not_lost_where_another_page_of_the_request_goes_to_the_same_place(
    tmp_path: Path, keep: Any, twice: bool
) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    first, second = scene.post(job), scene.post(job, [2], destination=[6 if twice else 7])
    scene.land(first, only=(0, 4096), pages=[6])
    scene.done(first)
    scene.done(second)
    ended(scene, job)
    assert ("F31" in {code for code, *_ in named(verdict_of(scene))}) == (not twice)


# F09


@KEEPS
def test_a_later_read_alone_shows_that_the_bytes_came_late(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    transfer = scene.post(job)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    scene.arrive(job)
    scene.read(job)
    scene.land(transfer)
    scene.read(job)
    assert named(verdict_of(scene)) == {("F09", "completion", "certain")}


# Hazards


@KEEPS
@pytest.mark.parametrize("read", [False, True])
def test_what_nobody_read_is_a_hazard(tmp_path: Path, keep: Any, read: bool) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.send(job, [0, 1])
    scene.arrive(job)
    scene.look("LT", job)
    if read:
        scene.read(job)
    else:
        scene.read(scene.healthy(Job(7001, 1, 64, [30], [10])))
    scene.finish(job)
    verdict = verdict_of(scene)
    assert named(verdict) == ({("F02", "descriptor", "certain")} if read else set())
    assert ["F02" in hazard.what for hazard in verdict.hazards] == ([] if read else [True])


@KEEPS
def test_a_source_that_was_written_in_time_after_all_is_a_hazard(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene, stored=104)
    transfer = scene.post(job, written=0)
    scene.store(job, 104, 192)
    scene.land(transfer)
    scene.done(transfer)
    ended(scene, job)
    verdict = verdict_of(scene)
    expect_clean(verdict)
    assert [hazard.what.split(",")[0] for hazard in verdict.hazards] == ["F10 sent-before-written"]


@KEEPS
def test_bytes_that_came_late_and_before_the_first_read_are_a_hazard(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    transfer = scene.post(job)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.arrive(job)
    scene.land(transfer)
    scene.done(transfer)
    scene.look("LT", job)
    scene.read(job)
    verdict = verdict_of(scene)
    expect_clean(verdict)
    assert ["F09" in hazard.what for hazard in verdict.hazards] == [True]


# F10, F11


@KEEPS
def test_a_source_that_changed_after_its_store_was_not_sent_before_it(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.prefill.memory[0][22, 1024:2048] ^= 1
    scene.send(job)
    ended(scene, job)
    assert named(verdict_of(scene)) == {("unclassified", "source", "likely")}


# F02, F04, F05


@KEEPS
def test_a_gap_in_the_list_is_no_list_that_ends_early(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.send(job, [0])
    scene.send(job, [2])
    ended(scene, job)
    assert named(verdict_of(scene)) == {("unclassified", "descriptor", "likely")}


@KEEPS
def test_a_page_that_went_to_another_of_the_requests_own_is_in_the_right_space_of_ids(
    tmp_path: Path, keep: Any
) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.send(job, [0], destination=[6])
    scene.send(job, [1, 2])
    ended(scene, job)
    assert named(verdict_of(scene)) == {("unclassified", "descriptor", "likely")}


@KEEPS
def test_pages_of_another_layer_with_other_ids_are_no_pairing_of_layers(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, layers=(0, 1), keep=keep)
    job = begun(scene)
    scene.send(job, pairs=[(1, 1)])
    scene.send(job, pairs=[(0, 1)], destination=[15, 16, 17])
    ended(scene, job)
    assert named(verdict_of(scene)) == {("unclassified", "descriptor", "likely")}
