"""Texts of a trace as they may be shown: a trace comes from a stranger, and its names go to terminals and files."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with a question mark for each character that controls anything."""
    return "".join(char if char.isprintable() else "?" for char in text)


def one_line(text: str) -> str:
    """``text`` on one line, without characters that control anything."""
    return printable(" ".join(text.split()))
