"""Kinds in which a side's own store, copy or clear writes where it should not: F15, F16, F20, F22, F23, F29."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.layouts import layout
from replay.verdict import Donor, Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Side
from tests.scenarios.stories import arrived, begun, ours

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
PAGE = 8448


def looked(scene: Scene, job: Job) -> Verdict:
    scene.look("LT", job)
    scene.read(job)
    return verdict_of(scene)


def clear(scene: Scene, page: int, *, length: int = PAGE, told: bool = False) -> None:
    """Decode zeroes ``length`` bytes from ``page`` on; ``told``: a hook saw it."""
    d = scene.decode
    for layer in d.layers:
        d.memory[layer].reshape(-1)[page * PAGE : page * PAGE + length] = 0
        if told:
            d.emit(
                "copy",
                operation="clear",
                buffer=d.buffer(layer),
                ids=[page],
                length=length,
                stride=PAGE,
            )


@KEEPS
@SCALES
@pytest.mark.parametrize("told", [False, True])
def test_f15_a_page_is_cleared_after_arrival(
    tmp_path: Path, scales: pattern.Scales, keep: Any, told: bool
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    job = arrived(scene)
    clear(scene, 6, told=told)
    right = pattern.page(0, 0, 1, scales=scales)
    wanted = page_finding(1, 6, np.zeros_like(right), right, keep=keep)
    (finding,) = expect(
        looked(scene, job), "F15", "local-clear", "destination", room=7000, pages=[wanted], role="decode"
    )
    assert any("whole page is zero" in line for line in finding.evidence)


@KEEPS
def test_f15_a_clear_as_long_as_a_slab_reaches_the_neighbours(tmp_path: Path, keep: Any) -> None:
    """One page is cleared for its next owner, with the length of three."""
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene)
    clear(scene, 4, length=3 * PAGE, told=True)
    (finding,) = expect(looked(scene, job), "F15", "local-clear", "destination", room=7000)
    assert [page.physical for page in finding.pages] == [5, 6]
    said = " ".join(finding.evidence)
    assert "25344 bytes" in said
    assert "reaches over its own pages" in said
    assert "pages 5..6 of the buffer, 16896 bytes" in said


def test_f15_a_clear_may_end_within_a_row(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.decode.memory[0][6, 300:5000] = 0
    (finding,) = expect(looked(scene, job), "F15", "local-clear", "destination", room=7000)
    (page,) = finding.pages
    assert page.byte_ranges == ((300, 5000),)
    assert any("[300,5000)" in line for line in finding.evidence)


@KEEPS
def test_f15_the_content_from_before_the_transfer_comes_back(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = ours()
    scene.earlier(job.prefill, job.decode)
    old = scene.decode.memory[0][6].copy()
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    scene.send(job)
    scene.arrive(job)
    scene.decode.memory[0][6] = old
    (finding,) = expect(looked(scene, job), "F15", "local-clear", "destination", room=7000)
    assert finding.rule == "its earlier content came back"


@KEEPS
@pytest.mark.parametrize("gone", ["store", "send", "copy", "alloc"])
def test_f15_is_not_certain_where_a_writer_may_have_gone_unseen(tmp_path: Path, keep: Any, gone: str) -> None:
    scene = Scene(tmp_path, keep=keep, drop=[gone])
    job = arrived(scene)
    clear(scene, 6)
    verdict = looked(scene, job)
    assert {f.code for f in verdict.findings} <= {"F15", "unclassified"}
    assert all(f.confidence != "certain" for f in verdict.findings)


def test_a_zero_word_is_no_clear(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    job = arrived(scene)
    scene.decode.memory[0][6, 8192:8196] = 0
    (finding,) = looked(scene, job).findings
    assert finding.code == "unclassified"


def padded(side: Side, layer: int, slots: list[int], row: int, **fields: Any) -> None:
    """A padded batch stores its padding to ``slots``; what it writes there is row ``row`` of nobody."""
    kept = np.array(slots)
    landing = np.where(kept >= 0, kept, side.pages * 64 - 1)
    side.write_rows(layer, landing, *pattern.rows(8, layer, [row] * len(slots), format=side.format))
    side.emit(
        "store",
        room=-1,
        buffer=side.buffer(layer),
        slots=slots,
        positions=[0] * len(slots),
        logical_rows=[-1] * len(slots),
        **fields,
    )


@KEEPS
@SCALES
@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_f23_a_padding_row_hits_a_row_of_a_page_that_has_arrived(
    tmp_path: Path, format: str, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, format=format, scales=scales, keep=keep)
    job = arrived(scene)
    padded(scene.decode, 0, [6 * 64 + 63] * 4, 5)
    (finding,) = expect(looked(scene, job), "F23", "padding-row-written", "store", room=7000, role="decode")
    (page,) = finding.pages
    assert (page.logical, page.value_rows) == (1, ((63, 63),))
    assert page.scale_rows == (((63, 63),) if format == "fp8" else ())


@KEEPS
@pytest.mark.parametrize(
    ("drop", "confidence"), [((), "certain"), (("send",), "likely"), (("copy",), "likely")]
)
def test_f23_without_an_order_it_is_certain_where_nothing_else_can_have_written(
    tmp_path: Path, keep: Any, drop: tuple[str, ...], confidence: str
) -> None:
    """The store ran on a thread that nothing orders before the look."""
    scene = Scene(tmp_path, keep=keep, drop=drop)
    job = arrived(scene)
    padded(scene.decode, 0, [6 * 64 + 63] * 4, 5, thread=7)
    (finding,) = looked(scene, job).findings
    assert (finding.code, finding.confidence) == ("F23", confidence)


@KEEPS
def test_f23_a_row_that_another_store_names_too_needs_the_order(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene)
    slot = np.array([6 * 64 + 63])
    scene.tell_store(scene.decode, job, 127, slot, scene.step(), thread=7)
    padded(scene.decode, 0, [6 * 64 + 63] * 4, 5, thread=8)
    (finding,) = looked(scene, job).findings
    assert (finding.code, finding.confidence) == ("F23", "likely")


@KEEPS
def test_f23_slot_minus_one_is_the_last_row_of_the_last_page(tmp_path: Path, keep: Any) -> None:
    """The source's own page is the last of the buffer: its last row is replaced between its store and its send."""
    scene = Scene(tmp_path, keep=keep, pages=24)
    job = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.earlier(job.prefill, job.decode)
    scene.start(job)
    scene.announce(job)
    scene.store(job, 0, job.rows)
    padded(scene.prefill, 0, [-1] * 8, 5)
    scene.send(job)
    scene.arrive(job)
    (finding,) = expect(looked(scene, job), "F23", "padding-row-written", "store", room=7000, role="prefill")
    (page,) = finding.pages
    assert (page.logical, page.physical, page.value_rows) == (2, 23, ((63, 63),))
    assert any("slot -1" in line for line in finding.evidence)


