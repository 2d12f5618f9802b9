from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.layouts import LAYOUTS
from capture_hooks.regions import Regions

#: Pages of 8 bytes, so that every byte can be asked about.
TINY = replace(LAYOUTS["fp8"], name="tiny", rows=1, value_bytes=4, scale_bytes=4)

buffers = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 5), st.integers(1, 30)), min_size=0, max_size=5
)  # address, pages, pitch
ranges = st.lists(st.tuples(st.integers(0, 220), st.integers(0, 60)), min_size=0, max_size=6)


def owners(regions: Regions, address: int) -> set[tuple[int, int, int, bool]]:
    """(buffer, page, byte in page, padding) of one byte, by looking at every page of every buffer."""
    found = set()
    for region in regions:
        for page in range(region.pages):
            byte = address - region.address - page * region.pitch
            if 0 <= byte < region.layout.page_bytes:
                found.add((region.buffer, page, byte, False))
    if found:
        return found
    nearest: tuple[int, int, int, int] | None = None
    for region in sorted(regions, key=lambda region: region.buffer):
        if region.pages and region.address <= address < region.end:
            page = (address - region.address) // region.pitch
            end = region.address + page * region.pitch + region.layout.page_bytes
            if nearest is None or end > nearest[0]:
                nearest = (end, region.buffer, page, address - region.address - page * region.pitch)
    return {(*nearest[1:], True)} if nearest else {(-1, -1, -1, False)}


@settings(max_examples=300, deadline=None)
@given(buffers, ranges, st.randoms())
def test_every_byte_of_every_range_is_told_its_owners_and_no_others(
    shapes: list[tuple[int, int, int]], asked: list[tuple[int, int]], order: np.random.Generator
) -> None:
    regions = Regions()
    ids = list(range(len(shapes)))
    order.shuffle(ids)  # type: ignore[arg-type]
    for buffer, (address, pages, pitch) in zip(ids, shapes, strict=True):
        regions.add(buffer, 10 * buffer, "index_k", TINY, address, pages, pitch)
    starts = np.array([start for start, _ in asked], np.uint64)
    lengths = np.array([length for _, length in asked], np.uint64)
    found = regions.resolve_many(starts, lengths)

    told: dict[tuple[int, int], set[tuple[int, int, int, bool]]] = {}
    for index in range(len(found)):
        which, buffer, page = (int(column[index]) for column in (found.descriptor, found.buffer, found.page))
        assert found.layer[index] == (10 * buffer if buffer >= 0 else -1)
        assert found.stop[index] > found.start[index]
        for step in range(int(found.stop[index] - found.start[index])):
            byte = int(found.start[index]) + step if buffer >= 0 else -1
            key = (which, int(found.offset[index]) + step)
            assert (buffer, page, byte, bool(found.padding[index])) not in told.get(key, set())
            told.setdefault(key, set()).add((buffer, page, byte, bool(found.padding[index])))
    expected = {
        (which, step): owners(regions, start + step)
        for which, (start, length) in enumerate(asked)
        for step in range(length)
    }
    assert told == expected
    assert np.array_equal(np.lexsort((found.offset, found.descriptor)), np.arange(len(found)))


@settings(max_examples=60, deadline=None)
@given(buffers, st.tuples(st.integers(0, 220), st.integers(0, 60)))
def test_one_range_alone_gives_what_it_gives_among_many(
    shapes: list[tuple[int, int, int]], one: tuple[int, int]
) -> None:
    regions = Regions()
    for buffer, (address, pages, pitch) in enumerate(shapes):
        regions.add(buffer, buffer, "index_k", TINY, address, pages, pitch)
    many = regions.resolve_many(np.array([0, one[0], 40], np.uint64), np.array([300, one[1], 7], np.uint64))
    rows = np.flatnonzero(many.descriptor == 1)
    alone = regions.resolve(*one)
    assert [(p.buffer, p.page, p.start, p.stop, p.offset, p.padding) for p in alone] == [
        tuple(
            getattr(many, name)[row].item()
            for name in ("buffer", "page", "start", "stop", "offset", "padding")
        )
        for row in rows
    ]
