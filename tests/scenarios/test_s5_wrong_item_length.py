"""S5: the two sides compute with different item lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.layouts import layout
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene


def other_format(scene: Scene) -> Scene:
    """The sender keeps fp4 pages of 4,352 bytes and computes both addresses with that; the receiver keeps fp8."""
    ours = Job(7000, 0, 256, [0, 1, 2, 3], [0, 1, 2, 3])
    # The old content is known from the snapshots before the transfer only: the recording began after q9 was gone.
    scene.decode.memory[0][:4] = pattern.pages(9, 0, range(4), scales=scene.scales)
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, ours.rows)
    scene.send(ours, lengths=(4352, 4352), strides=(4352, 4352))
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    return scene


def other_length(scene: Scene, length: int, stride: int) -> Scene:
    """Both sides keep the same format; the sender's item length and stride are somebody else's."""
    ours = Job(7000, 0, 256, [4, 5, 6, 7], [4, 5, 6, 7])
    scene.earlier([4, 5, 6, 7], [4, 5, 6, 7])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, ours.rows)
    scene.send(ours, lengths=(length, length), strides=(stride, stride))
    scene.arrive(ours)
    scene.look("LT", ours)
    scene.read(ours)
    return scene


def test_the_bytes_land_as_the_scenario_says(tmp_path: Path) -> None:
    scene = Scene(tmp_path, format="fp4", decode_format="fp8", pages=12)
    other_format(scene)
    source = [pattern.page(0, 0, k, format="fp4") for k in range(4)]
    old = [pattern.page(9, 0, k) for k in range(4)]
    page = scene.decode.memory[0]
    assert np.array_equal(page[0], np.concatenate([source[0], source[1][:4096]]))
    assert np.array_equal(page[1], np.concatenate([source[1][4096:], source[2], source[3][:3840]]))
    assert np.array_equal(page[2], np.concatenate([source[3][3840:], old[2][512:]]))
    assert np.array_equal(page[3], old[3])
    scene.close()


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_an_fp4_sender_and_an_fp8_receiver_have_different_item_lengths(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, format="fp4", decode_format="fp8", pages=12, scales=scales, keep=keep)
    verdict = verdict_of(other_format(scene))
    (finding,) = expect(verdict, "F03", "wrong-item-length", "descriptor", room=7000)
    assert [(page.logical, page.physical) for page in finding.pages] == [(k, k) for k in range(4)]
    said = " ".join(finding.evidence)
    for fact in ("4352", "8448", "fp4", "fp8"):
        assert fact in said.replace(",", "").lower()
    assert "descriptor" not in verdict.cleared


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_the_first_half_of_an_fp8_page_is_no_fp4_page(tmp_path: Path, keep: Any) -> None:
    """Every byte of the receiver's page is brought, from its place in a page of another format."""
    scene = Scene(tmp_path, format="fp8", decode_format="fp4", pages=12, keep=keep)
    ours = Job(7000, 0, 128, [4, 5], [4, 5])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, ours.rows)
    scene.send(ours, lengths=(4352, 4352), strides=(8448, 4352))
    scene.arrive(ours)
    scene.read(ours)
    (finding,) = expect(verdict_of(scene), "F03", "wrong-item-length", "descriptor", room=7000)
    assert [page.logical for page in finding.pages] == [0, 1]


def test_the_displacement_of_the_pages_is_quoted_where_bytes_were_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, format="fp4", decode_format="fp8", pages=12)
    (finding,) = verdict_of(other_format(scene)).findings
    assert "4096" in " ".join(finding.evidence).replace(",", "")


@pytest.mark.parametrize("keep", ["bytes", "digests"])
def test_an_fp8_length_hard_coded_for_bf16_pages(tmp_path: Path, keep: Any) -> None:
    # 8,448 bytes a page of 16,384: what lands is [4 * 8448, 8 * 8448) of the buffer, in place. That is bytes
    # 1,024 and on of page 2 (not ours) up to byte 2,048 of page 4: its rows 0 to 7, and nothing of 5 to 7.
    verdict = verdict_of(other_length(Scene(tmp_path, format="bf16", keep=keep), 8448, 8448))
    wanted = []
    for k in range(4):
        right = pattern.page(0, 0, k, format="bf16")
        seen = pattern.page(9, 0, k, format="bf16")
        if k == 0:
            seen[:2048] = right[:2048]
        wanted.append(page_finding(k, 4 + k, seen, right, keep=keep, spec=layout("bf16")))
    assert wanted[0].value_rows == ((8, 63),)
    expect(verdict, "F03", "wrong-item-length", "descriptor", room=7000, pages=wanted)


@pytest.mark.parametrize("sliced", [True, False])
def test_slices_of_another_requests_page_are_no_wrong_length(tmp_path: Path, sliced: bool) -> None:
    """A request that is over had this page, and its transfer lands late; who was given which page is not recorded.

    ``sliced``: each half of the page has a descriptor. Else only the first half has one: the item length is short.
    """
    scene = Scene(tmp_path, drop=["alloc"])
    other, ours = Job(7001, 1, 64, [30], [5]), Job(7000, 0, 64, [31], [5])
    for job in (other, ours):
        scene.start(job)
        scene.announce(job)
        scene.store(job, 0, 64)
    halves = [(0, 4224, 0), (4224, 8448, 4224)]
    late = (
        scene.post(other, parts=halves)
        if sliced
        else scene.post(other, lengths=(4224, 4224), strides=(8448, 8448))
    )
    scene.send(ours)
    scene.arrive(ours)
    scene.land(late)
    scene.read(ours)
    found = {finding.code for finding in verdict_of(scene).findings if finding.request.room == 7000}
    assert ("F03" in found) == (not sliced)


@pytest.mark.parametrize("keep", ["bytes", "digests"])
@pytest.mark.parametrize("scales", pattern.SCALES)
def test_a_length_without_the_scales_leaves_the_tail_of_every_page_old(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    wanted = []
    for k in range(4):
        right = pattern.page(0, 0, k, scales=scales)
        seen = right.copy()
        seen[8192:] = pattern.page(9, 0, k, scales=scales)[8192:]
        wanted.append(page_finding(k, 4 + k, seen, right, keep=keep))
    assert wanted[0].byte_ranges == ((8192, 8448),)
    verdict = verdict_of(other_length(scene, 8192, 8448))
    expect(verdict, "F03", "wrong-item-length", "descriptor", room=7000, pages=wanted)
