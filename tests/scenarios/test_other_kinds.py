"""Faults of kinds that have no file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended, ours

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def expect_named(
    verdict: Verdict,
    code: str,
    *stages: str,
    layers: tuple[int, ...] = (0,),
    pages: tuple[int, ...] | None = None,
    room: int = 7000,
) -> None:
    assert verdict.verdict == "divergent"
    for finding in verdict.findings:
        assert finding.code == code, (finding.code, finding.stage, finding.evidence)
        assert finding.stage in stages, (finding.code, finding.stage, finding.evidence)
        assert finding.request.room == room
    assert tuple(sorted(finding.layer for finding in verdict.findings)) == layers
    if pages is not None:
        for finding in verdict.findings:
            assert tuple(page.logical for page in finding.pages) == pages


@KEEPS
def test_f04_the_sender_uses_its_own_page_ids(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.send(job, destination=[21, 22, 23])
    ended(scene, job)
    expect_named(verdict_of(scene), "F04", "descriptor", pages=(0, 1, 2))


def hit_by_other_ids(scene: Scene) -> Job:
    """The sender writes to its own page ids, two of which are pages of a request that has arrived."""
    other = scene.healthy(Job(7003, 3, 100, [30, 31], [21, 22]))
    job = begun(scene)
    scene.send(job, destination=[21, 22, 23])
    ended(scene, job)
    return other


@KEEPS
def test_f04_names_the_request_whose_pages_were_hit_too(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    other = hit_by_other_ids(scene)
    scene.read(other)
    findings = verdict_of(scene).findings
    assert {(f.code, f.stage, f.confidence) for f in findings} == {("F04", "descriptor", "certain")}
    hit = {(f.request.room, page.logical): page.donor for f in findings for page in f.pages}
    assert set(hit) == {(7000, 0), (7000, 1), (7000, 2), (7003, 0), (7003, 1)}
    for logical in (0, 1):
        donor = hit[7003, logical]
        assert donor is not None
        assert (donor.room, donor.logical) == (7000, logical)


@KEEPS
def test_f04_of_two_requests_that_hit_a_page_the_last_one_brought_all_of_it(
    tmp_path: Path, keep: Any
) -> None:
    """The page at the sender held the first one's rows still, behind those of the second."""
    scene = Scene(tmp_path, keep=keep)
    other = scene.healthy(Job(7003, 3, 64, [30], [21]))
    for room, q, rows in ((7000, 0, 64), (7004, 4, 40)):
        job = Job(room, q, rows, [21], [5])
        begun(scene, job, used=False)
        scene.send(job, destination=[21])
        ended(scene, job)
        scene.finish(job)
    scene.read(other)
    findings = [f for f in verdict_of(scene).findings if f.request.room == 7003]
    assert {(f.code, f.stage, f.confidence) for f in findings} == {("F04", "descriptor", "certain")}
    ((page,),) = (f.pages for f in findings)
    assert page.value_rows == ((0, 63),)
    assert page.donor is not None
    assert (page.donor.room, page.donor.logical) == (7004, 0)


@KEEPS
def test_f04_of_a_page_that_was_hit_needs_to_know_every_owner(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep, drop=["alloc"])
    other = hit_by_other_ids(scene)
    scene.read(other)
    assert not [f for f in verdict_of(scene).findings if f.code == "F04" and f.request.room == 7003]


@KEEPS
@pytest.mark.parametrize("over", [True, False])
def test_f04_of_a_transfer_that_was_over_when_the_page_was_seen_right(
    tmp_path: Path, keep: Any, over: bool
) -> None:
    """``over``: it ended before the other request's own transfer; its rows stand there later, by nobody seen."""
    scene = Scene(tmp_path, keep=keep)
    other = begun(scene, Job(7003, 3, 64, [30], [21]))
    job = begun(scene, Job(7000, 0, 64, [21], [5]))
    astray = scene.post(job, destination=[21])
    if over:
        scene.land(astray)
        scene.done(astray)
    scene.send(other)
    scene.arrive(other)
    scene.land(astray)
    if not over:
        scene.done(astray)
    scene.read(other)
    found = [(f.code, f.confidence) for f in verdict_of(scene).findings if f.request.room == 7003]
    assert found == [("unclassified", "likely") if over else ("F04", "certain")]


