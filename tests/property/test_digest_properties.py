from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import LAYOUTS, Layout

layouts = st.sampled_from([LAYOUTS[name] for name in sorted(LAYOUTS)])


def page_of(layout: Layout, seed: int, few: bool) -> np.ndarray:
    """One page; with ``few`` it holds few distinct bytes, as real pages with equal scales do."""
    top = 3 if few else 256
    return np.random.default_rng(seed).integers(0, top, (1, layout.page_bytes), dtype=np.uint8)


@settings(max_examples=150, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1), st.booleans(), st.data())
def test_any_changed_byte_changes_its_row_and_its_page_and_no_other_row(
    layout: Layout, seed: int, few: bool, data: st.DataObject
) -> None:
    page = page_of(layout, seed, few)
    at = data.draw(st.integers(0, layout.page_bytes - 1))
    other = page.copy()
    other[0, at] ^= data.draw(st.integers(1, 255))
    before, after = digest_pages(layout, page), digest_pages(layout, other)
    assert (before.digests != after.digests).all()
    values = np.flatnonzero(before.row_values[0] != after.row_values[0]).tolist()
    scales = np.flatnonzero(before.row_scales[0] != after.row_scales[0]).tolist()
    if at < layout.scale_base:
        assert (values, scales) == ([at // layout.value_bytes], [])
    else:
        assert (values, scales) == ([], [(at - layout.scale_base) // layout.scale_bytes])


@settings(max_examples=150, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1), st.booleans(), st.data())
def test_exchanging_two_different_bytes_changes_the_page_digest(
    layout: Layout, seed: int, few: bool, data: st.DataObject
) -> None:
    page = page_of(layout, seed, few)
    first = data.draw(st.integers(0, layout.page_bytes - 1))
    others = np.flatnonzero(page[0] != page[0, first])
    second = int(others[data.draw(st.integers(0, len(others) - 1))])
    other = page.copy()
    other[0, [first, second]] = page[0, [second, first]]
    assert (digest_pages(layout, page).digests != digest_pages(layout, other).digests).all()


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1), st.data())
def test_exchanging_two_rows_changes_the_page_digest_though_the_bytes_are_the_same(
    layout: Layout, seed: int, data: st.DataObject
) -> None:
    page = page_of(layout, seed, few=False)
    first, second = data.draw(st.lists(st.integers(0, layout.rows - 1), min_size=2, max_size=2, unique=True))
    other = page.copy()
    layout.values(other)[0, [first, second]] = layout.values(page)[0, [second, first]]
    before, after = digest_pages(layout, page), digest_pages(layout, other)
    assert sorted(before.row_values[0].tolist()) == sorted(after.row_values[0].tolist())
    assert (before.digests != after.digests).all()


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_a_page_has_the_same_digest_wherever_it_lies(layout: Layout, seed: int, count: int) -> None:
    pages = np.random.default_rng(seed).integers(0, 256, (count, layout.page_bytes), dtype=np.uint8)
    order = np.random.default_rng(seed + 1).permutation(count)
    assert np.array_equal(
        digest_pages(layout, pages).digests[order], digest_pages(layout, pages[order]).digests
    )


def test_a_hundred_thousand_nearly_equal_rows_have_distinct_digests() -> None:
    """Rows that differ in one or two small bytes, the case in which a weak mix would collide."""
    layout = LAYOUTS["fp4"]
    count = 100_000 // layout.rows
    rows = np.zeros((count * layout.rows, layout.value_bytes), np.uint8)
    index = np.arange(len(rows))
    rows[index, index % 64] = 1 + index // 64 % 255
    rows[index, (index // 64 + index + 1) % 64] += (1 + index // (64 * 255)).astype(np.uint8)
    distinct = len(np.unique(rows, axis=0))
    pages = np.zeros((count, layout.page_bytes), np.uint8)
    layout.values(pages)[...] = rows.reshape(count, layout.rows, layout.value_bytes)
    assert len(np.unique(digest_pages(layout, pages).row_values)) == distinct > 90_000
