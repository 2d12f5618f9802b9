"""Scope, losses and coverage in words."""

from __future__ import annotations

import pytest

from analysis.facts import cleared_text, facts_text, scope_text


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, ""),
        ({"a_b": 1200}, "a b 1,200"),
        ({"a": None, "b": 0, "c": "", "d": [], "e": {}, "f": False}, ""),
        ({"a": True}, "a"),
        ({"a": "said"}, "a said"),
        ({"a": [7001, 7002]}, "a 7001, 7002"),
        ({"a": {"b": 1, "c": {"d": 2}, "e": 0}}, "a (b 1, c (d 2))"),
        ({"a": {"b": 0}}, ""),
        ({"a": 1, "b": 2}, "a 1; b 2"),
    ],
)
def test_a_mapping_becomes_words_and_what_is_empty_is_left_out(facts: dict[str, object], text: str) -> None:
    assert facts_text(facts) == text


def test_a_cleared_stage_carries_its_counts() -> None:
    scope = {"stores": {"rows": 1512, "rows_reproduced": 1512}, "reads": {"rows": 0}}

    assert cleared_text("store", scope) == "store (all 1,512 rows reproduced)"
    assert cleared_text("read-kernel", scope) == "read-kernel"
    assert cleared_text("wire", scope) == "wire"


def test_the_scope_is_a_sentence_of_counts() -> None:
    scope = {
        "requests": 1,
        "rooms": [5, 5],
        "layers": 1,
        "pages": 2000,
        "read_snapshots": 1,
        "tables": 3,
        "stores": {"judged": 4, "rows": 9},
        "reads": {"judged": 0},
        "triton": {"device": "interpreter", "stores": 2},
        "pages_seen": {"RC": 3},
        "something_new": 6,
    }

    assert scope_text(scope, verbose=False) == (
        "1 request (room 5), 1 layer, 2,000 pages; 1 page seen at reads; 3 block tables; 4 stores done again; "
        "in Triton (device interpreter; stores 2); something new 6"
    )
    assert "pages seen (RC 3)" in scope_text(scope, verbose=True)


def test_a_scope_of_another_form_is_shown_as_it_is() -> None:
    assert scope_text({"files": 2}, verbose=False) == "files 2"