@KEEPS
def test_f04_some_of_the_senders_ids_are_other_pages_of_the_request(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = Job(7000, 0, 192, [21, 22, 5], [5, 6, 7])
    begun(scene, job)
    scene.send(job, destination=job.prefill)
    ended(scene, job)
    findings = verdict_of(scene).findings
    assert {(f.code, f.stage, f.confidence) for f in findings} == {("F04", "descriptor", "certain")}
    assert {page.logical for f in findings for page in f.pages} == {0, 1, 2}


@KEEPS
def test_f05_layers_are_paired_by_position(tmp_path: Path, keep: Any) -> None:
    """S8 in small: the last half of the layers is sent into the first half."""
    scene = Scene(tmp_path, layers=range(4), keep=keep)
    job = begun(scene)
    scene.send(job, pairs=[(2, 0), (3, 1)])
    ended(scene, job)
    verdict = verdict_of(scene)
    assert {(f.code, f.stage, f.confidence) for f in verdict.findings} == {("F05", "descriptor", "certain")}
    assert sorted(f.layer for f in verdict.findings) == [0, 1, 2, 3]


@KEEPS
def test_f11_the_source_is_given_away_before_the_transfer_is_over(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    p = scene.prefill
    transfer = scene.post(job)
    scene.free(p, job)
    thief = Job(7001, 1, 64, [22], [12])
    scene.start(thief)
    scene.announce(thief)
    scene.store(thief, 0, 64)
    scene.land(transfer)
    scene.done(transfer)
    ended(scene, job)
    scene.send(thief)
    scene.arrive(thief)
    scene.read(thief)
    expect_named(verdict_of(scene), "F11", "source", pages=(1,))


@KEEPS
def test_f11_blames_no_later_owner_for_what_it_left_in_the_page(tmp_path: Path, keep: Any) -> None:
    """Nobody saw who wrote over the source; its later owner has few rows, and the rest of the page stays as it was."""
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.prefill.memory[0][22] = pattern.page(5, 0, 1)
    scene.send(job)
    ended(scene, job)
    scene.finish(job)
    scene.healthy(Job(7001, 1, 18, [22], [12]))
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.stage, finding.request.room) == ("unclassified", "source", job.room)


@KEEPS
def test_f13_a_transfer_that_failed_is_used(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    transfer = scene.post(job)
    scene.prefill.emit(
        "transfer_state", state="error", transfer=transfer.transfer, room=job.room, agent=scene.prefill.agent
    )
    ended(scene, job)
    expect_named(verdict_of(scene), "F13", "wire", pages=(0, 1, 2))


@KEEPS
@pytest.mark.parametrize("rows", [191, 193, 128])
def test_f19_a_read_that_is_too_long_or_too_short(tmp_path: Path, keep: Any, rows: int) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)
    job.decode.append(8)
    scene.give(scene.decode, job, [8], logical=3)
    scene.read(job, rows=rows, snapshot=False)
    verdict = verdict_of(scene)
    for finding in verdict.findings:
        assert (finding.code, finding.stage) in {("F19", "table"), ("unclassified", "table")}


def test_f26_invalid_entries_within_the_first_k(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)
    scene.read(job, logits=True, change=lambda read: read["top_k"].__setitem__(slice(100, 192), -1))
    verdict = verdict_of(scene)
    expect_named(verdict, "F26", "top-k")
    assert "read-kernel" in verdict.cleared


def test_f27_a_valid_top_k_that_is_not_the_best(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)

    def worst(read: dict[str, Any]) -> None:
        read["k"] = 64
        read["top_k"] = np.argsort(read["logits"])[:64].astype(np.int32)

    scene.read(job, logits=True, change=worst)
    verdict = verdict_of(scene)
    expect_named(verdict, "F27", "top-k")
    assert "read-kernel" in verdict.cleared


@KEEPS
def test_f25_logits_outside_the_bound_are_kernel_numerics(tmp_path: Path, keep: Any) -> None:
    """From row 128 on, a tile boundary, the logits are a tenth off; bytes, table and lengths are right."""
    scene = Scene(tmp_path, keep="bytes")
    job = begun(scene)
    scene.send(job)
    ended(scene, job)

    def off(read: dict[str, Any]) -> None:
        read["logits"][128:] *= np.float32(1.1)
        order = np.argsort(-read["logits"], kind="stable")
        read["top_k"][: len(order)] = order

    scene.read(job, logits=True, change=off)
    verdict = verdict_of(scene)
    (finding,) = verdict.findings
    assert (finding.code, finding.kind, finding.stage) == ("F25", "kernel-numerics", "read-kernel")
    assert finding.request.room == 7000
    assert "destination" in verdict.cleared
    assert "table" in verdict.cleared


def test_two_faults_of_one_request_are_both_named(tmp_path: Path) -> None:
    """Page 1 was sent before it was written; page 2 is torn at completion."""
    scene = Scene(tmp_path)
    job = ours()
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    step, begin = scene.step(), scene.prefill.seq + 1
    slots = np.concatenate(
        [
            scene.write(scene.prefill, job, 0, 104),
            np.arange(104, 128) + 21 * 64,
            scene.write(scene.prefill, job, 128, 192),
        ]
    )
    transfer = scene.post(job, written=0, awaited=0)
    scene.land(transfer, only=(0, 4096), pages=[7])
    scene.done(transfer)
    scene.arrive(job)
    scene.read(job)
    half_written = scene.decode.memory[0][6].copy()
    scene.land(transfer)
    assert np.array_equal(half_written, scene.decode.memory[0][6])
    scene.look("LT", job)
    scene.write(scene.prefill, job, 104, 128)
    scene.tell_store(scene.prefill, job, 0, slots, step, stream=1, begin_seq=begin)
    scene.seen_stored(scene.prefill, job, 0, 192, step)
    verdict = verdict_of(scene)
    told = {(f.code, tuple(page.logical for page in f.pages)) for f in verdict.findings}
    assert told == {("F10", (1,)), ("F09", (2,))}


@KEEPS
@pytest.mark.parametrize("when", ["before the send", "during the read"])
def test_a_page_that_changes_at_the_sender_around_its_own_read_is_one_finding(
    tmp_path: Path, keep: Any, when: str
) -> None:
    """A prefill reads its pages too, before it sends them: what the send sees is no source of that read."""
    scene = Scene(tmp_path, keep=keep)
    ours = Job(7000, 0, 100, [21, 22], [5, 6])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 100)
    prefill, step = scene.prefill, scene.step()
    right = prefill.memory[0].copy()

    def change() -> None:
        prefill.memory[0][21, 1024:1280] ^= 0xFF

    if when == "during the read":
        change()
    prefill.snapshot("RD", "before", ours, [0, 1], ours.prefill, rows=100, step=step)
    if when == "during the read":
        prefill.memory[0][:] = right
    else:
        change()
    scene.send(ours)
    scene.arrive(ours)
    scene.read(ours)
    verdict = verdict_of(scene)
    stage = "destination" if when == "during the read" else "source"
    assert [(f.stage, f.code, f.role) for f in verdict.findings] == [(stage, "unclassified", "prefill")]
