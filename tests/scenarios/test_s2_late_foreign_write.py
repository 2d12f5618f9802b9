"""S2: a write of an aborted request lands in pages that another request owns by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from replay.verdict import Donor
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Transfer
from tests.scenarios.stories import begun, ended, reused

Later = Literal["none", "before", "after"]


def overtaken(scene: Scene, *, later: Later = "none", told: bool = False, lands: bool = True) -> Scene:
    """A (room 7000) is aborted and its pages 14 and 15 go to B (room 7001) while A's write is in flight.

    ``later`` says when B's LT snapshot is taken: never, before A's write lands, or after. ``told``: decode tells
    prefill of the abort, and the acknowledgement comes after the harm is done. The clock runs in milliseconds of
    the scenario: A's write is [100, 106], A is freed at 102, B allocated at 103 and complete at 104, read at 107.
    """
    a = Job(7000, 0, 256, [20, 21, 22, 23], [14, 15, 16, 17])
    b = Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15])
    p, d = scene.sides
    scene.earlier([20, 21, 22, 23, 24, 25], [12, 13, 14, 15, 16, 17])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    scene.start(b, decode=False)
    scene.store(b, 0, b.rows)
    scene.at(100)
    late = scene.post(a)
    scene.at(102)
    scene.free(d, a, "abort")
    if told:
        d.emit("order", what="abort", key=a.key, end="tail")
    scene.at(103)
    scene.start(b, prefill=False)
    scene.announce(b)
    transfer = scene.post(b)
    scene.at(104)
    scene.land(transfer)
    scene.done(transfer)
    scene.arrive(b)
    if later == "before":
        scene.look("LT", b)
    scene.at(106)
    if lands:
        scene.land(late)
        scene.done(late)
    else:
        p.emit("transfer_state", state="error", transfer=late.transfer, room=a.room, agent=p.agent)
    if told:
        p.emit("order", what="abort", key=a.key, end="head")
        scene.free(p, a, "abort")
        scene.edge(p, d, "ack", a.key)
        d.emit("transfer_state", state="acknowledged", room=a.room, agent=d.agent)
    scene.at(107)
    scene.read(b)
    if later == "after":
        scene.look("LT", b)
    return scene


def foreign_pages(scales: pattern.Scales = "standard", keep: str = "bytes", layer: int = 0) -> Any:
    """B's logical pages 2 and 3 hold A's 0 and 1."""
    return [
        page_finding(
            2 + k,
            14 + k,
            pattern.page(0, layer, k, scales=scales),
            pattern.page(1, layer, 2 + k, scales=scales),
            keep=keep,
            donor=Donor(room=7000, layer=layer, logical=k),
        )
        for k in (0, 1)
    ]


def test_both_pages_differ_wholly_in_8194_bytes() -> None:
    for page in foreign_pages():
        assert page.value_rows == page.scale_rows == ((0, 63),)
        assert page.byte_ranges == ((0, 8448),)
        assert page.bytes_differing == 8_194


@pytest.mark.parametrize("later", ["none", "before", "after"])
@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_pages_of_an_aborted_write_are_a_late_foreign_write(
    tmp_path: Path, scales: pattern.Scales, keep: Any, later: Later
) -> None:
    verdict = verdict_of(overtaken(Scene(tmp_path, scales=scales, keep=keep), later=later))
    (finding,) = expect(
        verdict,
        "F14",
        "late-foreign-write",
        "destination",
        room=7001,
        pages=foreign_pages(scales, keep),
        role="decode",
    )
    assert any("7000" in line for line in finding.evidence), "the other request is quoted"
    assert any("overlap" in line for line in finding.evidence), "and that its write overlaps this ownership"


@pytest.mark.parametrize("threads", [False, True])
def test_an_acknowledgement_that_comes_too_late_changes_nothing(tmp_path: Path, threads: bool) -> None:
    verdict = verdict_of(overtaken(Scene(tmp_path, threads=threads), told=True))
    expect(verdict, "F14", "late-foreign-write", "destination", room=7001, pages=foreign_pages())


def test_every_layer_of_the_late_write_is_named(tmp_path: Path) -> None:
    verdict = verdict_of(overtaken(Scene(tmp_path, layers=(2, 6))))
    found = expect(verdict, "F14", "late-foreign-write", "destination", room=7001, layers=(2, 6))
    for finding in found:
        assert [page.donor for page in finding.pages] == [
            Donor(room=7000, layer=finding.layer, logical=k) for k in (0, 1)
        ]


def test_a_late_write_that_fails_before_it_lands_changed_nothing(tmp_path: Path) -> None:
    expect_clean(verdict_of(overtaken(Scene(tmp_path), lands=False)))


def test_the_abort_without_reuse_is_clean(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    a = Job(7000, 0, 256, [20, 21, 22, 23], [14, 15, 16, 17])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    scene.land(late)
    scene.done(late)
    scene.free(scene.prefill, a, "abort")
    scene.healthy(Job(7001, 1, 256, [24, 25, 26, 27], [10, 11, 12, 13]))
    expect_clean(verdict_of(scene))


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_a_late_write_before_the_look_at_completion_is_no_other_kind(tmp_path: Path, keep: Any) -> None:
    """A's write lands after B's own and before RC(B), so that RC is foreign already: nothing shows B's bytes arriving.

    It may stay unclassified. It is not lost on the wire, no early completion and no wrong page id.
    """
    scene = Scene(tmp_path, keep=keep)
    a = Job(7000, 0, 128, [20, 21], [14, 15])
    b = Job(7001, 1, 192, [24, 25, 26], [13, 14, 15])
    scene.earlier([20, 21, 24], [13, 14, 15])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    scene.start(b)
    scene.announce(b)
    scene.store(b, 0, b.rows)
    transfer = scene.post(b)
    scene.land(transfer)
    scene.land(late)
    scene.done(transfer)
    scene.arrive(b)
    scene.done(late)
    scene.look("LT", b)
    scene.read(b)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert finding.code in ("F14", "unclassified")
    assert finding.request.room == 7001
    assert [page.logical for page in finding.pages] == [1, 2]


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_the_late_write_may_be_of_an_earlier_attempt_of_the_same_room(tmp_path: Path, keep: Any) -> None:
    """The retry has other pages, but two of them in another place: its own bytes land one page off."""
    scene = Scene(tmp_path, keep=keep)
    first = Job(7000, 0, 192, [20, 21, 22], [14, 15, 16])
    again = Job(7000, 0, 192, [24, 25, 26], [13, 14, 15], attempt=1)
    late = reused(scene, first, again)
    scene.land(late)
    scene.done(late)
    scene.read(again)
    scene.look("LT", again)
    verdict = verdict_of(scene)
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert (finding.code, finding.stage, finding.confidence) == ("F14", "destination", "certain")
    assert (finding.request.room, finding.request.attempt) == (7000, 1)
    assert [(page.logical, page.donor) for page in finding.pages] == [
        (1, Donor(room=7000, layer=0, logical=0)),
        (2, Donor(room=7000, layer=0, logical=1)),
    ]


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_the_donor_is_the_one_whose_write_was_in_flight_and_not_its_twin(tmp_path: Path, keep: Any) -> None:
    """Two other requests hold the very bytes that landed; their transfers were over long before."""
    scene = Scene(tmp_path, keep=keep)
    scene.healthy(Job(6998, 0, 256, [30, 31, 32, 33], [2, 3, 4, 5]))
    overtaken(scene)
    scene.healthy(Job(7999, 0, 256, [34, 35, 36, 37], [6, 7, 8, 9]))
    verdict = verdict_of(scene)
    expect(verdict, "F14", "late-foreign-write", "destination", room=7001, pages=foreign_pages(keep=keep))


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_a_row_that_was_appended_is_gone_with_the_page_that_was_hit(tmp_path: Path, keep: Any) -> None:
    """Behind both prompts the pages are empty: the appended row looks again as it did at reception."""
    scene = Scene(tmp_path, keep=keep)
    a, b = Job(7000, 0, 50, [20], [14]), Job(7001, 1, 50, [24], [14])
    late = reused(scene, a, b)
    scene.look("LT", b)
    scene.append(b)
    right = scene.decode.memory[0][14].copy()
    scene.land(late)
    scene.done(late)
    scene.read(b)
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.confidence, finding.request.room) == ("F14", "certain", 7001)
    (page,) = finding.pages
    assert page.value_rows == ((0, 50),)
    if keep == "bytes":
        assert page.bytes_differing == int((right != scene.decode.memory[0][14]).sum())


def test_an_appended_row_alone_that_is_empty_again_is_no_late_write(tmp_path: Path) -> None:
    """The other's page is empty there too, and nothing else shows that it was written here."""
    scene = Scene(tmp_path)
    a, b = Job(7000, 0, 50, [20], [14]), Job(7001, 1, 50, [24], [14])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    scene.start(b)
    scene.announce(b)
    scene.store(b, 0, b.rows)
    scene.send(b)
    scene.arrive(b)
    before = scene.decode.memory[0][14].copy()
    scene.append(b)
    scene.decode.memory[0][14] = before
    scene.done(late)
    scene.read(b)
    assert "F14" not in {finding.code for finding in verdict_of(scene).findings}


