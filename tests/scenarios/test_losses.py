"""What is missing weakens an accusation; it never makes another one, and it never passes as clean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.verdict import Verdict
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended
from tests.scenarios.test_s1_completion_early import torn
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.scenarios.test_s3_sent_before_written import too_early
from tests.scenarios.test_s5_wrong_item_length import other_format
from tests.scenarios.test_s9_torn_block_table import torn_table

RANK = {"possible": 0, "likely": 1, "certain": 2}

Story = Callable[[Scene], Scene]

#: The story, how its scene is made, its code, the stages where its bytes may be left unclassified.
STORIES: dict[str, tuple[Story, dict[str, Any], str, set[str]]] = {
    "S1": (torn, {}, "F09", {"completion", "wire"}),
    "S2": (overtaken, {}, "F14", {"destination", "wire"}),
    "S3": (too_early, {}, "F10", {"source", "wire"}),
    "S5": (other_format, {"format": "fp4", "decode_format": "fp8", "pages": 12}, "F03", {"descriptor", "wire"}),
    "S9": (torn_table, {}, "F18", {"table"}),
}  # fmt: skip

KINDS = (
    "alloc",
    "free",
    "store",
    "send",
    "receive",
    "transfer_state",
    "read",
    "order",
    "registration",
    "ST",
    "SE.before",
    "SE.after",
    "RC.before",
    "RC",
    "LT",
    "RD.before",
    "RD.after",
)


def healthy_pair(scene: Scene) -> Scene:
    scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
    scene.healthy(Job(7001, 1, 100, [24, 25], [8, 9]))
    return scene


def check_weaker(verdict: Verdict, name: str, gone: str) -> None:
    code, stages = STORIES[name][2:]
    for finding in verdict.findings:
        assert (finding.code == code) or (finding.code == "unclassified" and finding.stage in stages), (
            f"{finding.code} at {finding.stage} without {gone}"
        )
    if not verdict.findings:
        assert verdict.verdict == "inconclusive"
        assert verdict.not_judged


@pytest.mark.parametrize("gone", KINDS)
@pytest.mark.parametrize("name", STORIES)
def test_a_missing_kind_of_record_never_makes_another_accusation(
    tmp_path: Path, name: str, gone: str
) -> None:
    story, how, *_ = STORIES[name]
    verdict = verdict_of(story(Scene(tmp_path, drop=[gone], **how)))
    check_weaker(verdict, name, gone)


@pytest.mark.parametrize(
    "gone",
    [
        ("SE.before", "SE.after"),
        ("RC", "RC.before"),
        ("RD.before", "RD.after"),
        ("LT", "RD.before", "RD.after"),
        ("send", "transfer_state"),
        ("send", "receive"),
        ("store", "ST"),
        ("alloc", "free"),
        ("prefill:order", "prefill:transfer_state"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("name", STORIES)
def test_two_missing_kinds_never_make_another_accusation(
    tmp_path: Path, name: str, gone: tuple[str, ...]
) -> None:
    story, how, *_ = STORIES[name]
    verdict = verdict_of(story(Scene(tmp_path, drop=gone, **how)))
    code, stages = STORIES[name][2:]
    for finding in verdict.findings:
        assert (finding.code == code) or (finding.code == "unclassified" and finding.stage in stages), (
            f"{finding.code} at {finding.stage} without {gone}"
        )


@pytest.mark.parametrize("gone", [kind for kind in KINDS if kind != "registration"])
def test_a_missing_kind_of_record_never_accuses_a_healthy_pair(tmp_path: Path, gone: str) -> None:
    verdict = verdict_of(healthy_pair(Scene(tmp_path, drop=[gone])))
    assert verdict.findings == ()


@pytest.mark.parametrize("name", ["S1", "S2"])
def test_without_order_edges_nothing_between_processes_is_certain(tmp_path: Path, name: str) -> None:
    story, how, *_ = STORIES[name]
    verdict = verdict_of(story(Scene(tmp_path, drop=["order"], **how)))
    for finding in verdict.findings:
        assert finding.confidence in ("likely", "possible")


@pytest.mark.parametrize("name", STORIES)
def test_less_evidence_never_means_more_confidence(tmp_path: Path, name: str) -> None:
    """Without edges first; what is then left out besides must not raise the claim again."""
    story, how, *_ = STORIES[name]

    def most(drop: Iterable[str]) -> int:
        folder = tmp_path / "+".join(drop)
        folder.mkdir()
        verdict = verdict_of(story(Scene(folder, drop=drop, **how)))
        return max((RANK[finding.confidence] for finding in verdict.findings), default=-1)

    without_edges = most(["order"])
    for gone in ("send", "receive", "alloc", "ST", "SE.after", "RC.before", "RC", "LT", "RD.before"):
        assert most(["order", gone]) <= without_edges, gone


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("what", ["", "snapshot", "send", "store", "read"])
def test_a_loss_elsewhere_does_not_cancel_a_finding(tmp_path: Path, name: str, what: str) -> None:
    story, how, code, _ = STORIES[name]
    scene = story(Scene(tmp_path, **how))
    for side in scene.sides:
        # Everything of the fault has been recorded; what was lost came after it.
        side.emit("loss", stage="queue", what=what, count=3, first_seq=side.seq + 1, last_seq=side.seq + 1)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    assert {finding.code for finding in verdict.findings} == {code}
    assert verdict.losses


@pytest.mark.parametrize("what", ["", "snapshot", "send", "alloc", "order"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_loss_forbids_clean_and_accuses_nobody(tmp_path: Path, role: str, what: str) -> None:
    scene = Scene(tmp_path)
    side = scene.prefill if role == "prefill" else scene.decode
    scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]))
    before = side.seq
    scene.healthy(Job(7001, 1, 100, [24, 25], [8, 9]))
    side.emit("loss", stage="queue", what=what, count=2, first_seq=before, last_seq=side.seq)
    verdict = verdict_of(scene)
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"
    assert verdict.losses


def test_a_loss_whose_place_is_not_known_forbids_clean(tmp_path: Path) -> None:
    scene = healthy_pair(Scene(tmp_path))
    scene.decode.emit("loss", stage="hook", count=1, reason="KeyError")
    verdict = verdict_of(scene)
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"


def test_without_any_hooks_declared_nothing_is_clean_by_absence(tmp_path: Path) -> None:
    scene = Scene(tmp_path, hooks=False)
    verdict = verdict_of(healthy_pair(scene))
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"
    assert verdict.not_judged


@pytest.mark.parametrize("gone", ["alloc", "store", "send", "receive", "read", "transfer_state"])
def test_what_a_missing_hook_would_see_is_not_judged(tmp_path: Path, gone: str) -> None:
    verdict = verdict_of(healthy_pair(Scene(tmp_path, drop=[gone])))
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"
    assert verdict.not_judged


@pytest.mark.parametrize(
    ("gone", "what"),
    [
        ("decode:store", "store"),
        ("prefill:store", "store"),
        ("decode:alloc", "alloc"),
        ("prefill:alloc", "alloc"),
        ("prefill:send", "send"),
        ("decode:receive", "receive"),
        ("prefill:transfer_state", "completion"),
    ],
)
def test_an_unhooked_record_may_be_what_changed_a_page_after_arrival(
    tmp_path: Path, gone: str, what: str
) -> None:
    """Rows change on the decode side; its store hook is missing, so that nobody can be accused."""
    scene = Scene(tmp_path, drop=[gone])
    ours = scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    scene.decode.memory[0][6, 128:256] ^= 1
    scene.read(ours)
    verdict = verdict_of(scene)
    assert verdict.findings == ()
    assert any(f"the record of {what} is not complete" in lack.why for lack in verdict.not_judged)


@pytest.mark.parametrize("gone", ["prefill:receive", "decode:send", "decode:transfer_state"])
def test_what_one_side_alone_records_is_not_asked_of_the_other(tmp_path: Path, gone: str) -> None:
    scene = Scene(tmp_path, drop=[gone])
    ours = scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    scene.decode.memory[0][6, 128:256] ^= 1
    scene.read(ours)
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.stage) == ("unclassified", "destination")


@pytest.mark.parametrize("gone", [(), ("prefill:receive",), ("prefill:send",), ("prefill:store",)])
def test_a_page_that_its_own_side_reads_needs_no_record_of_a_transfer(
    tmp_path: Path, gone: tuple[str, ...]
) -> None:
    """Prefill reads the page that it has stored, for the next chunk of the prompt; a row of it is another just then."""
    scene = Scene(tmp_path, drop=gone)
    job = begun(scene, Job(7000, 0, 128, [21, 22], [5, 6]))
    alone, row = copy(scene), scene.prefill.memory[0][22, 128:256]
    alone.decode = scene.prefill
    row ^= 1
    alone.read(replace(job, decode=job.prefill))
    row ^= 1
    scene.send(job)
    ended(scene, job)
    found = [(finding.code, finding.role) for finding in verdict_of(scene).findings]
    assert found == ([] if gone == ("prefill:store",) else [("unclassified", "prefill")])


@pytest.mark.parametrize("gone", [("RD.before", "RD.after"), ("LT",), ("SE.after",)], ids="+".join)
def test_sampling_is_scope_and_stays_clean(tmp_path: Path, gone: tuple[str, ...]) -> None:
    """Looks that were never meant to be taken are no loss."""
    expect_clean(verdict_of(healthy_pair(Scene(tmp_path, drop=gone))))


def test_reads_that_are_sampled_stay_clean(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    for step in range(10):
        scene.append(ours)
        scene.read(ours, snapshot=step % 4 == 0)
    expect_clean(verdict_of(scene))


def test_a_finding_whose_evidence_is_whole_stays_certain_beside_a_loss(tmp_path: Path) -> None:
    scene = torn(Scene(tmp_path))
    side = scene.decode
    side.emit("loss", stage="disk", what="snapshot", count=9, first_seq=side.seq + 1, last_seq=side.seq + 1)
    expect(verdict_of(scene), "F09", "completion-early", "completion", room=7000)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("cut", ["", "31 bytes at 4096"])
def test_a_process_that_was_killed_accuses_nobody_and_is_not_clean(
    tmp_path: Path, role: str, cut: str
) -> None:
    scene = healthy_pair(Scene(tmp_path))
    side = scene.prefill if role == "prefill" else scene.decode
    side.process.killed(cut)
    verdict = verdict_of(scene)
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"


@pytest.mark.parametrize("name", STORIES)
def test_a_process_that_was_killed_afterwards_does_not_cancel_a_finding(tmp_path: Path, name: str) -> None:
    story, how, code, _ = STORIES[name]
    scene = story(Scene(tmp_path, **how))
    scene.decode.process.killed("31 bytes at 4096")
    verdict = verdict_of(scene)
    assert {finding.code for finding in verdict.findings} == {code}


@pytest.mark.parametrize(
    "gone", [["free"], ["decode:free"], ["free", "request"], ["alloc", "free"]], ids="+".join
)
def test_a_last_step_whose_pages_were_freed_unseen_accuses_nobody(tmp_path: Path, gone: list[str]) -> None:
    """M11 with less to go by: a finished request's last step reads pages that another request was given since.

    The later owner's write is no late write: it was announced for pages which that request had been given.
    """
    scene = Scene(tmp_path, drop=gone)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    scene.finish(ours)
    scene.healthy(Job(7001, 1, 128, [23, 24], [6, 5]))
    scene.read(ours)
    assert verdict_of(scene).findings == ()
