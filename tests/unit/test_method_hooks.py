"""Methods of an engine wrapped by hooks, and put back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capture_hooks.events import Hook, Process
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.taps.methods import Hooks


class Engine:
    """Somebody's."""

    def store(self, page: int, *, rows: int = 1) -> int:
        """Returns what it was given."""
        return page + rows


class Later(Engine):
    """Inherits its only method."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(Options(capture=tmp_path, seal=False, hook_errors=3), Process("server"))
    yield made
    made.close()


@pytest.fixture
def hooks(recorder: Recorder) -> Iterator[Hooks]:
    made = Hooks(recorder, "mine")
    yield made
    made.restore()


def told(recorder: Recorder) -> dict[str, Hook]:
    recorder.close()
    return {event.name: event for _, event in JournalReader(recorder.path) if isinstance(event, Hook)}


def test_bodies_get_the_call_and_its_result_and_the_original_is_put_back(
    recorder: Recorder, hooks: Hooks
) -> None:
    original, seen = Engine.store, []

    def around(function: Callable[..., int], engine: Engine, page: int, rows: int = 1) -> int:
        seen.append("around")
        return function(engine, page, rows=rows)

    hooks.wrap(Engine, "store", "store", before=lambda _, page, rows: seen.append(("before", page, rows)))
    hooks.wrap(Engine, "store", "alloc", label="pages", after=lambda found, *_, **__: seen.append(found))
    hooks.wrap(Engine, "store", "order", label="order", around=around)
    assert Engine().store(4, rows=3) == 7
    assert seen == ["around", ("before", 4, 3), 7]
    assert Engine.store.__doc__ == original.__doc__

    hooks.restore()
    assert Engine.store is original
    found = told(recorder)
    assert {name: (hook.covers, hook.fired, hook.complete) for name, hook in found.items()} == {
        "mine.Engine.store": ("store", 1, True),
        "mine.Engine.store pages": ("alloc", 1, True),
        "mine.Engine.store order": ("order", 1, True),
    }


def test_a_hook_that_raises_never_reaches_the_engine_and_is_detached_in_the_end(
    recorder: Recorder, hooks: Hooks, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("not mine")

    hooks.wrap(Engine, "store", "store", before=broken)
    with caplog.at_level(logging.CRITICAL, logger="kv_replay"):
        assert [Engine().store(page) for page in range(5)] == [1, 2, 3, 4, 5]
    assert len(calls) == 3
    hook = told(recorder)["mine.Engine.store"]
    assert (hook.state, hook.complete) == ("detached", False)


def test_after_the_recording_the_engine_runs_as_without_it(recorder: Recorder, hooks: Hooks) -> None:
    seen: list[int] = []
    hooks.wrap(Engine, "store", "store", before=lambda _, page: seen.append(page))
    recorder.close()
    assert Engine().store(1) == 2
    assert seen == []


def test_a_method_that_the_class_does_not_define_itself_is_refused(hooks: Hooks) -> None:
    with pytest.raises(KeyError, match="store"):
        hooks.wrap(Later, "store", "store")
