"""Kinds that look alike, told twice: the story of each, and what tells it from the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.layouts import layout
from replay.classify.page_layouts import hypotheses
from replay.verdict import Finding
from tests.scenarios.outcome import verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import arrived, begun, ended, ours
from tests.scenarios.test_kinds_of_local_writes import clear, padded, wide_store
from tests.scenarios.test_kinds_of_transfers import late_layers, repacked
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.scenarios.test_s3_sent_before_written import too_early

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])

Story = Callable[[Scene], Any]


def overwritten(scene: Scene) -> None:
    """The source page goes to another request, whose 40 rows are stored before the bytes have left."""
    job = begun(scene)
    transfer = scene.post(job)
    scene.free(scene.prefill, job)
    thief = Job(7001, 1, 40, [22], [12])
    scene.start(thief)
    scene.announce(thief)
    scene.store(thief, 0, 40)
    scene.land(transfer)
    scene.done(transfer)
    ended(scene, job)


def padded_source(scene: Scene) -> None:
    """One row of the source page is replaced by a padding row before the post."""
    job = begun(scene)
    padded(scene.prefill, 0, [22 * 64 + 63], 5)
    scene.send(job)
    ended(scene, job)


def stolen_row(scene: Scene) -> None:
    """One row of the source page is replaced by the first row of the page's next owner."""
    job = begun(scene)
    transfer = scene.post(job)
    scene.free(scene.prefill, job)
    thief = Job(7001, 1, 1, [22], [12])
    scene.start(thief)
    scene.announce(thief)
    scene.store(thief, 0, 1)
    scene.land(transfer)
    scene.done(transfer)
    ended(scene, job)


def other_page_ids(scene: Scene) -> None:
    """The pages go to the sender's own ids, two of which belong to another request at the receiver."""
    other = scene.healthy(Job(7003, 3, 128, [30, 31], [21, 22]), reads=0)
    job = begun(scene)
    scene.send(job, destination=[21, 22, 23])
    ended(scene, job)
    assert other.decode == [21, 22]


def cleared(scene: Scene) -> None:
    job = arrived(scene)
    clear(scene, 6)
    scene.look("LT", job)
    scene.read(job)


def left_out(scene: Scene) -> None:
    job = begun(scene)
    scene.send(job, pairs=[(0, 0), (1, 1)])
    ended(scene, job)


def failed(scene: Scene) -> None:
    """Layer 2 has a transfer of its own, which fails."""
    job = begun(scene)
    scene.send(job, pairs=[(0, 0), (1, 1)])
    transfer = scene.post(job, pairs=[(2, 2)])
    scene.prefill.emit(
        "transfer_state", state="error", transfer=transfer.transfer, room=job.room, agent=scene.prefill.agent
    )
    ended(scene, job)


def permuted(scene: Scene) -> None:
    repacked(scene, dict(hypotheses(layout("fp8")))["read as interleaved rows"])


def looked_late(scene: Scene, *, written: int = 0, lost: bool = False, own_old: bool = False) -> None:
    """The look at the source was asked for before the post and taken once the store had ended.

    Rows 40 on of page 1 were written after the wire had read them. ``lost``: they had been written before, and the
    wire dropped them instead. ``own_old``: the old content of the source page is not the destination page's.
    """
    job = ours()
    if own_old:
        scene.earlier([21, 22, 23], [1, 2, 3])
        scene.healthy(Job(9010, 8, 192, [31, 32, 33], [5, 6, 7]), finish=True)
    else:
        scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    p, step = scene.prefill, scene.step()
    old = p.memory[0][22].copy()
    slots = scene.write(p, job, 0, 192)
    whole = p.memory[0][22].copy()
    transfer = scene.post(job, written=written, awaited=written)
    if lost:
        scene.decode.memory[0][5] = p.memory[0][21]
        scene.decode.memory[0][7] = p.memory[0][23]
        spec = layout("fp8")
        for area in (spec.values, spec.scales):
            area(scene.decode.memory[0])[6, :40] = area(whole[None])[0, :40]
    else:
        spec = layout("fp8")
        for area in (spec.values, spec.scales):
            area(p.memory[0])[22, 40:] = area(old[None])[0, 40:]
        scene.land(transfer)
        p.memory[0][22] = whole
    scene.tell_store(p, job, 0, slots, step, stream=1 if written == 0 else -1)
    scene.seen_stored(p, job, 0, 192, step)
    scene.done(transfer)
    ended(scene, job)


