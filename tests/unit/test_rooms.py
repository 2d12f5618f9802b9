"""A request that is not there: the same code and the same sentence from every command, with the nearest rooms."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay import cli
from replay.trace.builder import TraceBuilder

COMMANDS = {
    "timeline": ["timeline", "{trace}", "--request"],
    "plot": ["plot", "{trace}", "-o", "{out}.png", "--request"],
    "report": ["report", "{trace}", "-o", "{out}.html", "--request"],
    "trim": ["trim", "{trace}", "-o", "{out}.h5", "--request"],
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.h5"
    with TraceBuilder(path) as builder:
        process = builder.process(role="decode")
        for room in (*range(7000, 7040), 9000):
            process.request(room=room, phase="start", rows=1)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_room_is_a_usage_error_with_the_nearest(
    command: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [part.format(trace=trace, out=tmp_path / "out") for part in COMMANDS[command]]

    assert cli.run([*args, "7050"]) == 2
    assert capsys.readouterr().err == (
        "replay: there is no room 7050 in this trace; "
        "the nearest of its 41 are 7035, 7036, 7037, 7038, 7039\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]


def test_an_unknown_attempt_names_those_that_there_are(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["timeline", str(trace), "--request", "7001.2"]) == 2
    assert "room 7001 has no attempt 2 in this trace; it has 0" in capsys.readouterr().err


def test_a_trace_without_requests_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="decode").buffer(buffer=0)

    assert cli.run(["timeline", str(tmp_path / "t.h5"), "--request", "1"]) == 2
    assert "there is no room 1 in this trace; it has no room at all" in capsys.readouterr().err
