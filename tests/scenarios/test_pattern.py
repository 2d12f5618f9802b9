"""The test pattern is the one that the counts in the scenarios were computed with."""

from __future__ import annotations

import hashlib

import numpy as np

from tests.scenarios import pattern


def test_first_page_has_the_anchored_bytes() -> None:
    page = pattern.page(0, 0, 0)
    assert page.shape == (8448,)
    assert page[:8].tolist() == [111, 80, 70, 110, 16, 93, 29, 43]
    assert page[8192:8200].tolist() == [0, 0, 128, 63, 0, 32, 128, 63]
    assert hashlib.sha256(page.tobytes()).hexdigest().startswith("5de5e3fb2ffb5c8e")


def test_all_rows_of_ten_requests_and_four_layers_are_distinct() -> None:
    found = np.concatenate(
        [pattern.value_rows(q, layer, np.arange(2048)) for q in range(10) for layer in range(4)]
    )
    assert len(np.unique(found.view("V128").ravel())) == len(found) == 81_920


def test_values_are_never_nan_codes() -> None:
    values = pattern.value_rows(3, 2, np.arange(2048))
    assert values.min() >= 1
    assert values.max() <= 119


def test_a_page_and_its_old_content_differ_in_8312_bytes_and_188_of_256_in_the_scale_area() -> None:
    # Of the scale bytes only about three in four differ: scales must be compared as words.
    differs = pattern.page(0, 0, 1) != pattern.page(9, 0, 1)
    assert np.count_nonzero(differs) == 8_312
    assert np.count_nonzero(differs[8192:]) == 188


def test_power_of_two_scales_repeat_every_seven_rows_and_differ_between_requests() -> None:
    words = pattern.scale_rows(2, 0, np.arange(64), "powers").view("<f4").ravel()
    assert words[:7].tolist() == words[7:14].tolist()
    assert sorted(words[:7].tolist()) == [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    neighbour = pattern.scale_rows(3, 0, np.arange(64), "powers").view("<f4").ravel()
    assert not np.any(words == neighbour)


def test_pages_of_other_formats_have_their_size() -> None:
    assert pattern.page(1, 1, 1, format="fp4").shape == (4352,)
    assert pattern.page(1, 1, 1, format="bf16").shape == (16_384,)
