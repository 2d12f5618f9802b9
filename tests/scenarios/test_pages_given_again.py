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


@pytest.mark.parametrize("lost", ["first", "second"])
def test_an_allocation_that_was_not_seen_is_not_the_one_before_or_after_it(tmp_path: Path, lost: str) -> None:
    """The request gives its pages back and is given them in another order; one of the two records was lost."""
    scene = Scene(tmp_path)
    job = Job(7000, 0, 190, [21, 22, 23], [5, 6, 7])
    scene.start(job, decode=lost != "first")
    if lost == "first":
        scene.begin(scene.decode, job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    scene.send(job)
    ended(scene, job)
    scene.decode.emit("free", room=job.room, pages=job.decode, reason="retract")
    job.decode[:] = [7, 5, 6]
    if lost != "second":
        scene.give(scene.decode, job, job.decode)
    scene.announce(job)
    scene.send(job)
    scene.arrive(job)
    scene.append(job)
    scene.read(job)
    verdict = verdict_of(scene)
    assert not verdict.findings
    # Without the second record its later reads are those of a request that is over.
    assert verdict.verdict == ("inconclusive" if lost == "first" else "clean")


def _sharer(scene: Scene, owner: Job) -> Job:
    """A request that shares the owner's first two pages on both sides, and reads them."""
    job = Job(7001, 1, 192, [*owner.prefill[:2], 33], [*owner.decode[:2], 11], prefix_q=0, prefix_rows=128)
    for side, of, own in ((scene.prefill, owner.prefill, 33), (scene.decode, owner.decode, 11)):
        scene.begin(side, job)
        scene.give(side, job, of[:2], shared=True)
        scene.give(side, job, [own], logical=2)
    scene.announce(job, first=2)
    scene.store(job, 128, job.rows)
    scene.send(job, [2])
    scene.arrive(job, first=2)
    scene.read(job)
    return job


@pytest.mark.parametrize("place", ["another page", "its other page"])
def test_who_shares_a_page_that_was_loaded_back_reads_what_arrived_for_its_owner(
    tmp_path: Path, place: str
) -> None:
    """A layer that nobody sends: the owner is given up and comes back in pages where others' bytes had arrived."""
    scene = Scene(tmp_path, layers=[0], decode_layers=[0, 80])
    scene.earlier([21, 22, 23], [8, 9, 10], room=9008)
    owner = arrived(scene)
    scene.read(owner)
    d = scene.decode
    kept = {layer: d.memory[layer][owner.decode].copy() for layer in d.layers}
    d.emit("free", room=owner.room, pages=owner.decode, reason="retract")
    owner.decode[:] = [6, 5, 7] if place == "its other page" else [8, 9, 10]
    scene.give(d, owner, owner.decode)
    for layer in d.layers:
        d.memory[layer][owner.decode] = kept[layer]
    scene.look("LT", owner)
    scene.read(owner)
    sharer = _sharer(scene, owner)
    verdict = verdict_of(scene)
    assert not verdict.findings
    assert not [hazard for hazard in verdict.hazards if str(sharer.room) in hazard.where]
    assert not [item for item in verdict.not_judged if "RD" in item.what]


def test_the_owner_of_a_shared_page_is_whose_bytes_arrived_last(tmp_path: Path) -> None:
    """The record that its owner was given the page was lost; the one before it had given it back."""
    scene = Scene(tmp_path)
    scene.earlier([21, 22, 23], [5, 6, 7], room=9008)
    owner = Job(7000, 0, 192, [24, 25, 26], [5, 6, 7])
    scene.start(owner, decode=False)
    scene.begin(scene.decode, owner)
    scene.announce(owner)
    scene.store(owner, 0, owner.rows)
    scene.send(owner)
    ended(scene, owner)
    _sharer(scene, owner)
    verdict = verdict_of(scene)
    assert not verdict.findings
    assert not verdict.hazards
