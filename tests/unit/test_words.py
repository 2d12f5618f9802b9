"""One thing is not two things: what people read agrees in number."""

from __future__ import annotations

import pytest

from replay.words import counted, verb


@pytest.mark.parametrize(
    ("number", "noun", "plural", "told"),
    [
        (1, "page", "", "1 page"),
        (0, "page", "", "0 pages"),
        (2000, "page", "", "2,000 pages"),
        (1, "reply", "replies", "1 reply"),
        (3, "reply", "replies", "3 replies"),
    ],
)
def test_a_number_and_its_noun(number: int, noun: str, plural: str, told: str) -> None:
    assert counted(number, noun, plural) == told


def test_a_verb_follows_its_number() -> None:
    assert [verb(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]
