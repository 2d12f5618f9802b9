"""One prefill rank sends a request to two decode ranks: what went to one says nothing of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Verdict
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Job
from tests.scenarios.stories import ended, two_receivers

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def both(
    folder: Path, mine: dict[str, Any], theirs: dict[str, Any], *, reversed: bool = False, **how: Any
) -> Verdict:
    """A transfer to each receiver, made as ``mine`` and ``theirs`` say."""
    first, other, job, same = two_receivers(folder, pages=(9, 11, 14), **how)
    sends = [(first, job, mine), (other, same, theirs)]
    for scene, its, told in sends[::-1] if reversed else sends:
        scene.send(its, told.get("logical"), **{k: v for k, v in told.items() if k != "logical"})
    ended(first, job)
    ended(other, same)
    return verdict_of(first)


def named(verdict: Verdict) -> set[tuple[int, str, str]]:
    return {(finding.rank, finding.code, finding.confidence) for finding in verdict.findings}


@KEEPS
def test_a_request_that_both_receive_whole_is_clean(tmp_path: Path, keep: Any) -> None:
    verdict = both(tmp_path, {}, {}, keep=keep)
    expect_clean(verdict)
    assert verdict.hazards == ()


@KEEPS
def test_pages_that_only_the_other_receiver_was_sent_are_a_list_too_short(tmp_path: Path, keep: Any) -> None:
    assert named(both(tmp_path, {"logical": [0]}, {}, keep=keep)) == {(0, "F02", "certain")}


def test_a_layer_that_only_the_other_receiver_was_sent_is_a_missing_buffer(tmp_path: Path) -> None:
    verdict = both(tmp_path, {"pairs": [(0, 0)]}, {}, layers=(0, 1))
    assert named(verdict) == {(0, "F01", "certain")}
    assert any("1 other buffers are written" in line for line in verdict.findings[0].evidence)


def test_the_item_length_that_the_other_receiver_was_sent_with_is_not_this_ones(tmp_path: Path) -> None:
    short = {"lengths": (8192, 8192), "strides": (8448, 8448)}
    assert named(both(tmp_path, short, {})) == {(0, "F03", "certain")}


@KEEPS
def test_a_buffer_that_came_late_here_and_with_all_others_there(tmp_path: Path, keep: Any) -> None:
    first, other, job, same = two_receivers(tmp_path, layers=range(3), keep=keep)
    other.send(same)
    first.send(job, pairs=[(0, 0), (1, 1)])
    late = first.post(job, pairs=[(2, 2)])
    ended(other, same)
    first.arrive(job)
    first.read(job)
    first.land(late)
    first.done(late)
    first.look("LT", job)
    first.read(job)
    assert named(verdict_of(first)) == {(0, "F12", "certain")}


@pytest.mark.parametrize("pages", [2, 3])
def test_only_what_was_sent_to_a_receiver_says_that_it_announced_too_little(
    tmp_path: Path, pages: int
) -> None:
    """The second receiver announced two pages; the sender had ``pages`` for it, and three for the first."""
    first, other, job, same = two_receivers(tmp_path, pages=(9, 11))
    same.rows = 128
    first.send(job)
    other.send(same, named=same.prefill[:pages])
    ended(first, job)
    ended(other, same)
    assert named(verdict_of(first)) == ({(1, "F02", "certain")} if pages == 3 else set())


@KEEPS
@pytest.mark.parametrize("reverse", [False, True])
def test_a_source_that_was_written_by_the_time_the_other_was_sent(
    tmp_path: Path, reverse: bool, keep: Any
) -> None:
    """The post to one receiver came before the store of page 1's last rows, that to the other after it."""
    first, other, job, same = two_receivers(tmp_path, pages=(9, 11, 14), stored=104, keep=keep)
    scenes = [(first, job), (other, same)]
    (early, its), (late, theirs) = scenes[::-1] if reverse else scenes
    transfer = early.post(its, written=0)
    early.land(transfer)
    early.done(transfer)
    first.store(job, 104, 192)
    late.send(theirs)
    for scene, which in scenes:
        ended(scene, which)
    assert named(verdict_of(first)) == {(0, "F10", "certain")}, "rank 0 is the sender's"


def test_where_it_is_not_known_who_received(tmp_path: Path) -> None:
    verdict = both(tmp_path, {}, {}, drop=["registration"])
    assert verdict.findings == verdict.hazards == ()


@KEEPS
def test_a_page_that_the_prefix_tree_replaced_between_two_sends_is_right_at_both_receivers(
    tmp_path: Path, keep: Any
) -> None:
    """The first one was sent the request's own page, the second one an equal one of the tree, not bit for bit."""
    first, other, job, same = two_receivers(tmp_path, pages=(9, 11, 14), keep=keep)
    tree = Job(7002, 1, 64, [31], [15])
    first.healthy(tree)
    first.send(job)
    same.prefill = [31, *job.prefill[1:]]
    first.give(first.prefill, same, [31], shared=True)
    other.send(same)
    ended(first, job)
    ended(other, same)
    assert not np.array_equal(first.prefill.memory[0][31], first.prefill.memory[0][job.prefill[0]])
    expect_clean(verdict_of(first))
