from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.events import Content
from capture_hooks.keeper import Keeper
from capture_hooks.options import Options
from capture_hooks.ring import Kept, Ring

SECOND = 10**9


def page(number: int, size: int = 1000) -> np.ndarray:
    return np.full((1, size), number % 251, np.uint8)


def digest(number: int) -> np.ndarray:
    return np.array([[number, number]], np.uint64)


class Out:
    def __init__(self) -> None:
        self.contents: list[Content] = []
        self.lost: list[tuple[str, int]] = []

    def keeper(self, limit: int = 10**6, **options: object) -> Keeper:
        return Keeper(Options(**options), limit, self.contents.append, lambda *lost: self.lost.append(lost))  # type: ignore[arg-type]

    def numbers(self) -> list[int]:
        return [int(number) for content in self.contents for number in content.digests[:, 0]]


def test_the_ring_forgets_after_its_seconds_and_counts_a_second_look() -> None:
    ring = Ring(10, 10**6)
    for number in range(3):
        ring.add(Kept("fp8", bytes([number]), b"x" * 100, number * SECOND))
    assert ring.see(bytes([0]), 5 * SECOND)
    assert not ring.see(bytes([9]), 5 * SECOND)
    ring.expire(12 * SECOND + 1)
    held, lost = ring.take(12 * SECOND + 1)
    assert [kept.digest for kept in held] == [bytes([0])]
    assert lost == 0
    assert len(ring) == ring.size == 0


def test_what_the_limit_pushes_out_too_early_is_counted_for_as_long_as_it_matters() -> None:
    ring = Ring(10, 5 * 1250)
    for number in range(8):
        ring.add(Kept("fp8", bytes([number]), b"x" * 1000, SECOND))
    held, lost = ring.take(2 * SECOND)
    assert ([kept.digest[0] for kept in held], lost) == ([3, 4, 5, 6, 7], 3)
    for number in range(8):
        ring.add(Kept("fp8", bytes([number]), b"x" * 1000, SECOND))
    assert ring.take(30 * SECOND) == ([], 0)


def test_a_content_larger_than_the_ring_is_not_held_but_counted() -> None:
    ring = Ring(10, 500)
    ring.add(Kept("fp8", b"a", b"x" * 1000, 0))
    assert ring.take(0) == ([], 1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60), st.integers(1, 8))
def test_the_ring_never_exceeds_its_limit_and_holds_the_newest(
    looks: list[tuple[int, int]], room: int
) -> None:
    limit = room * 350
    ring = Ring(5, limit)
    now, order = 0, []
    for number, pause in looks:
        now += pause * SECOND
        ring.expire(now)
        order = [(n, t) for n, t in order if t >= now - 5 * SECOND and n != number] + [(number, now)]
        if not ring.see(bytes([number]), now):
            ring.add(Kept("fp8", bytes([number]), b"x" * 100, now))
        order = order[-room:]
        assert ring.size <= limit
        assert ring.size == len(ring) * 350
    held, _ = ring.take(now)
    assert [(kept.digest[0], kept.seen_ns) for kept in held] == order


def test_a_trigger_writes_what_was_and_what_comes_for_a_while() -> None:
    out = Out()
    keeper = out.keeper(after_seconds=5.0, ring_seconds=30.0)
    for number in range(4):
        keeper.keep("fp8", digest(number), page(number), number * SECOND)
    assert out.contents == []
    keeper.fire(4 * SECOND)
    assert keeper.due
    keeper.write_some()
    assert not keeper.due
    assert out.numbers() == [0, 1, 2, 3]
    keeper.keep("fp8", digest(2), page(2), 5 * SECOND)
    keeper.keep("fp8", digest(7), page(7), 8 * SECOND)
    keeper.keep("fp8", digest(8), page(8), 9 * SECOND)
    assert out.numbers() == [0, 1, 2, 3, 7]
    keeper.fire(10 * SECOND)
    keeper.write_some()
    assert out.numbers() == [0, 1, 2, 3, 7, 8]
    assert all((content.data == int(content.digests[0, 0])).all() for content in out.contents[1:])
    assert out.lost == []


def test_a_trigger_tells_what_the_memory_limit_had_pushed_out() -> None:
    out = Out()
    keeper = out.keeper(limit=3 * 1250)
    for number in range(5):
        keeper.keep("fp8", digest(number), page(number), SECOND)
    keeper.fire(2 * SECOND)
    keeper.write_some()
    assert out.numbers() == [2, 3, 4]
    assert [count for _, count in out.lost] == [2]


def test_a_large_ring_is_written_in_slices_and_formats_are_kept_apart() -> None:
    out = Out()
    keeper = out.keeper(limit=10**8)
    for number in range(12):
        format_ = "fp8" if number < 8 else "bf16"
        keeper.keep(format_, digest(number), page(number, 2**20), SECOND)
    keeper.fire(SECOND)
    while keeper.due:
        keeper.write_some()
    assert out.numbers() == list(range(12))
    assert len(out.contents) >= 3
    assert all(content.data.nbytes <= 5 * 2**20 for content in out.contents)
    assert [content.format for content in out.contents] == sorted(
        (c.format for c in out.contents), reverse=True
    )


def test_by_mode() -> None:
    for mode, wanted in (("digest", []), ("pages", []), ("full", [5])):
        out = Out()
        keeper = out.keeper(mode=mode)
        keeper.keep("fp8", digest(5), page(5), SECOND)
        keeper.keep("fp8", digest(5), page(5), SECOND)
        assert out.numbers() == wanted
        keeper.fire(SECOND)
        assert keeper.due == (mode == "pages")
