"""Right behaviour that looks like a fault: none of it may be called one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Donor, Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import reused

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])


def test_m1_rows_that_were_never_written_may_hold_anything(tmp_path: Path) -> None:
    # Every page ends in rows of an earlier request, other ones on each side.
    scene = Scene(tmp_path, layers=(0, 1))
    scene.healthy(Job(7101, 4, 256, [21, 22, 23, 24], [5, 6, 7, 8]), finish=True)
    scene.healthy(Job(7102, 5, 256, [25, 26, 27, 28], [8, 7, 6, 5]), finish=True)
    scene.healthy(Job(7000, 0, 65, [21, 22], [5, 6]))
    scene.healthy(Job(7001, 1, 1, [23], [7]))
    expect_clean(verdict_of(scene))


def test_m2_decode_appends_into_a_new_page_as_well(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ours = scene.healthy(Job(7000, 0, 126, [21, 22], [5, 6, 7]))
    for _ in range(5):
        scene.append(ours)
        scene.read(ours)
    expect_clean(verdict_of(scene))


def test_m2_a_snapshot_taken_later_may_show_appended_rows(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ours = Job(7000, 0, 100, [21, 22], [5, 6])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 100)
    scene.send(ours)
    scene.arrive(ours)
    scene.append(ours, 3)
    scene.look("LT", ours)
    scene.read(ours)
    expect_clean(verdict_of(scene))


def test_m3_reversed_and_reused_page_ids_are_right(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for attempt, order in enumerate(([5, 6, 7], [7, 6, 5], [6, 7, 5])):
        scene.healthy(Job(7000 + attempt, attempt, 192, [23, 22, 21], order), finish=True)
    expect_clean(verdict_of(scene))


def test_a_room_id_may_be_used_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]), finish=True)
    scene.healthy(Job(7000, 1, 128, [23, 24], [6, 5], attempt=1), finish=True)
    expect_clean(verdict_of(scene))


def torn_twin(scene: Scene) -> Verdict:
    """q0's page 2 is torn as in S1; its pages 0 and 1 are also those of a request with the same prefix."""
    twin = Job(7005, 5, 192, [31, 32, 33], [8, 9, 10], prefix_q=0, prefix_rows=128)
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.healthy(twin)
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 192)
    transfer = scene.post(ours)
    scene.land(transfer, only=(0, 4096), pages=[7])
    scene.done(transfer)
    scene.arrive(ours)
    scene.read(ours)
    scene.land(transfer)
    scene.look("LT", ours)
    return verdict_of(scene)


@KEEPS
def test_m4_pages_of_a_shared_prefix_are_no_evidence_in_a_fault(tmp_path: Path, keep: Any) -> None:
    verdict = torn_twin(Scene(tmp_path, keep=keep))
    right = pattern.page(0, 0, 2)
    seen = right.copy()
    seen[4096:] = pattern.page(9, 0, 2)[4096:]
    wanted = page_finding(2, 7, seen, right, keep=keep)
    expect(verdict, "F09", "completion-early", "completion", room=7000, pages=[wanted])


@KEEPS
def test_m4_a_late_write_of_the_same_prefix_changes_nothing(tmp_path: Path, keep: Any) -> None:
    """As S2, but what lands late is the prefix that both requests share: only the page that differs counts."""
    scene = Scene(tmp_path, keep=keep)
    a = Job(7000, 0, 128, [20, 21], [14, 15])
    b = Job(7001, 1, 192, [24, 25, 26], [14, 15, 16], prefix_q=0, prefix_rows=128)
    late = reused(scene, a, b)
    scene.land(late)
    scene.done(late)
    scene.read(b)
    scene.look("LT", b)
    expect_clean(verdict_of(scene))


@KEEPS
def test_m7_decode_may_have_fewer_layers(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, layers=(0, 1, 2, 3), decode_layers=(0, 1, 2), keep=keep)
    scene.earlier([21, 22], [5, 6])
    scene.healthy(Job(7000, 0, 128, [21, 22], [6, 5]))
    expect_clean(verdict_of(scene))


