"""S3: a chunk is sent while the store of its last page is still running."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.scenarios import pattern
from tests.scenarios.outcome import expect, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene

#: How the store of the late rows appears in the trace: launched on a stream before the post, or as an
#: interval that begins before the post and is over after the transfer.
Shape = Literal["launch", "interval"]


def too_early(
    scene: Scene,
    *,
    shape: Shape = "interval",
    written: int = 0,
    completes: str = "after",
    scales_late: bool = False,
) -> Scene:
    """Chunk 0 is pages 0 and 1; at its post only rows 0-39 of page 1 are written. Chunk 1 is right.

    ``scales_late``: of the other rows of page 1 the values are written by then, and the scales not.

    ``completes``: the forward finishes "after" the transfer is done, or "before" the sender sees it done (but
    after the bytes were taken), so that the second look at the source already shows it complete.
    """
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    p = scene.prefill
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    step = scene.step()
    begin = p.seq + 1
    slots = np.arange(128) + 21 * 64
    if shape == "launch":
        scene.tell_store(p, ours, 0, slots, step, stream=1)
    scene.write(p, ours, 0, 64 + 40)
    if scales_late:
        scales = {layer: memory[22, 8192:].copy() for layer, memory in p.memory.items()}
        scene.write(p, ours, 104, 128)
        for layer, memory in p.memory.items():
            memory[22, 8192:] = scales[layer]
    first = scene.post(ours, [0, 1], chunk=0, last=False, written=written, awaited=0, rows=128)
    scene.land(first)
    if completes == "after":
        scene.done(first)
    scene.write(p, ours, 104, 128)
    if shape == "interval":
        scene.tell_store(p, ours, 0, slots, step, stream=1, begin_seq=begin)
    scene.seen_stored(p, ours, 0, 128, step)
    if completes == "before":
        scene.done(first)
    scene.store(ours, 128, 192)
    scene.send(ours, [2], chunk=1, last=True)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    return scene


def half_written(scales: pattern.Scales = "standard", keep: str = "bytes") -> dict[str, Any]:
    """What is said of logical page 1, by the side whose physical page is named."""
    right = pattern.page(0, 0, 1, scales=scales)
    seen = pattern.page(9, 0, 1, scales=scales)
    seen[:5120] = right[:5120]
    seen[8192:8352] = right[8192:8352]
    return {
        role: page_finding(1, physical, seen, right, keep=keep)
        for role, physical in (("prefill", 22), ("decode", 6))
    }


def test_the_double_tear_is_row_40_in_both_areas_and_3127_bytes() -> None:
    page = half_written()["prefill"]
    assert page.value_rows == page.scale_rows == ((40, 63),)
    assert page.byte_ranges == ((5120, 8192), (8352, 8448))
    assert page.bytes_differing == 3_127


@pytest.mark.parametrize("completes", ["after", "before"])
@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_rows_that_were_not_written_at_the_post_are_sent_before_written(
    tmp_path: Path, scales: pattern.Scales, keep: Any, completes: str
) -> None:
    verdict = verdict_of(too_early(Scene(tmp_path, scales=scales, keep=keep), completes=completes))
    (finding,) = expect(verdict, "F10", "sent-before-written", "source", room=7000)
    expect(
        verdict,
        "F10",
        "sent-before-written",
        "source",
        room=7000,
        pages=[half_written(scales, keep)[finding.role]],
    )
    assert "source" not in verdict.cleared


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("shape", ["launch", "interval"])
def test_the_store_may_be_told_as_a_launch_or_as_an_interval(
    tmp_path: Path, shape: Shape, threads: bool
) -> None:
    verdict = verdict_of(too_early(Scene(tmp_path, threads=threads), shape=shape))
    expect(verdict, "F10", "sent-before-written", "source", room=7000)


def test_without_the_query_of_the_store_it_is_still_no_other_kind(tmp_path: Path) -> None:
    verdict = verdict_of(too_early(Scene(tmp_path), written=-1))
    expect(verdict, "F10", "sent-before-written", "source", room=7000, confidence=None)


def test_a_store_that_was_waited_for_sends_what_was_written(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ours = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    scene.earlier([21, 22, 23], [5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 128)
    scene.send(ours, [0, 1], chunk=0, last=False, rows=128)
    scene.store(ours, 128, 192)
    scene.send(ours, [2], chunk=1, last=True)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    verdict = verdict_of(scene)
    assert verdict.findings == ()
    assert verdict.verdict == "clean"


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_scales_that_the_store_had_not_come_to_are_sent_before_written(tmp_path: Path, keep: Any) -> None:
    scene = too_early(Scene(tmp_path, keep=keep), scales_late=True)
    (finding,) = expect(verdict_of(scene), "F10", "sent-before-written", "source", room=7000)
    assert [(page.value_rows, page.scale_rows) for page in finding.pages] == [((), ((40, 63),))]
    assert finding.confidence == "certain"


def test_scales_alone_are_no_early_send_where_nobody_asked_at_the_post(tmp_path: Path) -> None:
    scene = too_early(Scene(tmp_path), scales_late=True, written=-1)
    assert {f.code for f in verdict_of(scene).findings} == {"unclassified"}