@KEEPS
def test_f23_padding_that_a_right_kernel_skips_is_nobodys_fault(tmp_path: Path, keep: Any) -> None:
    """Slots 0 and -1 are named by padding rows, the row that changed is another one."""
    scene = Scene(tmp_path, keep=keep, pages=24)
    job = Job(7000, 0, 192, [21, 22, 23], [5, 6, 23])
    arrived(scene, job)
    d = scene.decode
    d.emit("store", room=-1, buffer=d.buffer(0), slots=[0, -1], positions=[0, 0], logical_rows=[-1, -1])
    d.memory[0][23, 3 * 128 : 4 * 128] ^= 5
    (finding,) = looked(scene, job).findings
    assert finding.code == "unclassified"


@KEEPS
@SCALES
def test_f29_a_draft_row_is_written_over_the_last_row_of_the_prompt(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    job = arrived(scene, Job(7000, 0, 100, [21, 22], [5, 6]))
    d = scene.decode
    slot = np.array([6 * 64 + 35])
    d.write_rows(0, slot, *pattern.rows(6, 0, [99], scales=scales))
    scene.tell_store(d, job, 99, slot, scene.step(), draft=True)
    (finding,) = expect(
        looked(scene, job), "F29", "speculative-row-misuse", "destination", room=7000, role="decode"
    )
    (page,) = finding.pages
    assert (page.logical, page.value_rows) == (1, ((35, 35),))


@KEEPS
def test_rejected_draft_rows_are_overwritten_by_later_stores(tmp_path: Path, keep: Any) -> None:
    """Each step drafts three rows, one is accepted, the next step writes the others anew."""
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, Job(7000, 0, 100, [21, 22], [5, 6]))
    scene.read(job)
    d = scene.decode
    for number in range(4):
        first = job.length
        slots = 6 * 64 + np.arange(first, first + 3) - 64
        d.write_rows(0, slots, *pattern.rows(2 + number, 0, np.arange(first, first + 3)))
        step = scene.step()
        scene.tell_store(d, job, first, slots, step, draft=True)
        scene.seen_stored(d, job, first, first + 3, step)
        scene.read(job, rows=first + 3)
        job.appended += 1
    scene.read(job)
    expect_clean(verdict_of(scene))


