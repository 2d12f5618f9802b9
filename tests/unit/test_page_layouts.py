"""The layouts that F07 tries: permutations, both ways, and each what its name says."""

from __future__ import annotations

import numpy as np
import pytest

from capture_hooks.layouts import LAYOUTS, layout
from replay.classify.page_layouts import hypotheses, same_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_is_a_permutation_of_the_page_and_none_is_there_twice(name: str) -> None:
    spec = layout(name)
    found = hypotheses(spec)
    assert len({label for label, _ in found}) == len(found)
    assert len({permutation.tobytes() for _, permutation in found}) == len(found)
    for label, permutation in found:
        assert np.array_equal(np.sort(permutation), np.arange(spec.page_bytes)), label
        assert not np.array_equal(permutation, np.arange(spec.page_bytes)), label


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_way_back_is_there_too(name: str) -> None:
    found = [permutation for _, permutation in hypotheses(layout(name))]
    for permutation in found:
        back = np.argsort(permutation)
        assert any(np.array_equal(back, other) for other in found)


def test_a_planar_page_read_as_interleaved_gives_drifting_rows() -> None:
    spec = layout("fp8")
    page = np.random.default_rng(3).integers(0, 256, spec.page_bytes, np.uint8)
    seen = page[dict(hypotheses(spec))["read as interleaved rows"]]
    # A reader of interleaved rows takes the values of row r at r * 132 and its scale at r * 132 + 128.
    for row in (0, 1, 31, 61):
        assert np.array_equal(spec.values(seen[None])[0][row], page[row * 132 : row * 132 + 128])
        assert np.array_equal(spec.scales(seen[None])[0][row], page[row * 132 + 128 : row * 132 + 132])


def test_a_flat_page_written_in_tiles_moves_16_bytes_at_a_time() -> None:
    spec = layout("fp8")
    page = np.arange(spec.page_bytes) % 251
    seen = page[dict(hypotheses(spec))["written as 16 x 16 tiles"]]
    assert np.array_equal(seen[:16], page[:16])
    assert np.array_equal(seen[16:32], page[128:144])
    assert np.array_equal(seen[256:272], page[16:32])
    assert np.array_equal(seen[8192:], page[8192:])


def test_an_order_free_checksum_is_blind_to_a_permutation_only() -> None:
    spec = layout("bf16")
    page = np.random.default_rng(4).integers(0, 256, spec.page_bytes, np.uint8)
    for label, permutation in hypotheses(spec):
        assert same_bytes(page, page[permutation]), label
    other = page.copy()
    other[5] ^= 1
    assert not same_bytes(page, other)
    assert not same_bytes(page, page[:-1])