def test_m8_sentinels_in_tables_and_slots_are_no_pages(tmp_path: Path) -> None:
    """A padded batch stores its padding to slot 0 or -1, and pads tables with 0 or -1."""
    scene = Scene(tmp_path)
    ours = scene.healthy(Job(7000, 0, 126, [21, 22], [5, 6, 7]))
    d = scene.decode
    for step in range(4):
        scene.append(ours)
        for layer in d.layers:
            d.emit(
                "store",
                room=-1,
                buffer=d.buffer(layer),
                step=200 + step,
                slots=[0, -1, 0, -1],
                positions=[0, 0, 0, 0],
                logical_rows=[-1, -1, -1, -1],
            )
            junk = pattern.page(8, layer, step)
            d.memory[layer][0][:128] = junk[:128]
            d.memory[layer][0][8192:8196] = junk[8192:8196]
        scene.read(ours, pad=[0, 0] if step % 2 else [-1, -1])
    expect_clean(verdict_of(scene))


def test_m8_top_k_is_padded_with_minus_one_past_the_length(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    scene.read(ours, logits=True)
    verdict = verdict_of(scene)
    expect_clean(verdict)
    assert "read-kernel" in verdict.cleared
    assert "top-k" in verdict.cleared


@pytest.mark.parametrize("reused", ["not", "announced", "arrived"])
@KEEPS
def test_m11_one_more_step_may_read_and_write_pages_that_are_freed(
    tmp_path: Path, keep: Any, reused: str
) -> None:
    """The finished request's step N+1 runs on the device after its pages went back on the host.

    ``reused``: the pages are nobody's yet, another request has announced them, or its content has arrived.
    """
    scene = Scene(tmp_path, keep=keep)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    scene.append(ours)
    scene.read(ours)
    scene.finish(ours)
    other = Job(7001, 1, 128, [23, 24], [6, 5])
    if reused == "not":
        scene.append(ours)
        scene.read(ours)
    scene.start(other)
    scene.announce(other)
    scene.store(other, 0, 128)
    if reused == "announced":
        # The row goes into a page that is the other's by now, before the other's content lands over it.
        scene.append(ours)
        scene.read(ours)
    scene.send(other)
    scene.arrive(other)
    if reused == "arrived":
        scene.read(ours)
    scene.look("LT", other)
    scene.read(other)
    expect_clean(verdict_of(scene))


def test_m11_an_overshoot_write_into_arrived_content_is_a_fault_of_the_new_owner(
    tmp_path: Path,
) -> None:
    """The line between M11 and a real fault: here the late row does change what the new owner reads."""
    scene = Scene(tmp_path)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    scene.finish(ours)
    other = scene.healthy(Job(7001, 1, 128, [23, 24], [5, 6]), reads=0)
    scene.append(ours)  # row 100 of room 7000 = row 36 of page 6
    scene.read(other)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert finding.request.room == 7001
    assert finding.stage == "destination"
    (page,) = finding.pages
    assert (page.logical, page.physical) == (1, 6)
    assert page.value_rows == page.scale_rows == ((36, 36),)
    assert page.donor in (None, Donor(room=7000, layer=0, logical=1))


@KEEPS
def test_m12_a_shorter_list_that_leaves_out_no_valid_row_is_no_divergence(tmp_path: Path, keep: Any) -> None:
    """Decode announces three pages, the prompt fills two, prefill sends two."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22, 23], [5, 6, 7])
    ours = Job(7000, 0, 128, [21, 22], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours, pages=[5, 6, 7])
    scene.store(ours, 0, 128)
    scene.send(ours)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    expect_clean(verdict_of(scene))


@KEEPS
def test_m12_a_length_that_cuts_only_bytes_past_the_valid_rows_is_a_hazard(tmp_path: Path, keep: Any) -> None:
    """Page 1 has 36 valid rows: its scales end at byte 8,336 and the sender's item ends at 8,340."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22], [5, 6])
    ours = Job(7000, 0, 36, [21], [5])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 36)
    scene.send(ours, lengths=(8340, 8340))
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    verdict = verdict_of(scene)
    expect_clean(verdict)
    assert verdict.hazards, "the item lengths of the two sides differ"
    assert any("8340" in f"{h.what} {h.where}".replace(",", "") for h in verdict.hazards)


@KEEPS
def test_a_page_that_is_sent_twice_is_judged_by_its_last_sending(tmp_path: Path, keep: Any) -> None:
    """A chunk ends inside page 1; the next chunk fills that page and sends it again."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22, 23], [5, 6, 7])
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 100)
    scene.send(ours, [0, 1], chunk=0, last=False, rows=100)
    scene.store(ours, 100, 192)
    scene.send(ours, [1, 2], chunk=1, last=True)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    expect_clean(verdict_of(scene))


@KEEPS
def test_a_store_that_goes_on_in_a_page_that_is_being_sent_is_clean(tmp_path: Path, keep: Any) -> None:
    """As above, but the next rows are written while the first sending of the page is in flight."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22, 23], [5, 6, 7])
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 100)
    first = scene.post(ours, [0, 1], chunk=0, last=False, rows=100)
    scene.store(ours, 100, 192)
    scene.land(first)
    scene.done(first)
    scene.send(ours, [1, 2], chunk=1, last=True)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    expect_clean(verdict_of(scene))


