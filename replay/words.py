"""Numbers with their nouns, for people."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` with the form of ``noun`` that goes with it: "1 page", "2,000 pages".

    ``plural`` is needed where it is not ``noun`` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def verb(number: int, one: str, many: str) -> str:
    """The form of a verb that goes with ``number``: ``verb(1, "is", "are")``."""
    return one if number == 1 else many
