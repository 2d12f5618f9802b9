"""Spans of losses and gains are what a plain walk through them finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replay.spans import Spans

EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.booleans()), unique_by=lambda e: e[:2])


def _away(events: list[tuple[int, int, bool]], key: int, seq: int) -> bool:
    before = sorted((at, lost) for other, at, lost in events if other == key and at < seq)
    gained_now = any(other == key and at == seq and not lost for other, at, lost in events)
    return bool(before) and before[-1][1] and not gained_now


@given(EVENTS)
def test_inside_is_after_a_loss_and_before_the_next_gain(events: list[tuple[int, int, bool]]) -> None:
    key, seq, lost = (np.array([e[i] for e in events], t) for i, t in enumerate((np.int64, np.int64, bool)))
    spans = Spans(key, seq, lost)
    asked = [(k, s) for k in range(-1, 6) for s in range(-1, 62)]
    found = spans.inside(np.array([k for k, _ in asked]), np.array([s for _, s in asked]))
    assert found.tolist() == [_away(events, k, s) for k, s in asked]
