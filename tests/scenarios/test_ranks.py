"""Tensor-parallel ranks serve the same rooms at the same time, each with buffers of its own."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.layouts import layout
from replay.verdict import Verdict
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended
from tests.scenarios.test_s1_completion_early import torn
from tests.scenarios.test_s9_torn_block_table import torn_table

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def both(tmp_path: Path, keep: Any) -> tuple[Scene, Scene]:
    first = Scene(tmp_path, keep=keep)
    return first, Scene(tmp_path, keep=keep, beside=first)


@KEEPS
def test_the_same_rooms_on_two_ranks_are_clean(tmp_path: Path, keep: Any) -> None:
    ranks = both(tmp_path, keep)
    for room in (7000, 7001):
        jobs = [Job(room, room % 3, 150, [21, 22, 23], [5, 6, 7]) for _ in ranks]
        for scene, job in zip(ranks, jobs, strict=True):
            scene.start(job)
            scene.announce(job)
        for scene, job in zip(ranks, jobs, strict=True):
            scene.store(job, 0, job.rows)
            scene.send(job)
        for scene, job in zip(ranks, jobs, strict=True):
            scene.arrive(job)
            scene.read(job)
            scene.finish(job)
    expect_clean(verdict_of(ranks[0]))


@KEEPS
def test_ranks_may_hold_different_pages_for_a_room(tmp_path: Path, keep: Any) -> None:
    first, second = both(tmp_path, keep)
    first.healthy(Job(7000, 0, 150, [21, 22, 23], [5, 6, 7]))
    second.healthy(Job(7000, 0, 150, [3, 2, 1], [7, 5, 9]))
    expect_clean(verdict_of(first))


@KEEPS
def test_the_rank_that_is_hit_is_named_and_the_other_is_not(tmp_path: Path, keep: Any) -> None:
    first, second = both(tmp_path, keep)
    first.earlier([21, 22, 23], [5, 6, 7])
    first.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
    torn(second)
    verdict = verdict_of(first)
    (finding,) = verdict.findings
    assert (finding.code, finding.role, finding.rank) == ("F09", "decode", 1)


@KEEPS
@pytest.mark.parametrize(("drop", "confidence"), [((), "certain"), (("prefill:send",), "likely")])
def test_a_loss_is_certain_only_where_no_other_rank_can_have_written(
    tmp_path: Path, keep: Any, drop: tuple[str, ...], confidence: str
) -> None:
    first = Scene(tmp_path, keep=keep)
    second = Scene(tmp_path, keep=keep, beside=first, drop=drop)
    second.healthy(Job(7001, 1, 150, [3, 2, 1], [7, 5, 9]))
    job = begun(first)
    transfer = first.post(job)
    first.land(transfer, only=(0, 4096), pages=[6])
    first.done(transfer)
    ended(first, job)
    (finding,) = [found for found in verdict_of(first).findings if found.rank == 0]
    assert (finding.code, finding.confidence) == ("F31", confidence)


def in_halves(first: Scene, second: Scene, *, lost: bool = False, crossed: bool = False) -> Verdict:
    """Two prefill ranks hold the request; each sends its half of every page to the first's receiver.

    ``lost``: of page 6 the half of the second does not land. ``crossed``: of layer 1 each sends the other half.
    """
    job, half = begun(first), layout("fp8").page_bytes // 2
    other, same = copy(first), Job(job.room, 0, job.rows, [31, 32, 33], job.decode)
    other.prefill, other._transfers = second.prefill, 100
    other.begin(other.prefill, same)
    other.give(other.prefill, same, same.prefill)
    other.store(same, 0, same.rows)
    front, back = [(0, half, 0)], [(half, 2 * half, half)]
    first.send(job, parts=front, pairs=[(0, 0)] if crossed else None)
    if crossed:
        first.send(job, parts=back, pairs=[(1, 1)])
        other.send(same, parts=front, pairs=[(1, 1)])
    transfer = other.post(same, parts=back, pairs=[(0, 0)] if crossed else None)
    other.land(transfer, only=(0, 0) if lost else None, pages=[6])
    other.done(transfer)
    ended(first, job)
    return verdict_of(first)


@KEEPS
def test_halves_of_pages_that_two_ranks_send_are_the_page(tmp_path: Path, keep: Any) -> None:
    verdict = in_halves(*both(tmp_path, keep))
    expect_clean(verdict)
    assert verdict.hazards == ()


@KEEPS
def test_each_layer_may_be_cut_in_other_halves(tmp_path: Path, keep: Any) -> None:
    """Of layer 0 the first rank sends the first half of every page, of layer 1 the second."""
    first = Scene(tmp_path, keep=keep, layers=(0, 1))
    verdict = in_halves(first, Scene(tmp_path, keep=keep, layers=(0, 1), beside=first), crossed=True)
    expect_clean(verdict)
    assert verdict.hazards == ()


@KEEPS
@pytest.mark.parametrize("lost", [False, True])
def test_halves_of_a_rank_whose_posts_were_not_seen_are_not_called_missing(
    tmp_path: Path, keep: Any, lost: bool
) -> None:
    first = Scene(tmp_path, keep=keep)
    verdict = in_halves(first, Scene(tmp_path, keep=keep, beside=first, drop=["send"]), lost=lost)
    assert verdict.findings == verdict.hazards == ()
    assert any("the record of send is not complete" in lack.why for lack in verdict.not_judged) == lost


@KEEPS
def test_a_table_is_held_against_the_allocator_of_its_own_rank(tmp_path: Path, keep: Any) -> None:
    first, second = both(tmp_path, keep)
    torn_table(first, torn=False)
    torn_table(second, torn=True)
    verdict = verdict_of(first)
    (finding,) = verdict.findings
    assert (finding.code, finding.role, finding.rank) == ("F18", "decode", 1)