@KEEPS
def test_f22_a_move_of_rows_moves_pages_with_the_rows_slots(tmp_path: Path, keep: Any) -> None:
    """Slot 6 is meant, page 6 is hit: with what page 9 holds, which is another request's."""
    scene = Scene(tmp_path, keep=keep)
    other = scene.healthy(Job(7005, 3, 64, [30], [9]))
    job = arrived(scene)
    d = scene.decode
    d.emit(
        "copy",
        operation="move",
        unit="row",
        room=other.room,
        source_buffer=d.buffer(0),
        buffer=d.buffer(0),
        source_ids=[9],
        ids=[6],
        length=PAGE,
        source_stride=PAGE,
        stride=PAGE,
    )
    d.memory[0][6] = d.memory[0][9]
    (finding,) = expect(looked(scene, job), "F22", "token-index-as-page-index", "store", room=7000)
    (page,) = finding.pages
    assert (page.logical, page.physical, page.donor) == (1, 6, Donor(7005, 0, 0))
    assert page.value_rows == ((0, 63),)


@KEEPS
def test_a_right_move_of_rows_is_clean(tmp_path: Path, keep: Any) -> None:
    """An accepted draft row is moved down to its place, values and scale."""
    scene = Scene(tmp_path, keep=keep)
    job = arrived(scene, Job(7000, 0, 100, [21, 22], [5, 6]))
    d = scene.decode
    slots = 6 * 64 + np.arange(36, 40)
    d.write_rows(0, slots, *pattern.rows(2, 0, np.arange(100, 104)))
    step = scene.step()
    scene.tell_store(d, job, 100, slots, step, draft=True)
    scene.seen_stored(d, job, 100, 104, step)
    spec = layout("fp8")
    for area in (spec.values(d.memory[0]), spec.scales(d.memory[0])):
        area[6, 36] = area[6, 38]
    d.emit(
        "copy",
        operation="move",
        unit="row",
        room=7000,
        source_buffer=d.buffer(0),
        buffer=d.buffer(0),
        source_ids=[slots[2]],
        ids=[slots[0]],
        length=132,
        source_stride=132,
        stride=132,
    )
    job.appended = 1
    scene.read(job)
    expect_clean(verdict_of(scene))


