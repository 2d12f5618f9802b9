"""Faults that tables, lengths, slots and metadata show by themselves, without a byte; each with its twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Finding, Verdict
from tests.scenarios.outcome import expect, expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def arrived(scene: Scene, rows: int = 192, decode: Sequence[int] = (5, 6, 7, 8)) -> Job:
    """A request that has arrived, beside another one."""
    scene.healthy(Job(7001, 1, 192, [24, 25, 26], [10, 11, 12]))
    return scene.healthy(Job(7000, 0, rows, [21, 22, 23], list(decode)), reads=0)


def at_table(verdict: Verdict, code: str, kind: str, *, confidence: str = "certain") -> Finding:
    (finding,) = expect(verdict, code, kind, "table", room=7000, role="decode", confidence=confidence)
    for stage in ("source", "wire", "completion"):
        assert stage in verdict.cleared
    assert "table" not in verdict.cleared
    assert finding.runner_up is not None
    return finding


# F19: the length


@KEEPS
@pytest.mark.parametrize(
    ("by", "words"),
    [(1, "one row more"), (-1, "one row fewer"), (64, "one page more"), (-64, "one page fewer")],
)
def test_a_length_that_is_off_in_every_read(tmp_path: Path, keep: Any, by: int, words: str) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, rows=191)
    for step in range(3):
        scene.read(
            job, rows=job.length + by, snapshot=False, table=[5, 6, 7, 8][: -(-(job.length + by) // 64)]
        )
        if step < 2:
            scene.append(job)
    finding = at_table(verdict_of(scene), "F19", "length-off-by-one")
    assert words in str(finding.rule)
    first = finding.pages[0]
    where = first.logical * 64 + first.value_rows[0][0]
    assert where == min(191, 191 + by)


@KEEPS
def test_the_same_reads_with_the_right_length_are_clean(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, rows=191)
    for _ in range(3):
        scene.read(job)
        scene.append(job)
    scene.read(job)
    expect_clean(verdict_of(scene))


def test_a_length_is_nobodys_fault_where_stores_may_be_missing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, drop=["decode:store"])
    job = arrived(scene, rows=191)
    scene.read(job, rows=192, snapshot=False)
    assert verdict_of(scene).findings == ()


def test_one_read_that_lags_behind_a_store_is_no_fault(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene, rows=190)
    scene.append(job)
    scene.read(job, rows=190)
    for _ in range(2):
        scene.append(job)
        scene.read(job)
    expect_clean(verdict_of(scene))


def test_the_last_step_of_a_finished_request_may_read_one_row_more(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene, rows=191)
    scene.read(job)
    scene.finish(job)
    scene.read(job, rows=192, snapshot=False)
    expect_clean(verdict_of(scene))


# F29 at the table, against F19


def speculative(scene: Scene, rows: Sequence[tuple[int, int, int]]) -> Verdict:
    """Reads of (rows, accepted, drafted); four drafted rows were stored before."""
    job = arrived(scene, rows=150, decode=(5, 6, 7))
    scene.store(job, 150, 154, side=scene.decode, draft=True)
    d = scene.decode
    for read, accepted, drafted in rows:
        told = {"accepted": accepted, "drafted": drafted, "table": [5, 6, 7], "table_after": [5, 6, 7]}
        d.emit("read", room=7000, buffer=d.buffer(0), step=scene.step(), rows=read, **told)
    return verdict_of(scene)


@KEEPS
def test_rejected_drafts_in_the_length_read_are_speculative_rows(tmp_path: Path, keep: Any) -> None:
    verdict = speculative(Scene(tmp_path, keep=keep), [(151, 151, 154), (154, 152, 154)])
    finding = at_table(verdict, "F29", "speculative-row-misuse")
    assert [(page.logical, page.value_rows) for page in finding.pages] == [(2, ((24, 25),))]
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F19"


def test_one_draft_too_many_may_be_a_length_that_is_one_off(tmp_path: Path) -> None:
    verdict = speculative(Scene(tmp_path), [(154, 153, 154)])
    at_table(verdict, "F29", "speculative-row-misuse", confidence="likely")


def test_a_length_beyond_all_drafts_is_off_by_one(tmp_path: Path) -> None:
    verdict = speculative(Scene(tmp_path), [(155, 154, 154)])
    at_table(verdict, "F19", "length-off-by-one")


def test_a_query_that_sees_the_drafts_before_it_is_right(tmp_path: Path) -> None:
    verdict = speculative(Scene(tmp_path), [(k, k, 154) for k in (151, 152, 153, 154)])
    expect_clean(verdict)


# F20 and F17 at the table, against F18


@KEEPS
def test_a_table_of_multiples_is_a_wrong_stride(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene)
    scene.read(job, table=[10, 12, 14])
    finding = at_table(verdict_of(scene), "F20", "wrong-stride")
    assert finding.rule == "entry = 2 * page"
    assert [page.logical for page in finding.pages] == [0, 1, 2]


def test_two_multiples_and_one_other_page_are_a_torn_table(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.read(job, table=[10, 12, 11])
    at_table(verdict_of(scene), "F18", "torn-block-table")


def test_one_multiple_alone_is_a_torn_table_that_is_likely(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.read(job, table=[10, 6, 7])
    finding = at_table(verdict_of(scene), "F18", "torn-block-table", confidence="likely")
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F20"


def exchanged(scene: Scene, *, mapping: bool = True) -> Job:
    """Page 6 of the request is exchanged for 9 after it had arrived: version 2 of its translation."""
    job = arrived(scene)
    d = scene.decode
    if mapping:
        d.emit("mapping", version=1, room=7000, pages=[5, 6, 7])
    scene.read(job)
    d.memory[0][9] = d.memory[0][6]
    scene.give(d, job, [9], logical=1)
    if mapping:
        d.emit("mapping", version=2, room=7000, pages=[5, 9, 7])
    return job


def read_through(scene: Scene, table: list[int], version: int) -> None:
    d = scene.decode
    told = {"table": table, "table_after": table, "mapping": version, "rows": 192}
    d.emit("read", room=7000, buffer=d.buffer(0), step=scene.step(), **told)


@KEEPS
@pytest.mark.parametrize("told", [1, -1])
def test_a_table_of_an_earlier_version_is_a_stale_mapping(tmp_path: Path, keep: Any, told: int) -> None:
    scene = Scene(tmp_path, keep=keep)
    exchanged(scene)
    read_through(scene, [5, 6, 7], told)
    finding = at_table(
        verdict_of(scene), "F17", "stale-slot-mapping", confidence="certain" if told > 0 else "likely"
    )
    assert [(page.logical, page.physical) for page in finding.pages] == [(1, 6)]
    assert "version 1" in str(finding.rule)


def test_without_versions_an_earlier_page_of_its_own_is_likely_a_stale_mapping(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    exchanged(scene, mapping=False)
    read_through(scene, [5, 6, 7], -1)
    at_table(verdict_of(scene), "F17", "stale-slot-mapping", confidence="likely")


@KEEPS
def test_each_read_through_the_version_of_its_time_is_clean(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    exchanged(scene)
    read_through(scene, [5, 9, 7], 2)
    expect_clean(verdict_of(scene))


def test_foreign_pages_under_the_right_version_are_a_torn_table(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    exchanged(scene)
    read_through(scene, [5, 11, 7], 2)
    at_table(verdict_of(scene), "F18", "torn-block-table")


@KEEPS
@pytest.mark.parametrize("offset", [1, 3, 64])
def test_rows_that_are_stored_a_constant_off_are_a_stale_mapping(
    tmp_path: Path, keep: Any, offset: int
) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, rows=150)
    for row in (150, 151):
        job.appended += 1
        slots = np.array([job.decode[(row + offset) // 64] * 64 + (row + offset) % 64])
        scene.tell_store(scene.decode, job, row, slots, scene.step())
    finding = at_table(verdict_of(scene), "F17", "stale-slot-mapping")
    assert f"{offset} rows past" in str(finding.rule)
    assert finding.pages[0].value_rows == ((22, 23),)


@KEEPS
def test_rows_that_are_stored_into_a_page_of_an_earlier_version(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, rows=150)
    d = scene.decode
    d.emit("mapping", version=1, room=7000, pages=[5, 6, 7])
    scene.give(d, job, [9], logical=2)
    d.emit("mapping", version=2, room=7000, pages=[5, 6, 9])
    scene.tell_store(d, job, 150, np.array([7 * 64 + 22]), scene.step(), mapping=1)
    finding = at_table(verdict_of(scene), "F17", "stale-slot-mapping")
    assert "version 1" in str(finding.rule)


def test_padding_rows_and_right_slots_are_no_mapping(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene, rows=150)
    d = scene.decode
    for _ in range(3):
        scene.append(job)
    slots = np.array([7 * 64 + 25, 0, -1])
    d.emit(
        "store", room=7000, buffer=d.buffer(0), slots=slots, positions=[153, 0, 0], logical_rows=[153, -1, -1]
    )
    expect_clean(verdict_of(scene))


# F28


@KEEPS
@pytest.mark.parametrize(("holds", "confidence"), [(7001, "certain"), (6543, "likely")])
def test_metadata_of_another_room_is_a_mix_up(tmp_path: Path, keep: Any, holds: int, confidence: str) -> None:
    scene = Scene(tmp_path, keep=keep)
    scene.read(arrived(scene))
    scene.decode.emit("metadata", moment="given", room=7000, slot=3, holds=7001)
    scene.decode.emit("metadata", moment="read", room=7000, slot=3, holds=holds)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert (finding.code, finding.kind, finding.stage) == ("F28", "metadata-mix-up", "completion")
    assert (finding.confidence, finding.request.room, finding.pages) == (confidence, 7000, ())
    assert str(holds) in str(finding.rule)
    assert {"wire", "table", "destination"} <= set(verdict.cleared)


@KEEPS
@pytest.mark.parametrize(
    ("read", "end", "named"), [(False, "abort", False), (True, "abort", True), (False, "finish", True)]
)
def test_a_mix_up_of_a_request_that_was_given_up_unread_is_a_hazard(
    tmp_path: Path, keep: Any, read: bool, end: str, named: bool
) -> None:
    """One that ends with its first token reads no page, and the slot has that token."""
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene)
    scene.prefill.emit("metadata", moment="sent", room=7000, slot=8, peer_slot=3, holds=7001)
    scene.decode.emit("metadata", moment="given", room=7000, slot=3, holds=-1)
    scene.decode.emit("metadata", moment="read", room=7000, slot=3, holds=7001)
    if read:
        scene.read(job)
    scene.free(scene.decode, job, end)
    verdict = verdict_of(scene)
    assert {(f.code, f.request.room) for f in verdict.findings} == ({("F28", 7000)} if named else set())
    if named:
        assert (
            "the sender's slot 8 held room 7001 when it was sent for room 7000"
            in verdict.findings[0].evidence
        )
    else:
        (hazard,) = verdict.hazards
        assert hazard.what.startswith("F28 metadata-mix-up, harmless this time: slot 3 held room 7001")
        assert hazard.where.startswith("room 7000,")


@KEEPS
def test_m9_a_slot_that_was_given_back_keeps_its_old_id(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    scene.read(arrived(scene))
    d = scene.decode
    d.emit("metadata", moment="given", room=7001, slot=3, holds=-1)
    d.emit("metadata", moment="read", room=7001, slot=3, holds=7001)
    d.emit("metadata", moment="freed", room=7001, slot=3, holds=7001)
    d.emit("metadata", moment="given", room=7000, slot=3, holds=7001)
    d.emit("metadata", moment="read", room=7000, slot=3, holds=7000)
    d.emit("metadata", moment="freed", room=7000, slot=3, holds=7001)
    expect_clean(verdict_of(scene))
