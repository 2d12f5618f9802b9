from __future__ import annotations

import numpy as np
import pytest

from capture_hooks.events import Buffer
from capture_hooks.layouts import LAYOUTS
from capture_hooks.regions import Piece, Regions

FP8, FP4 = LAYOUTS["fp8"], LAYOUTS["fp4"]


def test_one_page_is_one_piece() -> None:
    regions = Regions()
    regions.add(4, 12, "index_k", FP8, 1000, pages=8, pitch=8448)
    assert regions.resolve(1000 + 3 * 8448, 8448) == [Piece(4, 12, 3, 0, 8448, 0, False)]


def test_a_range_over_a_page_border_is_two_pieces_with_their_places() -> None:
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 0, pages=8, pitch=8448)
    assert regions.resolve(8448 - 10, 30) == [
        Piece(0, 0, 0, 8438, 8448, 0, False),
        Piece(0, 0, 1, 0, 20, 10, False),
    ]


def test_padding_between_pages_is_marked() -> None:
    regions = Regions()
    regions.add(0, 5, "index_k", FP8, 0, pages=2, pitch=9000)
    assert regions.resolve(8000, 1500) == [
        Piece(0, 5, 0, 8000, 8448, 0, False),
        Piece(0, 5, 0, 8448, 9000, 448, True),
        Piece(0, 5, 1, 0, 500, 1000, False),
    ]


def test_what_lies_past_the_last_page_is_nobodys() -> None:
    regions = Regions()
    regions.add(0, 5, "index_k", FP8, 100, pages=2, pitch=9000)
    end = 100 + 9000 + 8448
    assert regions.resolve(end - 1, 3) == [
        Piece(0, 5, 1, 8447, 8448, 0, False),
        Piece(-1, -1, -1, 0, 2, 1, False),
    ]
    assert regions.resolve(99, 2) == [Piece(-1, -1, -1, 0, 1, 0, False), Piece(0, 5, 0, 0, 1, 1, False)]


def test_layers_of_a_packed_slab_are_told_apart() -> None:
    """Each layer's pages lie in the padding of the others'; only bytes of no layer are padding."""
    slab = 3 * 8448 + 100
    regions = Regions()
    for layer in range(3):
        regions.add(layer, layer, "index_k", FP8, layer * 8448, pages=4, pitch=slab)
    pieces = regions.resolve(slab, slab)
    assert [(p.buffer, p.page, p.start, p.stop, p.padding) for p in pieces] == [
        (0, 1, 0, 8448, False),
        (1, 1, 0, 8448, False),
        (2, 1, 0, 8448, False),
        (2, 1, 8448, 8548, True),
    ]


def test_two_views_of_the_same_memory_both_own_it() -> None:
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 0, pages=2, pitch=8448)
    regions.add(1, 7, "index_k", FP8, 4224, pages=1, pitch=8448)
    assert regions.resolve(4224, 4300) == [
        Piece(0, 0, 0, 4224, 8448, 0, False),
        Piece(1, 7, 0, 0, 4300, 0, False),
        Piece(0, 0, 1, 0, 76, 4224, False),
    ]


def test_pages_closer_than_their_length_share_bytes() -> None:
    """The geometry of a wrong pitch: an fp4 pitch under fp8 pages."""
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 0, pages=3, pitch=FP4.page_bytes)
    assert [(p.page, p.start, p.stop) for p in regions.resolve(8704, 10)] == [(1, 4352, 4362), (2, 0, 10)]


def test_many_ranges_give_columns_in_the_order_asked() -> None:
    regions = Regions()
    regions.add(3, 9, "index_k", FP8, 10_000, pages=5, pitch=8448)
    starts = np.array([10_000 + 4 * 8448, 0, 10_000, 2**63 + 5, 10_000], np.uint64)
    found = regions.resolve_many(starts, np.array([8448, 50, 2 * 8448, 7, 0], np.uint64))
    assert found.descriptor.tolist() == [0, 1, 2, 2, 3]
    assert found.buffer.tolist() == [3, -1, 3, 3, -1]
    assert found.layer.tolist() == [9, -1, 9, 9, -1]
    assert found.page.tolist() == [4, -1, 0, 1, -1]
    assert found.stop.tolist() == [8448, 50, 8448, 8448, 7]
    assert found.offset.tolist() == [0, 0, 0, 8448, 0]
    assert len(found) == 5


def test_an_empty_map_owns_nothing() -> None:
    assert Regions().resolve(5, 10) == [Piece(-1, -1, -1, 0, 10, 0, False)]
    assert Regions().resolve(5, 0) == []
    assert len(Regions().resolve_many(np.zeros(0, np.uint64), np.zeros(0, np.uint64))) == 0


def test_a_damaged_length_is_refused_before_anything_is_allocated() -> None:
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 0, pages=2**40, pitch=8448)
    with pytest.raises(ValueError, match="lengths cannot be right"):
        regions.resolve(0, 2**62)


@pytest.mark.parametrize(
    ("address", "length"), [(2**64 - 1, 2**64 - 1), (2**63 - 1, 1), (0, 2**63), (1, 2**63 - 1)]
)
def test_the_ends_of_the_address_space(address: int, length: int) -> None:
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 2**63 - 8448, pages=1, pitch=8448)
    pieces = regions.resolve(address, length)
    covered = [(p.offset, p.stop - p.start) for p in pieces]
    assert covered[0][0] == 0
    if length < 2**63 and address + length <= 2**63:
        assert (pieces[-1].buffer, pieces[-1].stop) == (0, 8448)
        assert sum(size for _, size in covered) == length
    else:
        assert [p.buffer for p in pieces] == [-1]


@pytest.mark.parametrize(
    ("pages", "pitch", "address"),
    [(-1, 8448, 0), (1, 0, 0), (1, -5, 0), (1, 8448, -1), (2**60, 8448, 0), (1, 8448, 2**63)],
)
def test_impossible_geometry_is_refused(pages: int, pitch: int, address: int) -> None:
    with pytest.raises(ValueError, match="buffer 0"):
        Regions().add(0, 0, "index_k", FP8, address, pages, pitch)


def test_an_id_is_taken_once() -> None:
    regions = Regions()
    regions.add(0, 0, "index_k", FP8, 0, 1, 8448)
    with pytest.raises(ValueError, match="in the map already"):
        regions.add(0, 1, "index_k", FP8, 0, 1, 8448)


def test_a_map_is_made_of_buffer_records() -> None:
    regions = Regions.of([Buffer(2, layer=4, format="bf16", address=64, pages=3, pitch=16384)])
    assert 2 in regions
    assert regions[2].layout is LAYOUTS["bf16"]
    assert regions[2].end == 64 + 3 * 16384
    assert [region.buffer for region in Regions(regions)] == [2]
    with pytest.raises(ValueError, match="expected unsigned"):
        regions.resolve(-1, 5)