def shared_page(scene: Scene, *, share_first: bool, altered: int = 0) -> Verdict:
    """A's page 6 is in the prefix tree; it is evicted and given to C, and B reads it as A's.

    ``share_first``: B was given its share before the eviction; otherwise after C's bytes had arrived. The first
    ``altered`` rows of C's page were written over by nobody that was seen before C learned of its arrival.
    """
    d = scene.decode
    first = scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    reader = Job(7001, 1, 192, [31, 32, 33], [5, 6, 10], prefix_q=0, prefix_rows=128)
    third = Job(7002, 2, 64, [34], [6])

    def share() -> None:
        scene.begin(d, reader)
        scene.give(d, reader, [5, 6], shared=True)
        scene.give(d, reader, [10], logical=2)

    scene.begin(scene.prefill, reader)
    scene.give(scene.prefill, reader, reader.prefill)
    if share_first:
        share()
    d.emit("free", room=first.room, pages=[6], reason="evict")
    scene.start(third)
    scene.announce(third)
    scene.store(third, 0, third.rows)
    scene.send(third)
    layout("fp8").values(d.memory[0])[6, :altered] ^= 0x55
    scene.arrive(third)
    scene.look("LT", third)
    scene.read(third)
    if not share_first:
        share()
    scene.announce(reader, first=2)
    scene.store(reader, 0, 192)
    scene.send(reader, [2])
    scene.arrive(reader, first=2)
    scene.read(reader)
    scene.read(reader)
    return verdict_of(scene)


@KEEPS
@SCALES
@pytest.mark.parametrize("share_first", [False, True])
def test_f16_a_freed_page_is_still_in_the_prefix_tree(
    tmp_path: Path, scales: pattern.Scales, keep: Any, share_first: bool
) -> None:
    verdict = shared_page(Scene(tmp_path, scales=scales, keep=keep), share_first=share_first)
    (finding,) = expect(verdict, "F16", "freed-page-referenced", "destination", room=7001, role="decode")
    (page,) = finding.pages
    assert (page.logical, page.physical, page.donor) == (1, 6, Donor(7002, 0, 0))
    assert page.value_rows == ((0, 63),)
    assert "table" in verdict.cleared


@KEEPS
def test_f16_does_not_cover_what_was_wrong_for_the_later_owner_already(tmp_path: Path, keep: Any) -> None:
    verdict = shared_page(Scene(tmp_path, keep=keep), share_first=True, altered=8)
    rows = {
        f.code: f.pages[0].value_rows for f in verdict.findings if f.request.room == 7001 and f.code == "F16"
    }
    assert rows == {"F16": ((8, 63),)}


@pytest.mark.parametrize(("drop", "confidence"), [((), "certain"), (("SE.before", "SE.after"), "likely")])
def test_f16_is_certain_only_where_what_the_new_owner_was_sent_was_seen(
    tmp_path: Path, drop: tuple[str, ...], confidence: str
) -> None:
    """Otherwise it may be what nobody ever brought there: the old bytes under a buffer that was left out."""
    verdict = shared_page(Scene(tmp_path, drop=drop), share_first=True)
    (finding,) = [f for f in verdict.findings if f.request.room == 7001]
    assert (finding.code, finding.confidence) == ("F16", confidence)


def sharing(scene: Scene) -> tuple[Job, Job]:
    """A brings pages 5 and 6, B shares them and has its own page 10; both have arrived."""
    d = scene.decode
    first = scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    reader = Job(7001, 1, 192, [31, 32, 33], [5, 6, 10], prefix_q=0, prefix_rows=128)
    scene.begin(scene.prefill, reader)
    scene.give(scene.prefill, reader, reader.prefill)
    scene.begin(d, reader)
    scene.give(d, reader, [5, 6], shared=True)
    scene.give(d, reader, [10], logical=2)
    scene.announce(reader, first=2)
    scene.store(reader, 0, 192)
    scene.send(reader, [2])
    scene.arrive(reader, first=2)
    return first, reader


@KEEPS
def test_f16_blames_no_owner_that_came_after_the_page_was_given_back(tmp_path: Path, keep: Any) -> None:
    """What B saw in its page is what C, which was given the page once B was over, brought there later."""
    scene = Scene(tmp_path, keep=keep)
    first, reader = sharing(scene)
    scene.decode.memory[0][6] = pattern.page(2, 0, 0)
    scene.read(reader)
    scene.free(scene.decode, reader)
    scene.free(scene.decode, first)
    scene.healthy(Job(7002, 2, 64, [34], [6]))
    found = {finding.code for finding in verdict_of(scene).findings if finding.request.room == 7001}
    assert found
    assert "F16" not in found


