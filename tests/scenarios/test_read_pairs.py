"""Kinds that are easily taken for each other at the table and at the read: each pair differs in one observation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from replay.verdict import Finding
from tests.scenarios import pattern, readers
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene

F64 = npt.NDArray[np.float64]
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def the_one(scene: Scene) -> Finding:
    (finding,) = verdict_of(scene).findings
    assert finding.request.room == 7000
    return finding


# layout-permuted, wrong-stride and number-format


@SCALES
@pytest.mark.parametrize(
    ("reader", "code"),
    [
        (readers.interleaved, "F07"),
        (readers.at_pages(lambda page: 2 * page), "F20"),
        (readers.scaled(lambda scale: 2.0 * scale), "F24"),
        (readers.by_row(lambda page, row: (page, 0)), "F22"),
        (readers.scaled(lambda scale: np.repeat(scale[::16], 16)[: len(scale)]), "F25"),
    ],
    ids=["interleaved", "doubled page", "doubled key", "one row", "one scale a tile"],
)
def test_the_same_bytes_read_in_five_wrong_ways(
    tmp_path: Path, scales: pattern.Scales, reader: readers.Reader, code: str
) -> None:
    scene = Scene(tmp_path, scales=scales)
    scene.healthy(Job(7001, 1, 448, list(range(24, 31)), list(range(8, 15))), reads=0)
    job = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]), reads=0)
    scene.read(job, logits=True, change=readers.told(scene.decode, 0, job.decode, 192, reader))
    finding = the_one(scene)
    assert (finding.code, finding.stage, finding.confidence) == (code, "read-kernel", "certain")


def test_what_two_kinds_explain_alike_stays_unclassified(tmp_path: Path) -> None:
    """All pages hold the row of the pattern 64 rows long: reading page 2 * p or another row gives the same."""
    scene = Scene(tmp_path)
    twin = scene.healthy(Job(7001, 1, 448, list(range(24, 31)), list(range(8, 15))), reads=0)
    job = scene.healthy(Job(7000, 0, 64, [21], [5]), reads=0)
    d = scene.decode
    # Page 10 holds page 5 with twice the scale: page 2 * p and keys twice as large are one and the same.
    page = d.memory[0][5].copy()
    page[8192:] = (2 * page[8192:].view("<f4")).astype("<f4").view(np.uint8)
    scene.prefill.memory[0][26] = page
    d.memory[0][10] = page
    for stage, side, at in (
        ("ST", scene.prefill, 26),
        ("SE", scene.prefill, 26),
        ("RC", d, 10),
        ("LT", d, 10),
    ):
        side.snapshot(stage, "before" if stage == "SE" else "", twin, [2], [at], rows=448)
    doubled = readers.scaled(lambda scale: 2.0 * scale)
    scene.read(job, logits=True, change=readers.told(d, 0, job.decode, 64, doubled))
    verdict = verdict_of(scene)
    (finding,) = [found for found in verdict.findings if found.stage == "read-kernel"]
    assert (finding.code, finding.confidence) == ("unclassified", "likely")
    assert "F20" in str(finding.rule)
    assert "F24" in str(finding.rule)


@SCALES
def test_a_stride_that_the_kernel_was_told_is_believed_where_its_bytes_are_not_known(
    tmp_path: Path, scales: pattern.Scales
) -> None:
    """Nobody has looked at most of the pages 2 * p; the record says which stride the view had."""
    scene = Scene(tmp_path, scales=scales)
    job = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [15, 16, 17]), reads=0)
    scene.decode.memory[0][30:] = 77
    tell = readers.told(scene.decode, 0, job.decode, 192, readers.at_pages(lambda page: 2 * page))

    def change(read: dict[str, Any]) -> None:
        tell(read)
        read["stride"] = 2 * 8448

    scene.read(job, logits=True, change=change)
    finding = the_one(scene)
    assert (finding.code, finding.stage) == ("F20", "read-kernel")
    assert any("16,896" in line for line in finding.evidence)


def test_a_format_that_the_kernel_was_told_is_in_the_evidence(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [15, 16, 17]), reads=0)
    tell = readers.told(scene.decode, 0, job.decode, 192, readers.scaled(lambda scale: 0.5 * scale))

    def change(read: dict[str, Any]) -> None:
        tell(read)
        read["number_format"] = "e4m3fnuz/fp32"

    scene.read(job, logits=True, change=change)
    finding = the_one(scene)
    assert (finding.code, finding.confidence) == ("F24", "certain")
    assert any("e4m3fnuz/fp32" in line and "e4m3fn/fp32" in line for line in finding.evidence)


# kernel noise (M6) and numerics


@SCALES
@pytest.mark.parametrize(("noise", "clean"), [(1e-8, True), (1e-3, False)])
def test_noise_within_the_bound_is_no_fault(
    tmp_path: Path, scales: pattern.Scales, noise: float, clean: bool
) -> None:
    scene = Scene(tmp_path, scales=scales)
    job = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]), reads=0)
    draw = np.random.default_rng(8)

    def shaken(read: dict[str, Any]) -> None:
        read["logits"] = (read["logits"] * (1 + noise * draw.uniform(-1, 1, 192))).astype(np.float32)
        read["top_k"][:192] = np.argsort(-read["logits"], kind="stable")

    scene.read(job, logits=True, change=shaken)
    if clean:
        expect_clean(verdict_of(scene))
        return
    finding = the_one(scene)
    assert (finding.code, finding.confidence) == ("F25", "certain")


# invalid-top-k and wrong-top-k


def worst(read: dict[str, Any]) -> None:
    read["k"] = 64
    read["top_k"] = np.argsort(read["logits"], kind="stable")[:64].astype(np.int32)


def holes(read: dict[str, Any]) -> None:
    read["k"] = 64
    read["top_k"] = np.argsort(-read["logits"], kind="stable")[:64].astype(np.int32)
    read["top_k"][::2] = -1


def both(read: dict[str, Any]) -> None:
    worst(read)
    read["top_k"][::2] = -1


@pytest.mark.parametrize(("change", "code"), [(worst, "F27"), (holes, "F26"), (both, "F26")])
def test_slots_that_name_no_row_and_rows_that_score_too_low(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], code: str
) -> None:
    scene = Scene(tmp_path)
    job = scene.healthy(Job(7000, 0, 192, [21, 22, 23], [5, 6, 7]), reads=0)
    scene.read(job, logits=True, change=change)
    finding = the_one(scene)
    assert (finding.code, finding.stage, finding.confidence) == (code, "top-k", "certain")


# torn in the table, in the source, in what arrived, and for good


@KEEPS
@pytest.mark.parametrize("where", ["table", "SE", "RC", "LT"])
def test_a_page_that_is_torn_in_four_places(tmp_path: Path, keep: Any, where: str) -> None:
    """Rows from 32 on of page 1 are another's at the read: in four stories only one of which is a table's."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.healthy(Job(7001, 1, 192, [24, 25, 26], [10, 11, 12]), reads=0)
    job = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(job)
    scene.announce(job)
    step, begin = scene.step(), scene.prefill.seq + 1
    if where == "SE":
        slots = np.concatenate([scene.write(scene.prefill, job, 0, 96), np.arange(96, 128) + 21 * 64])
        slots = np.concatenate([slots, scene.write(scene.prefill, job, 128, 192)])
        scene.send(job, written=0, awaited=0)
        scene.arrive(job)
        scene.write(scene.prefill, job, 96, 128)
        scene.tell_store(scene.prefill, job, 0, slots, step, stream=1, begin_seq=begin)
        scene.seen_stored(scene.prefill, job, 0, 192, step)
    else:
        scene.store(job, 0, 192)
        transfer = scene.post(job)
        scene.land(transfer, only=(0, 4096) if where in ("RC", "LT") else None, pages=[6])
        scene.done(transfer)
        scene.arrive(job)
        scene.read(job, table=[5, 11, 7] if where == "table" else None)
        if where == "RC":
            scene.land(transfer)
    scene.look("LT", job)
    finding = the_one(scene)
    kinds = {
        "table": ("F18", "table"),
        "SE": ("F10", "source"),
        "RC": ("F09", "completion"),
        "LT": ("F31", "wire"),
    }
    assert (finding.code, finding.stage) == kinds[where]
    assert [page.logical for page in finding.pages] == [1]


