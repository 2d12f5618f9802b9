from __future__ import annotations

from pathlib import Path

import numpy as np

from replay.descriptors import DescriptorMap, covered
from replay.page_columns import rows_in
from replay.timeline import Timeline
from replay.trace.reader import open_trace
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job


def test_a_send_whose_sides_cannot_be_paired_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(7000, 0, 128, [21, 22], [5, 6]))
    scene.prefill.emit(
        "send",
        transfer=99,
        room=7000,
        agent=scene.prefill.agent,
        peer=scene.decode.agent,
        source=np.array(
            [[scene.prefill.address(0), 8448], [scene.prefill.address(0) + 8448, 8448]], np.uint64
        ),
        destination=np.array([[scene.decode.address(0), 8448]], np.uint64),
    )
    scene.healthy(Job(7001, 1, 64, [23], [7]))
    scene.close()
    with open_trace(*scene.paths) as trace:
        pieces = DescriptorMap(Timeline(trace)).pieces
        transfers = trace.table("send")["transfer"][pieces.send]
        assert sorted(zip(transfers.tolist(), pieces.page.tolist(), strict=True)) == [(1, 5), (1, 6), (2, 7)]


def test_rows_are_found_among_rows() -> None:
    rng = np.random.default_rng(4)
    have, want = rng.integers(-1, 3, (200, 4)), rng.integers(-1, 3, (300, 4))
    known = set(map(tuple, have.tolist()))
    assert rows_in(want, have).tolist() == [tuple(row) in known for row in want.tolist()]
    assert rows_in(want, have[:0]).tolist() == [False] * 300


def test_ranges_that_cover_a_page_together_leave_no_gap() -> None:
    rng = np.random.default_rng(5)
    size = rng.integers(1, 12, 300)
    group = rng.integers(0, len(size), 1200)
    start = rng.integers(0, 6, 1200)
    stop = np.minimum(start + rng.integers(1, 6, 1200), size[group])  # as pieces, which lie within a page
    start = np.minimum(start, stop)
    expected = [
        set(range(size[n])) <= {b for i in np.flatnonzero(group == n) for b in range(start[i], stop[i])}
        for n in range(len(size))
    ]
    assert covered(group, start, stop, size).tolist() == expected
    assert 20 < sum(expected) < 280
    assert covered(group[:0], start[:0], stop[:0], size[:3]).tolist() == [False] * 3
