"""S11: pages go to a host tier and come back, and the copy drops the end of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Verdict
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, expect_clean, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.side import Side

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)
PAGE = 8448
#: Logical pages 0 to 5 of q0, and where they lie once they are back.
FIRST = [1, 2, 3, 4, 5, 6]
BACK = [11, 12, 13, 14, 15, 16]


def through_the_host(
    side: Side, job: Job, other: Job, pages: tuple[list[int], list[int]], *, length: int = PAGE, row: int = 0
) -> None:
    """``job``'s pages are copied off, and back into pages of ``other``; ``row`` bytes of each row where given."""
    for layer in side.layers:
        memory = side.memory[layer]
        kept = memory[pages[0]].copy()
        unit: dict[str, Any] = {"unit": "page", "length": length, "source_stride": PAGE, "stride": length}
        source, host, target = pages[0], [30 + k for k in range(len(pages[0]))], pages[1]
        if row:
            unit = {"unit": "row", "length": row, "source_stride": 132, "stride": 132}
            source, host, target = (
                [p * 64 + r for p in ids for r in range(64)] for ids in (source, host, target)
            )
            memory[pages[1], :8192].reshape(len(target) // 64, 64, 128)[:, :, : min(row, 128)] = 0
            old = memory[pages[1]].copy()
            values = old[:, :8192].reshape(-1, 64, 128)
            values[:, :, :row] = kept[:, :8192].reshape(-1, 64, 128)[:, :, :row]
            memory[pages[1], :8192] = values.reshape(-1, 8192)
            if row > 128:
                memory[pages[1], 8192:] = kept[:, 8192:]
        else:
            memory[pages[1], :length] = kept[:, :length]
        side.emit(
            "copy", operation="offload", room=job.room, source_buffer=side.buffer(layer), buffer=-1,
            source_ids=source, ids=host, **unit,
        )  # fmt: skip
        if not row:
            unit |= {"source_stride": length, "stride": PAGE}
        side.emit(
            "copy", operation="load-back", room=other.room, source_buffer=-1, buffer=side.buffer(layer),
            source_ids=host, ids=target, **unit,
        )  # fmt: skip


def prefix_hit(scene: Scene, *, length: int = PAGE, row: int = 0) -> Verdict:
    """q0's six pages come back on the prefill side for room 7001, whose prompt begins with them."""
    p = scene.prefill
    scene.earlier(BACK, [20, 21, 22, 23, 24, 25], room=9009)
    first = scene.healthy(Job(7000, 0, 384, FIRST, [1, 2, 3, 4, 5, 6]))
    ours = Job(7001, 1, 448, [*BACK, 17], [7, 8, 9, 10, 11, 12, 13], prefix_q=0, prefix_rows=384)
    scene.start(ours)
    scene.announce(ours)
    through_the_host(p, first, ours, (FIRST, BACK), length=length, row=row)
    p.snapshot("ST", "copied", ours, range(6), BACK, rows=384)
    scene.store(ours, 384, 448)
    scene.send(ours)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    return verdict_of(scene)


def resumed(scene: Scene, *, length: int = PAGE) -> Verdict:
    """Decode gives up the pages of a request that it holds, and loads them back into others."""
    d = scene.decode
    scene.earlier([40, 41, 42, 43, 44, 45], BACK)
    ours = scene.healthy(Job(7000, 0, 384, FIRST, [1, 2, 3, 4, 5, 6]))
    through_the_host(d, ours, ours, (ours.decode, BACK), length=length)
    d.emit("free", room=7000, pages=ours.decode, reason="retract")
    scene.give(d, ours, BACK)
    ours.decode[:] = BACK
    d.snapshot("LT", "copied", ours, range(6), BACK, rows=384)
    scene.read(ours)
    return verdict_of(scene)


def cut_pages(scales: pattern.Scales, keep: str) -> list[Any]:
    found = []
    for k in range(6):
        right = pattern.page(0, 0, k, scales=scales)
        seen = right.copy()
        seen[8192:] = pattern.page(9, 0, k, scales=scales)[8192:]
        found.append(page_finding(k, BACK[k], seen, right, keep=keep))
    return found


def test_the_last_256_bytes_are_all_scales_and_188_bytes_differ() -> None:
    page = cut_pages("standard", "bytes")[5]
    assert page.value_rows == ()
    assert page.scale_rows == ((0, 63),)
    assert page.byte_ranges == ((8192, 8448),)
    assert page.bytes_differing == 188


@KEEPS
@SCALES
def test_a_host_page_without_the_scales_is_a_truncated_copy(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = prefix_hit(Scene(tmp_path, scales=scales, keep=keep), length=8192)
    (finding,) = expect(
        verdict, "F08", "truncated-copy", "descriptor", room=7001, role="prefill",
        pages=cut_pages(scales, keep),
    )  # fmt: skip
    assert "8192 bytes a page" in " ".join(finding.evidence)
    assert finding.runner_up is not None
    assert finding.runner_up.code == "F03"


@KEEPS
@SCALES
def test_a_resumed_request_lacks_what_the_copy_dropped(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    verdict = resumed(Scene(tmp_path, scales=scales, keep=keep), length=8192)
    expect(
        verdict, "F08", "truncated-copy", "descriptor", room=7000, role="decode",
        pages=cut_pages(scales, keep),
    )  # fmt: skip


@KEEPS
def test_a_copy_that_drops_the_end_of_every_row(tmp_path: Path, keep: Any) -> None:
    """112 of 132 bytes of each row: the last 16 values and the scale."""
    verdict = prefix_hit(Scene(tmp_path, keep=keep), row=112)
    (finding,) = expect(verdict, "F08", "truncated-copy", "descriptor", room=7001, role="prefill")
    assert all(page.value_rows == page.scale_rows == ((0, 63),) for page in finding.pages)
    assert "every row" in " ".join(finding.evidence)


@KEEPS
@pytest.mark.parametrize("story", [prefix_hit, resumed])
def test_pages_that_come_back_whole_are_clean(tmp_path: Path, keep: Any, story: Any) -> None:
    expect_clean(story(Scene(tmp_path, keep=keep)))


@KEEPS
def test_a_copy_that_was_whole_is_not_to_blame(tmp_path: Path, keep: Any) -> None:
    """The scales of the loaded pages are old, the copies carried everything: somebody else did it."""
    scene = Scene(tmp_path, keep=keep)
    p = scene.prefill
    scene.earlier(BACK, [20, 21, 22, 23, 24, 25], room=9009)
    first = scene.healthy(Job(7000, 0, 384, FIRST, [1, 2, 3, 4, 5, 6]))
    ours = Job(7001, 1, 384, BACK, [7, 8, 9, 10, 11, 12], prefix_q=0, prefix_rows=384)
    scene.start(ours)
    scene.announce(ours)
    old = p.memory[0][BACK].copy()
    through_the_host(p, first, ours, (FIRST, BACK))
    p.memory[0][BACK, 8192:] = old[:, 8192:]
    p.snapshot("ST", "copied", ours, range(6), BACK, rows=384)
    scene.send(ours)
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    for finding in verdict_of(scene).findings:
        assert (finding.code, finding.stage) == ("unclassified", "source")
    assert np.array_equal(p.memory[0][BACK, :8192], p.memory[0][FIRST, :8192])