@KEEPS
def test_the_source_may_be_reused_once_the_transfer_is_done(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 192)
    scene.send(ours)
    scene.free(scene.prefill, ours)
    other = Job(7001, 1, 192, [23, 22, 21], [8, 9, 10])
    scene.start(other)
    scene.announce(other)
    scene.store(other, 0, 192)
    scene.arrive(ours)
    scene.read(ours)
    scene.send(other)
    scene.arrive(other)
    scene.read(other)
    expect_clean(verdict_of(scene))


@KEEPS
def test_m5_warm_up_and_health_requests_have_no_transfer(tmp_path: Path, keep: Any) -> None:
    """They run on pages that were given to them, decode reads what nobody sent, and nobody owes them anything."""
    scene = Scene(tmp_path, keep=keep)
    d = scene.decode
    for room, mark in ((1, "warmup"), (2, "health"), (3, "fake")):
        job = Job(room, 4, 64, [], [5])
        scene.begin(d, job, mark=mark)
        scene.give(d, job, [5])
        scene.read(job)
        scene.free(d, job)
    scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    expect_clean(verdict_of(scene))


@KEEPS
def test_m11_the_pages_may_change_hands_while_the_last_step_runs(tmp_path: Path, keep: Any) -> None:
    """The read began before the host freed the pages; its second look sees the next owner's bytes."""
    scene = Scene(tmp_path, keep=keep)
    ours = scene.healthy(Job(7000, 0, 100, [21, 22], [5, 6]))
    other = Job(7001, 1, 128, [23, 24], [6, 5])

    def change_hands() -> None:
        scene.finish(ours)
        scene.healthy(other, reads=0)

    scene.read(ours, meanwhile=change_hands)
    scene.read(other)
    expect_clean(verdict_of(scene))


@KEEPS
@pytest.mark.parametrize("reused", [False, True])
def test_a_later_look_may_come_after_the_pages_have_changed_hands(
    tmp_path: Path, keep: Any, reused: bool
) -> None:
    scene = Scene(tmp_path, keep=keep)
    ours = Job(7000, 0, 128, [21, 22], [5, 6])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 128)
    scene.send(ours)
    scene.arrive(ours)
    scene.read(ours)
    scene.finish(ours)
    other = Job(7001, 1, 128, [23, 24], [6, 5])
    if reused:
        scene.healthy(other)
    scene.look("LT", ours)
    expect_clean(verdict_of(scene))


@KEEPS
def test_a_later_look_at_another_owners_bytes_is_no_evidence_about_a_torn_page(
    tmp_path: Path, keep: Any
) -> None:
    """Torn as in S1, but the pages had changed hands before LT: neither that it arrived later nor that it never did."""
    scene = Scene(tmp_path, keep=keep)
    scene.earlier([21, 22, 23], [5, 6, 7])
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 192)
    transfer = scene.post(ours)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    scene.arrive(ours)
    scene.read(ours)
    scene.finish(ours)
    scene.healthy(Job(7001, 1, 192, [24, 25, 26], [5, 6, 7]))
    scene.look("LT", ours)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert finding.request.room == 7000
    assert finding.stage in ("wire", "completion")
    assert finding.confidence != "certain" or finding.code == "unclassified"
    assert [page.logical for page in finding.pages] == [1]


@KEEPS
def test_an_aborted_write_that_lands_before_the_new_owners_bytes_is_overwritten(
    tmp_path: Path, keep: Any
) -> None:
    scene = Scene(tmp_path, keep=keep)
    a = Job(7000, 0, 128, [20, 21], [14, 15])
    b = Job(7001, 1, 128, [24, 25], [15, 14])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    scene.start(b)
    scene.announce(b)
    scene.store(b, 0, b.rows)
    transfer = scene.post(b)
    scene.land(late)
    scene.land(transfer)
    scene.done(late)
    scene.done(transfer)
    scene.arrive(b)
    scene.look("LT", b)
    scene.read(b)
    expect_clean(verdict_of(scene))


