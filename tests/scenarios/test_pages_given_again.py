"""A request that gave pages back and goes on is judged again; what ran in between is an overshoot step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.outcome import verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import arrived, begun, ended

WRONG = slice(300, 340)


def _given_back(scene: Scene, job: Job, between: bool) -> None:
    scene.decode.emit("free", room=job.room, pages=job.decode, reason="evict")
    if between:
        scene.healthy(Job(7003, 3, 192, [30, 31, 32], list(job.decode)), finish=True)


@pytest.mark.parametrize("between", [False, True], ids=["idle", "another's in between"])
@pytest.mark.parametrize("pages", [[5, 6, 7], [9, 10, 11]], ids=["same pages", "other pages"])
def test_a_wrong_byte_is_found_after_the_pages_were_given_again(
    tmp_path: Path, between: bool, pages: list[int]
) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)
    _given_back(scene, job, between)
    job.decode[:] = pages
    scene.give(scene.decode, job, job.decode)
    scene.announce(job)
    scene.send(job)
    scene.arrive(job)
    scene.decode.memory[0][pages[1], WRONG] ^= 0x55
    scene.look("LT", job)
    scene.read(job)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    assert {p.physical for f in verdict.findings for p in f.pages} == {pages[1]}
    assert {f.request.room for f in verdict.findings} == {job.room}


@pytest.mark.parametrize("again", [False, True], ids=["over", "given again later"])
def test_what_a_step_sees_between_is_nobodys(tmp_path: Path, again: bool) -> None:
    """The step was launched before the free, and saw the next owner's bytes."""
    scene = Scene(tmp_path)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)
    _given_back(scene, job, True)
    scene.read(job, logits=True)
    if again:
        scene.give(scene.decode, job, job.decode)
        scene.announce(job)
        scene.send(job)
        ended(scene, job)
    verdict = verdict_of(scene)
    assert verdict.verdict == "clean"
    assert verdict.scope["overshoot"] > 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_that_keeps_pages_goes_on(tmp_path: Path, at_once: bool) -> None:
    """It gives back what it was given for rows that it never made."""
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.give(scene.decode, job, [8, 9], logical=3)
    scene.read(job)
    for pages in [[8, 9]] if at_once else [[9], [8]]:
        scene.decode.emit("free", room=job.room, pages=pages)
    scene.decode.memory[0][job.decode[0], WRONG] ^= 0x55
    scene.read(job)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    assert {p.physical for f in verdict.findings for p in f.pages} == {job.decode[0]}


@pytest.mark.parametrize("reason", ["finish", "abort"])
def test_a_request_whose_reason_says_that_it_is_over_is_over(tmp_path: Path, reason: str) -> None:
    """Pages of it may live on in a prefix tree, and be given to others from there."""
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.read(job)
    scene.decode.emit("free", room=job.room, pages=job.decode[2:], reason=reason)
    scene.decode.memory[0][job.decode[0], WRONG] ^= 0x55
    scene.read(job)
    assert verdict_of(scene).verdict == "clean"


def test_a_late_write_is_told_where_its_writer_had_the_page_twice(tmp_path: Path) -> None:
    """A owns the page, then B; A's old transfer lands in B's, and later A is given the page again."""
    scene = Scene(tmp_path)
    old = begun(scene)
    late = scene.post(old)
    scene.decode.emit("free", room=old.room, pages=old.decode, reason="evict")
    job = Job(7001, 1, 192, [31, 32, 33], list(old.decode))
    begun(scene, job, used=False)
    scene.send(job)
    scene.arrive(job)
    scene.land(late)
    scene.done(late)
    scene.look("LT", job)
    scene.read(job)
    scene.finish(job)
    scene.give(scene.decode, old, old.decode)
    scene.announce(old)
    scene.send(old)
    ended(scene, old)
    verdict = verdict_of(scene)
    assert {(f.code, f.request.room, f.confidence) for f in verdict.findings} == {
        ("F14", job.room, "certain")
    }


def test_old_bytes_of_a_shared_page_are_not_a_later_owners(tmp_path: Path) -> None:
    """The page arrives late at its owner. Who shares it since has the owner's look at it, taken before the share."""
    scene = Scene(tmp_path)
    scene.earlier([21, 22, 23], [5, 6, 7], room=9008)
    owner = begun(scene)
    late = scene.post(owner)
    scene.arrive(owner)
    scene.read(owner)
    sharer = Job(7001, 1, 192, [31, 32, 33], [5, 6, 10], prefix_q=0, prefix_rows=128)
    for side in (scene.prefill, scene.decode):
        scene.begin(side, sharer)
    scene.give(scene.prefill, sharer, sharer.prefill)
    scene.give(scene.decode, sharer, [5, 6], shared=True)
    scene.give(scene.decode, sharer, [10], logical=2)
    scene.announce(sharer, first=2)
    scene.store(sharer, 0, sharer.rows)
    scene.send(sharer, [2])
    scene.arrive(sharer, first=2)
    scene.read(sharer)
    scene.land(late)
    scene.done(late)
    scene.look("LT", owner)
    scene.look("LT", sharer)
    found = verdict_of(scene).findings
    assert {f.request.room for f in found} >= {owner.room}
    assert {f.code for f in found} == {"F09"}