# freed-page-referenced and torn-block-table


def shared_prefix(scene: Scene, *, freed: bool) -> Job:
    """Room 7000 shares page 5 of room 7002; where ``freed``, that page had been given to room 7003 before."""
    parent = scene.healthy(Job(7002, 2, 64, [24], [5]))
    if freed:
        scene.free(scene.decode, parent)
        scene.healthy(Job(7003, 3, 64, [25], [5]))
    job = Job(7000, 0, 128, [24, 27], [5, 7], prefix_q=2, prefix_rows=64)
    for side in scene.sides:
        scene.begin(side, job)
    scene.give(scene.prefill, job, [24], shared=True)
    scene.give(scene.prefill, job, [27], logical=1)
    scene.give(scene.decode, job, [5], shared=True)
    scene.give(scene.decode, job, [7], logical=1)
    scene.announce(job, first=1)
    scene.store(job, 64, 128)
    scene.send(job, [1])
    scene.arrive(job, first=1)
    return job


@KEEPS
def test_a_shared_page_that_was_freed_and_reused_is_no_torn_table(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = shared_prefix(scene, freed=True)
    scene.read(job)
    finding = the_one(scene)
    assert finding.code == "F16"
    assert finding.stage in ("destination", "table")
    assert [page.logical for page in finding.pages] == [0]


@KEEPS
def test_the_same_content_through_another_table_entry_is_a_torn_table(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    scene.healthy(Job(7003, 3, 64, [25], [9]))
    job = shared_prefix(scene, freed=False)
    scene.read(job, table=[9, 7])
    finding = the_one(scene)
    assert (finding.code, finding.stage, finding.confidence) == ("F18", "table", "certain")


@KEEPS
def test_a_shared_page_that_its_owner_still_holds_is_clean(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = shared_prefix(scene, freed=False)
    scene.read(job)
    expect_clean(verdict_of(scene))