@KEEPS
def test_a_page_of_the_prefix_tree_may_come_in_the_place_of_the_requests_own(
    tmp_path: Path, keep: Any
) -> None:
    """Two requests compute one prefix at a time, not quite equally; the second then takes over the first one's page."""
    scene = Scene(tmp_path, keep=keep)
    first = Job(7000, 0, 128, [21, 22], [5, 6])
    second = Job(7001, 1, 128, [31, 32], [8, 9])
    scene.healthy(first)
    scene.start(second)
    scene.announce(second)
    scene.store(second, 0, 128)
    second.prefill[0] = 21
    scene.give(scene.prefill, second, [21], shared=True)
    scene.send(second)
    scene.arrive(second)
    scene.look("LT", second)
    scene.read(second)
    assert not np.array_equal(scene.prefill.memory[0][21], scene.prefill.memory[0][31])
    assert np.array_equal(scene.prefill.memory[0][21], scene.decode.memory[0][8])
    expect_clean(verdict_of(scene))


@KEEPS
def test_a_page_that_changed_is_no_fault_of_a_later_short_transfer_to_it(tmp_path: Path, keep: Any) -> None:
    """The next owner's descriptors are too short. They were posted long after the change and bring other bytes."""
    scene = Scene(tmp_path, keep=keep)
    first = Job(7000, 0, 128, [21, 22], [5, 6])
    scene.start(first)
    scene.announce(first)
    scene.store(first, 0, 128)
    scene.send(first)
    scene.arrive(first)
    scene.look("LT", first)
    scene.decode.memory[0][5, 1000:1064] ^= 0xFF
    scene.read(first)
    scene.finish(first)
    second = Job(7001, 1, 128, [31, 32], [5, 6])
    scene.start(second)
    scene.announce(second)
    scene.store(second, 0, 128)
    scene.send(second, lengths=(8192, 8192), strides=(8448, 8448))
    scene.arrive(second)
    scene.look("LT", second)
    scene.read(second)
    verdict = verdict_of(scene)
    found = {(finding.request.room, finding.code, finding.stage) for finding in verdict.findings}
    assert {(code, stage) for room, code, stage in found if room == 7000} == {("unclassified", "destination")}
    assert {stage for room, _, stage in found if room == 7001} == {"descriptor"}


def test_m6_two_runs_of_one_request_may_give_other_logits(tmp_path: Path) -> None:
    """Logits of the two reads differ in their last bits, each within its bound; neither is held against the other."""
    scene = Scene(tmp_path)
    for room in (7000, 7001):
        ours = scene.healthy(Job(room, 0, 100, [21, 22], [5, 6]))

        def nudge(read: dict[str, Any], room: int = room) -> None:
            read["logits"] *= np.float32(1 + (room - 7000) * 2e-7)

        scene.read(ours, logits=True, change=nudge)
        scene.finish(ours)
    verdict = verdict_of(scene)
    expect_clean(verdict)
    assert "read-kernel" in verdict.cleared


@KEEPS
def test_m9_a_metadata_slot_that_was_given_back_keeps_its_old_id(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    d = scene.decode
    for room in (7000, 7001):
        ours = Job(room, room - 7000, 64, [21], [5])
        d.emit("metadata", moment="given", room=room, slot=3, holds=room - 1)
        scene.healthy(ours, reads=0)
        d.emit("metadata", moment="read", room=room, slot=3, holds=room)
        scene.read(ours)
        d.emit("metadata", moment="freed", room=room, slot=3, holds=room)
        scene.finish(ours)
    expect_clean(verdict_of(scene))


@KEEPS
def test_m10_a_reused_prefix_may_hold_other_bytes_than_a_computation_anew(tmp_path: Path, keep: Any) -> None:
    """Two requests have the same prompt; the second was computed anew, in another batch, and its rows differ.

    Each request's pages are compared with its own store alone: another reply to the same prompt proves nothing.
    """
    scene = Scene(tmp_path, keep=keep)
    scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    again = Job(7001, 0, 128, [23, 24], [7, 8])
    scene.start(again)
    scene.announce(again)
    scene.store(again, 0, 128)
    p = scene.prefill
    p.memory[0][23:25, ::97] ^= 1
    p.snapshot("ST", "", again, [0, 1], [23, 24], rows=128)
    scene.send(again)
    scene.arrive(again)
    scene.look("LT", again)
    scene.read(again)
    expect_clean(verdict_of(scene))
