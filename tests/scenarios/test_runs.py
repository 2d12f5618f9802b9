"""Two runs in one folder are refused: which prefill belongs to which decode is written nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.judge import judge
from replay.trace.errors import TraceError
from replay.trace.reader import open_trace
from tests.scenarios.scene import Job, Scene


def run_of(folder: Path, room: int) -> list[Path]:
    folder.mkdir()
    scene = Scene(folder, run=folder.name)
    scene.healthy(Job(room, 0, 150, [21, 22, 23], [5, 6, 7]))
    scene.close()
    return list(scene.paths)


def test_the_same_room_in_two_runs_is_refused_with_what_to_do(tmp_path: Path) -> None:
    paths = [*run_of(tmp_path / "first", 7000), *run_of(tmp_path / "second", 7000)]

    with open_trace(*paths) as trace, pytest.raises(TraceError, match="two runs are mixed") as refused:
        judge(trace)
    assert "room 7000" in str(refused.value)
    assert "Give the files of one run" in refused.value.todo


def test_a_server_that_was_started_anew_for_other_rooms_is_judged(tmp_path: Path) -> None:
    paths = [*run_of(tmp_path / "first", 7000), *run_of(tmp_path / "second", 7001)]

    with open_trace(*paths) as trace:
        assert judge(trace).verdict == "clean"
