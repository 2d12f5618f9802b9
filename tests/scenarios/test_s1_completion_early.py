"""S1: the receiver is told that a request is complete while a part of one page is still on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios import pattern
from tests.scenarios.outcome import expect, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene


def torn(scene: Scene, *, completes: bool = True) -> Scene:
    """Page 6 has only its first 4,096 bytes when completion is told; the rest lands later or never."""
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, ours.rows)
    transfer = scene.post(ours)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    scene.arrive(ours)
    scene.read(ours)
    if completes:
        scene.land(transfer)
    scene.look("LT", ours)
    return scene


def torn_page(scales: pattern.Scales = "standard", keep: str = "bytes", layer: int = 0) -> Any:
    right = pattern.page(0, layer, 1, scales=scales)
    seen = right.copy()
    seen[4096:] = pattern.page(9, layer, 1, scales=scales)[4096:]
    return page_finding(1, 6, seen, right, keep=keep)


def test_the_tear_is_rows_32_on_and_all_scales_and_4255_bytes() -> None:
    page = torn_page()
    assert page.value_rows == ((32, 63),)
    assert page.scale_rows == ((0, 63),)
    assert page.byte_ranges == ((4096, 8448),)
    assert page.bytes_differing == 4_255


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_a_page_that_completes_later_is_completion_early(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = verdict_of(torn(Scene(tmp_path, scales=scales, keep=keep)))
    expect(
        verdict,
        "F09",
        "completion-early",
        "completion",
        room=7000,
        pages=[torn_page(scales, keep)],
        role="decode",
    )
    assert "completion" not in verdict.cleared


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_a_page_that_stays_torn_is_lost_on_the_wire_and_never_completion_early(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = verdict_of(torn(Scene(tmp_path, scales=scales, keep=keep), completes=False))
    assert verdict.verdict == "divergent"
    (finding,) = verdict.findings
    assert (finding.code, finding.stage) in {("F31", "wire"), ("unclassified", "wire")}
    wanted = torn_page(scales, keep)
    (page,) = finding.pages
    assert (page.logical, page.physical) == (1, 6)
    assert (page.value_rows, page.scale_rows) == (wanted.value_rows, wanted.scale_rows)
    assert page.byte_ranges == wanted.byte_ranges
    assert page.bytes_differing == wanted.bytes_differing


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_what_comes_while_the_read_runs_may_have_come_in_time(tmp_path: Path, keep: Any) -> None:
    scene = Scene(tmp_path, keep=keep)
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, ours.rows)
    transfer = scene.post(ours)
    scene.land(transfer, only=(0, 4096), pages=[6])
    scene.done(transfer)
    scene.arrive(ours)
    scene.read(ours, meanwhile=lambda: scene.land(transfer))
    (finding,) = verdict_of(scene).findings
    assert (finding.code, finding.confidence) == ("F09", "likely")
    assert "they came while a read (RD) ran: what it got is not known" in finding.evidence


def test_hand_overs_between_threads_order_as_well_as_one_thread(tmp_path: Path) -> None:
    verdict = verdict_of(torn(Scene(tmp_path, threads=True)))
    expect(verdict, "F09", "completion-early", "completion", room=7000, pages=[torn_page()])


def test_each_torn_layer_is_named_and_the_whole_ones_are_not(tmp_path: Path) -> None:
    scene = torn(Scene(tmp_path, layers=(3, 7, 11)))
    pages = {layer: torn_page(layer=layer) for layer in (3, 7, 11)}
    found = expect(verdict_of(scene), "F09", "completion-early", "completion", room=7000, layers=(3, 7, 11))
    for finding in found:
        (page,) = finding.pages
        assert page.bytes_differing == pages[finding.layer].bytes_differing


def test_the_evidence_says_that_the_bytes_arrived_later(tmp_path: Path) -> None:
    (finding,) = verdict_of(torn(Scene(tmp_path))).findings
    assert any("later" in line for line in finding.evidence)
