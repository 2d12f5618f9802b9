"""C1 to C4: differences that are right must come out clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scenarios import pattern
from tests.scenarios.outcome import expect_clean, verdict_of
from tests.scenarios.scene import Job, Scene

KEEPS = pytest.mark.parametrize("keep", ["bytes", "digests"])
SCALES = pytest.mark.parametrize("scales", pattern.SCALES)


def hundred_rows(scene: Scene) -> Job:
    """A 100-token request whose rows 36 to 63 of page 1 differ between the sides."""
    ours = Job(7000, 0, 100, [21, 22], [5, 6])
    scene.earlier([21, 22], [5, 6])
    scene.start(ours)
    scene.announce(ours)
    scene.store(ours, 0, 100)
    transfer = scene.post(ours)
    scene.land(transfer)
    for layer, memory in scene.decode.memory.items():
        other = pattern.page(5, layer, 7, scales=scene.scales)
        memory[6, 4608:8192] = other[4608:8192]
        memory[6, 8336:] = other[8336:]
    scene.done(transfer)
    scene.arrive(ours)
    scene.look("LT", ours)
    return ours


@KEEPS
@SCALES
def test_c1_rows_past_the_length_may_differ(tmp_path: Path, scales: pattern.Scales, keep: Any) -> None:
    scene = Scene(tmp_path, layers=(0, 1), scales=scales, keep=keep)
    scene.read(hundred_rows(scene))
    source, target = scene.prefill.memory[0][22], scene.decode.memory[0][6]
    differs = source != target
    assert not differs[:4608].any()
    assert not differs[8192:8336].any()
    assert differs[4608:8192].any()
    assert differs[8336:].any()
    expect_clean(verdict_of(scene))


@KEEPS
@SCALES
def test_c2_decode_may_append_to_the_last_page_after_arrival(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    ours = hundred_rows(scene)
    arrived = scene.decode.memory[0][[5, 6]].copy()
    for _ in range(5):
        scene.append(ours)
        scene.read(ours)
    differs = arrived != scene.decode.memory[0][[5, 6]]
    rows = differs[1, :8192].reshape(64, 128).any(1)
    assert not differs[0].any()
    assert np.flatnonzero(rows).tolist() == [36, 37, 38, 39, 40]
    expect_clean(verdict_of(scene))


@KEEPS
@SCALES
def test_c3_pages_may_have_other_ids_on_the_other_side(
    tmp_path: Path, scales: pattern.Scales, keep: Any
) -> None:
    scene = Scene(tmp_path, scales=scales, keep=keep)
    scene.healthy(Job(7000, 0, 256, [40, 3, 17, 8], [2, 9, 1, 30]))
    expect_clean(verdict_of(scene))


@KEEPS
@SCALES
@pytest.mark.parametrize("shared", ["nowhere", "prefill", "both"])
def test_c4_two_requests_may_share_a_prefix(
    tmp_path: Path, scales: pattern.Scales, keep: Any, shared: str
) -> None:
    """The first 128 tokens are the same: as copies, as the same physical pages on the prefill side, or on both."""
    scene = Scene(tmp_path, scales=scales, keep=keep)
    first = Job(7000, 0, 192, [21, 22, 23], [5, 6, 7])
    prefix = [21, 22] if shared != "nowhere" else [31, 32]
    landed = [5, 6] if shared == "both" else [8, 9]
    second = Job(7001, 1, 192, [*prefix, 24], [*landed, 10], prefix_q=0, prefix_rows=128)
    scene.healthy(first)
    p, d = scene.sides
    scene.begin(p, second)
    scene.begin(d, second)
    if shared == "nowhere":
        scene.give(p, second, second.prefill)
    else:
        scene.give(p, second, prefix, shared=True)
        scene.give(p, second, [24], logical=2)
    if shared == "both":
        scene.give(d, second, landed, shared=True)
        scene.give(d, second, [10], logical=2)
    else:
        scene.give(d, second, second.decode)
    skipped = 2 if shared == "both" else 0
    scene.announce(second, first=skipped)
    scene.store(second, 0 if shared == "nowhere" else 128, 192)
    scene.send(second, [0, 1, 2][skipped:])
    scene.arrive(second, first=skipped)
    scene.read(second)
    scene.read(first)
    same = scene.decode.memory[0][[5, 6]] == scene.decode.memory[0][landed]
    assert same.all()
    expect_clean(verdict_of(scene))
