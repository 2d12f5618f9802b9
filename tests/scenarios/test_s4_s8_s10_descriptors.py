"""S4, S8 and S10: what the descriptors leave out, or bring to the wrong place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.verdict import Donor
from tests.scenarios import pattern
from tests.scenarios.outcome import expect, page_finding, verdict_of
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended, ours

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)


def never_used(layer: int, k: int, scales: pattern.Scales, keep: str) -> Any:
    right = pattern.page(0, layer, k, scales=scales)
    return page_finding(k, 5 + k, np.zeros_like(right), right, keep=keep)


def test_s4_72_zero_bytes_agree_by_chance_in_the_first_page() -> None:
    assert never_used(7, 0, "standard", "bytes").bytes_differing == 8_376


@KEEPS
@SCALES
def test_s4_a_draft_layer_that_is_not_in_the_list_is_a_missing_buffer(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    """Eight layers; the send list has 0 to 6, and layer 7's destination pages were never used."""
    scene, job = Scene(tmp_path, layers=range(8), scales=scales, keep=keep), ours()
    begun(scene, job, used=False)
    scene.send(job, pairs=[(layer, layer) for layer in range(7)])
    ended(scene, job)
    wanted = [never_used(7, k, scales, keep) for k in range(3)]
    (finding,) = expect(
        verdict_of(scene), "F01", "buffer-missing", "descriptor", room=7000, layers=(7,), pages=wanted
    )
    assert any("no descriptor" in line for line in finding.evidence)


@KEEPS
@SCALES
def test_s8_the_second_stage_pairs_its_layers_by_position(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    """Layers 0 to 3 are sent rightly; then layers 4 to 7 are sent into 0 to 3, and 4 to 7 keep their old bytes."""
    scene, job = Scene(tmp_path, layers=range(8), scales=scales, keep=keep), ours()
    begun(scene, job)
    scene.send(job, pairs=[(layer, layer) for layer in range(4)], chunk=0, last=False)
    scene.send(job, pairs=[(layer + 4, layer) for layer in range(4)], chunk=0)
    ended(scene, job)
    verdict = verdict_of(scene)
    found = expect(verdict, "F05", "wrong-layer-pairing", "descriptor", room=7000, layers=range(8))
    for finding in found:
        layer = finding.layer
        assert finding.rule == "layer L holds the sender's layer L+4"
        for page, k in zip(finding.pages, range(3), strict=True):
            right = pattern.page(0, layer, k, scales=scales)
            seen = pattern.page(0 if layer < 4 else 9, layer + 4 if layer < 4 else layer, k, scales=scales)
            wanted = page_finding(k, 5 + k, seen, right, keep=keep)
            assert (page.logical, page.value_rows, page.bytes_differing) == (
                k,
                wanted.value_rows,
                wanted.bytes_differing,
            )
            assert page.donor == (Donor(7000, layer + 4, k) if layer < 4 else None)
            if keep == "bytes" and scales == "standard":
                assert page.bytes_differing is not None
                assert page.bytes_differing > 8_170


@KEEPS
@SCALES
def test_s10_a_list_of_one_page_where_three_are_registered(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    """129 tokens are three pages; one is sent, and of the third only row 0 is valid."""
    scene, job = Scene(tmp_path, scales=scales, keep=keep), ours(129)
    begun(scene, job)
    scene.send(job, [0])
    ended(scene, job)
    wanted = [
        page_finding(
            k,
            5 + k,
            pattern.page(9, 0, k, scales=scales),
            pattern.page(0, 0, k, scales=scales),
            rows=129 - 64 * k,
            keep=keep,
        )
        for k in (1, 2)
    ]
    assert wanted[1].value_rows == ((0, 0),)
    if keep == "bytes" and scales == "standard":
        last = pattern.page(9, 0, 2)[:128] != pattern.page(0, 0, 2)[:128]
        assert int(last.sum()) == 125
        assert wanted[1].bytes_differing == 125 + 2
    (finding,) = expect(verdict_of(scene), "F02", "list-too-short", "descriptor", room=7000, pages=wanted)
    assert any(
        "the first page and none" in line or "none from logical page 1" in line for line in finding.evidence
    )


@KEEPS
@pytest.mark.parametrize("last_too", [False, True])
def test_s10_each_chunks_list_lacks_its_last_page(tmp_path: Path, last_too: bool, keep: Any) -> None:
    """Two chunks of three pages; the first one's list lacks its last page, the second one's perhaps as well."""
    scene, job = Scene(tmp_path, keep=keep), chunked()
    begun(scene, job)
    scene.send(job, [0, 1], chunk=0, last=False)
    scene.send(job, [3, 4] if last_too else [3, 4, 5], chunk=1)
    ended(scene, job)
    verdict = verdict_of(scene)
    assert {(f.code, f.stage, f.confidence) for f in verdict.findings} == {("F02", "descriptor", "certain")}
    assert {page.logical for f in verdict.findings for page in f.pages} == ({2, 5} if last_too else {2})
    wanted = "logical pages 2, 5" if last_too else "logical page 2"
    assert all(any(line.endswith(wanted) for line in f.evidence) for f in verdict.findings)


@KEEPS
@pytest.mark.parametrize("chunks", [[[0, 1, 3], [4, 5]], [[0, 2], [3, 5]]])
def test_s10_a_page_left_out_elsewhere_is_no_short_list(
    tmp_path: Path, chunks: list[list[int]], keep: Any
) -> None:
    """Pages from the middle of a chunk."""
    scene, job = Scene(tmp_path, keep=keep), chunked()
    begun(scene, job)
    for number, logical in enumerate(chunks):
        scene.send(job, logical, chunk=number, last=number == 1)
    ended(scene, job)
    verdict = verdict_of(scene)
    assert {(f.code, f.stage) for f in verdict.findings} == {("unclassified", "descriptor")}


def chunked() -> Job:
    return Job(7000, 0, 384, [21, 22, 23, 24, 25, 26], [5, 6, 7, 8, 9, 10])


@KEEPS
def test_s10_a_chunk_that_was_never_sent_is_no_short_list(tmp_path: Path, keep: Any) -> None:
    """Of three chunks the second one is missing: the first one's list is as long as it should be."""
    scene, job = Scene(tmp_path, keep=keep), chunked()
    begun(scene, job)
    scene.send(job, [0, 1], chunk=0, last=False)
    scene.send(job, [4, 5], chunk=2)
    ended(scene, job)
    verdict = verdict_of(scene)
    assert {(f.code, f.stage) for f in verdict.findings} == {("unclassified", "descriptor")}
