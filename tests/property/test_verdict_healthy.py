"""Whatever an honest engine does, nobody is accused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.histories import History, moves, settings_of_scene
from tests.scenarios.outcome import expect_clean, verdict_of

#: More examples for a long run: TIMES=20 pytest tests/property/test_verdict_hit.py
TIMES = int(os.environ.get("TIMES", "1"))

quick = settings(
    max_examples=15 * TIMES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

#: Kinds of record that nobody wrote down.
seldom_seen = st.sets(
    st.sampled_from(
        [
            *("alloc", "free", "store", "send", "receive", "transfer_state", "read", "order", "request"),
            *("ST", "SE.before", "SE.after", "RC.before", "RC", "LT", "RD.before", "RD.after"),
        ]
    ),
    min_size=1,
    max_size=4,
)


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder for each example."""
    with TemporaryDirectory() as name:
        yield Path(name)


@quick
@given(plan=moves, lifo=st.booleans(), how=settings_of_scene)
def test_a_history_that_came_to_its_end_is_clean(
    plan: list[tuple[str, int, int]], lifo: bool, how: dict[str, Any]
) -> None:
    with folder() as path:
        history = History(path, lifo=lifo, **how)
        history.start(63)
        history.play(plan)
        history.drain()
        expect_clean(verdict_of(history.scene))


@quick
@given(plan=moves, lifo=st.booleans(), how=settings_of_scene)
def test_a_history_that_was_cut_in_the_middle_accuses_nobody(
    plan: list[tuple[str, int, int]], lifo: bool, how: dict[str, Any]
) -> None:
    with folder() as path:
        history = History(path, lifo=lifo, **how)
        history.play(plan)
        assert verdict_of(history.scene).findings == ()


@quick
@given(
    plan=moves,
    lifo=st.booleans(),
    how=settings_of_scene,
    gone=seldom_seen,
)
def test_a_history_of_which_little_was_seen_accuses_nobody(
    plan: list[tuple[str, int, int]], lifo: bool, how: dict[str, Any], gone: set[str]
) -> None:
    with folder() as path:
        history = History(path, lifo=lifo, drop=gone, **how)
        history.play(plan)
        assert verdict_of(history.scene).findings == ()