@pytest.mark.parametrize("over", [True, False])
def test_a_write_that_was_over_when_the_page_was_seen_right_did_not_come_later(
    tmp_path: Path, over: bool
) -> None:
    """A's write ends after B got the page, before B's own; its rows stand there later, by nobody that was seen."""
    scene = Scene(tmp_path)
    a, b = Job(7000, 0, 128, [20, 21], [14, 15]), Job(7001, 1, 128, [24, 25], [14, 15])
    scene.earlier([20, 21, 24, 25], [14, 15, 16, 17])
    scene.start(a)
    scene.announce(a)
    scene.store(a, 0, a.rows)
    late = scene.post(a)
    scene.free(scene.decode, a, "abort")
    scene.start(b)
    scene.announce(b)
    scene.store(b, 0, b.rows)
    if over:
        scene.land(late)
        scene.done(late)
    scene.send(b)
    scene.arrive(b)
    scene.land(late)
    if not over:
        scene.done(late)
    scene.read(b)
    (finding,) = verdict_of(scene).findings
    wanted = ("unclassified", "likely") if over else ("F14", "certain")
    assert (finding.code, finding.confidence) == wanted


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_rows_that_the_late_write_did_not_bring_are_not_laid_at_its_door(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    overtaken(scene)
    scene.decode.memory[0][14, 1024:2048] ^= 1
    scene.look("LT", Job(7001, 1, 256, [24, 25, 26, 27], [12, 13, 14, 15]))
    rows = {f.code: [page.value_rows for page in f.pages] for f in verdict_of(scene).findings}
    assert rows == {"F14": [((0, 7), (16, 63)), ((0, 63),)], "unclassified": [((8, 15),)]}


@pytest.mark.parametrize(("side", "what"), [("decode", "alloc"), ("prefill", "send")])
def test_a_late_write_is_likely_where_another_owner_or_writer_may_be_missing(
    tmp_path: Path, side: str, what: str
) -> None:
    scene = overtaken(Scene(tmp_path))
    lost = scene.decode if side == "decode" else scene.prefill
    lost.emit("loss", stage="queue", what=what, count=1, first_seq=lost.seq + 1, last_seq=lost.seq + 1)
    expect(verdict_of(scene), "F14", "late-foreign-write", "destination", room=7001, confidence="likely")


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("lands", [True, False])
def test_a_transfer_that_the_library_raised_for_is_not_over(tmp_path: Path, lands: bool, keep: Any) -> None:
    """It may still write: what it brings later is its own doing, and where it brings nothing nobody is accused."""
    scene = Scene(tmp_path, keep=keep)
    a = Job(7000, 0, 192, [20, 21, 22], [14, 15, 16])
    b = Job(7001, 1, 192, [24, 25, 26], [14, 15, 12])
    late = reused(scene, a, b)
    raised(scene, late)
    if lands:
        scene.land(late)
    scene.look("LT", b)
    scene.read(b)
    verdict = verdict_of(scene)
    found = {
        (f.code, f.confidence, f.request.room, tuple(p.physical for p in f.pages)) for f in verdict.findings
    }
    assert found == ({("F14", "certain", 7001, (14, 15))} if lands else set())
    assert (verdict.verdict == "clean") is not lands


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_a_transfer_that_the_library_raised_for_did_not_fail_for_certain(tmp_path: Path, keep: Any) -> None:
    """Nothing came though reception was told complete: it is not known whether the transfer failed or is late."""
    scene = Scene(tmp_path, keep=keep)
    job = begun(scene)
    raised(scene, scene.post(job))
    ended(scene, job)
    verdict = verdict_of(scene)
    assert {(f.code, f.stage, f.confidence) for f in verdict.findings} == {("unclassified", "wire", "likely")}


def raised(scene: Scene, transfer: Transfer) -> None:
    """NIXL raised for a transfer that was posted."""
    scene.prefill.emit(
        "transfer_state",
        state="posted",
        transfer=transfer.transfer,
        room=transfer.job.room,
        agent=scene.prefill.agent,
        detail="nixlNotFoundError in check_xfer_state: it may still be on its way",
    )