def told(scene: Scene, story: Story, **how: Any) -> list[Finding]:
    """The findings that the trace of a story gives."""
    found = story(scene, **how)
    verdict = found if hasattr(found, "findings") else verdict_of(scene)
    return list(verdict.findings)


#: story, how its scene is made, code, stage, what it was told apart from
PAIRS: dict[str, tuple[Story, dict[str, Any], str, str, str]] = {
    "sent before written, not overwritten": (too_early, {}, "F10", "source", "F11"),
    "overwritten, not sent before written": (overwritten, {}, "F11", "source", "F10"),
    "late foreign write, not wrong ids or a clear": (overtaken, {}, "F14", "destination", "F04"),
    "wrong page ids, not a late write": (other_page_ids, {}, "F04", "descriptor", "F02"),
    "cleared, not a late write": (cleared, {}, "F15", "destination", "F14"),
    "buffer missing, not late or failed": (left_out, {"layers": range(3)}, "F01", "descriptor", "F02"),
    "failed, not missing or late": (failed, {"layers": range(3)}, "F13", "wire", "F31"),
    "padding row, not overwritten": (padded_source, {}, "F23", "store", "F11"),
    "overwritten by one row, not padding": (stolen_row, {}, "F11", "source", "F10"),
    "wrong stride, not a layout": (wide_store, {}, "F20", "store", "F30"),
}  # fmt: skip


@KEEPS
@pytest.mark.parametrize("name", PAIRS)
def test_each_of_a_pair_is_named_and_says_what_it_was_chosen_over(
    tmp_path: Path, keep: Any, name: str
) -> None:
    story, how, code, stage, runner_up = PAIRS[name]
    findings = told(Scene(tmp_path, keep=keep, **how), story)
    mine = [finding for finding in findings if finding.request.room != 7003]
    assert {(f.code, f.stage) for f in mine} == {(code, stage)}
    assert all(f.confidence == "certain" for f in mine)
    assert {f.runner_up.code for f in mine if f.runner_up} == {runner_up}
    assert all(finding.code in (code, "unclassified") for finding in findings)


@KEEPS
def test_late_component_is_neither_missing_nor_failed(tmp_path: Path, keep: Any) -> None:
    verdict = late_layers(Scene(tmp_path, layers=range(3), keep=keep), (2,))
    assert {(f.code, f.stage, f.confidence) for f in verdict.findings} == {("F12", "completion", "certain")}


def test_permuted_bytes_are_neither_a_stride_nor_a_number_format(tmp_path: Path) -> None:
    permutation = dict(hypotheses(layout("fp8")))["read as interleaved rows"]
    verdict = repacked(Scene(tmp_path), permutation)
    assert {(f.code, f.stage, f.confidence) for f in verdict.findings} == {("F07", "descriptor", "certain")}


@KEEPS
@pytest.mark.parametrize("own_old", [False, True])
def test_a_late_look_at_the_source_does_not_make_a_loss_of_it(
    tmp_path: Path, keep: Any, own_old: bool
) -> None:
    """SE shows the finished rows, since the look came late; the query at the post says that the store had not ended."""
    findings = told(Scene(tmp_path, keep=keep), looked_late, own_old=own_old)
    assert {(f.code, f.stage) for f in findings} == {("F10", "source")}
    (page,) = findings[0].pages
    assert (page.logical, page.value_rows, page.scale_rows) == (1, ((40, 63),), ((40, 63),))
    assert findings[0].confidence == ("certain" if own_old else "likely")
    assert findings[0].runner_up is not None
    assert findings[0].runner_up.code == "F31"


@KEEPS
def test_whole_rows_that_the_wire_lost_are_no_early_send(tmp_path: Path, keep: Any) -> None:
    """The same rows are missing, and the query at the post says that the store was finished."""
    findings = told(Scene(tmp_path, keep=keep), looked_late, written=1, lost=True)
    assert {(f.code, f.stage) for f in findings} <= {("F31", "wire"), ("unclassified", "wire")}


@KEEPS
def test_without_the_query_whole_missing_rows_are_at_most_likely(tmp_path: Path, keep: Any) -> None:
    findings = told(Scene(tmp_path, keep=keep), looked_late, written=-1, lost=True)
    assert all(f.confidence != "certain" for f in findings)
    assert {f.code for f in findings} <= {"F31", "F10", "unclassified"}