@KEEPS
def test_f16_blames_no_owner_from_before_the_shared_content(tmp_path: Path, keep: Any) -> None:
    """What B saw in its page is what an owner before A had brought there."""
    scene = Scene(tmp_path, keep=keep)
    scene.healthy(Job(7010, 8, 64, [35], [6]), finish=True)
    scene.healthy(Job(7011, 3, 64, [36], [6]), finish=True)
    _, reader = sharing(scene)
    scene.decode.memory[0][6] = pattern.page(3, 0, 0)
    scene.read(reader)
    found = {finding.code for finding in verdict_of(scene).findings if finding.request.room == 7001}
    assert found
    assert "F16" not in found


def wide_store(scene: Scene) -> Verdict:
    """Decode's store of another request computes page p at byte 2 * p * 8448: page 3's row lands in page 6."""
    job = arrived(scene)
    other = scene.healthy(Job(7005, 3, 60, [30], [3]))
    d = scene.decode
    slot = np.array([3 * 64 + 60])
    d.write_rows(0, slot + 3 * 64, *pattern.rows(3, 0, [60], scales=scene.scales))
    scene.tell_store(d, other, 60, slot, scene.step(), stride=2 * PAGE)
    return looked(scene, job)


@KEEPS
@SCALES
def test_f20_a_store_with_twice_the_stride_hits_another_page(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = wide_store(Scene(tmp_path, scales=scales, keep=keep))
    (finding,) = expect(verdict, "F20", "wrong-stride", "store", room=7000, role="decode")
    (page,) = finding.pages
    assert (page.logical, page.physical, page.value_rows) == (1, 6, ((60, 60),))
    assert finding.request.aliases == (7005,)
    assert "16896" in " ".join(finding.evidence)


@KEEPS
@pytest.mark.parametrize("used", [False, True])
def test_f20_a_store_with_twice_the_stride_leaves_its_own_pages_old(
    tmp_path: Path, keep: Any, used: bool
) -> None:
    """Rows of pages 3 and 5 go to pages 6 and 10; ``used``: another request had lived on 3 and 5."""
    scene = Scene(tmp_path, keep=keep)
    job = Job(7000, 0, 128, [3, 5], [5, 6])
    if used:
        scene.earlier(job.prefill, job.decode)
    scene.start(job)
    scene.announce(job)
    p = scene.prefill
    step = scene.step()
    slots = np.concatenate([np.arange(64) + page * 64 for page in job.prefill])
    landing = np.concatenate([np.arange(64) + 2 * page * 64 for page in job.prefill])
    p.write_rows(0, landing, *pattern.rows(0, 0, np.arange(128)))
    scene.tell_store(p, job, 0, slots, step, stride=2 * PAGE)
    scene.seen_stored(p, job, 0, 128, step)
    scene.send(job)
    scene.arrive(job)
    (finding,) = expect(looked(scene, job), "F20", "wrong-stride", "store", room=7000, role="prefill")
    assert [(page.logical, page.physical, page.value_rows) for page in finding.pages] == [
        (0, 3, ((0, 63),)),
        (1, 5, ((0, 63),)),
    ]


@KEEPS
def test_f23_a_padding_row_may_come_between_landing_and_completion(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    transfer = scene.post(job)
    scene.land(transfer)
    padded(scene.decode, 0, [6 * 64 + 63], 5)
    scene.done(transfer)
    scene.arrive(job)
    (finding,) = expect(looked(scene, job), "F23", "padding-row-written", "store", room=7000, role="decode")
    (page,) = finding.pages
    assert (page.logical, page.value_rows, page.scale_rows) == (1, ((63, 63),), ((63, 63),))
