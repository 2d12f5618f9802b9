"""Outcomes of ``make accuracy`` that are kept, and the page made from its figures."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.accuracy import markdown
from benchmarks.accuracy.__main__ import numbers, tasks
from benchmarks.accuracy.kept import Kept, OtherCodeError
from benchmarks.accuracy.measure import NotWrittenError, Outcome, Task, run, summary

RIGHT = Outcome(
    Task("F07", "unpack", "fp8", 3), "F07", "descriptor", "certain", stage_right=True, kind_right=True
)
FAIR = Outcome(Task("", "", "", 4, 200), verdict="clean", requests=200)


def test_outcomes_come_back_and_a_line_that_was_cut_does_not(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    kept = Kept(path, "a")
    kept.add(RIGHT)
    kept.add(FAIR)
    path.write_text(path.read_text()[:-9])
    again = Kept(path, "a")
    assert again.outcomes == {RIGHT.task: RIGHT}
    again.add(FAIR)
    assert Kept(path, "a").outcomes == {RIGHT.task: RIGHT, FAIR.task: FAIR}


def test_outcomes_of_other_code_are_refused(tmp_path: Path) -> None:
    Kept(tmp_path / "kept.jsonl", "a").add(RIGHT)
    with pytest.raises(OtherCodeError, match="other code"):
        Kept(tmp_path / "kept.jsonl", "b")


def test_a_part_of_a_measurement_has_traces_of_all_sorts() -> None:
    plan = tasks(["F01", "F02"], ["fp8"], range(10), numbers("3..7"))
    assert len(plan) == len(set(plan)) == 25
    half = plan[:12]
    assert sum(not task.code for task in half) in (2, 3)
    assert {task.code for task in half} == {"", "F01", "F02"}


def test_the_page_says_which_bar_was_missed_and_how_to_see_it_again() -> None:
    wrong = Outcome(Task("F07", "unpack", "bf16", 9), "F03", "wire", "certain", wrong_certain=["F03 wire"])
    accused = Outcome(Task("", "", "", 17, 200), accusations=["F14 destination"], requests=200)
    made = {"date": "2026-01-02", "commit": "abc", "machine": "2 cores", "cpu_minutes": "3"}
    page = markdown.page(summary([RIGHT, wrong, FAIR, accused]) | {"made": made})
    assert "| right stage | 50.00 % | 100 %: **missed** |" in page
    assert "| findings on them | 1 | 0: **missed** |" in page
    assert "- F07 unpack bf16 seed 9: F03 at wire" in page
    assert "- clean seed 17: F14 destination" in page
    assert (
        wrong.task.again
        == "python -m benchmarks.accuracy --kinds F07 --formats bf16 --seeds 9..9 --clean 0 --processes 1 --verbose"
    )
    assert "--kinds none --clean 17..17" in accused.task.again


def test_the_processes_of_a_measurement_end_with_it(tmp_path: Path) -> None:
    """A measurement that is killed cannot end them itself."""
    kept = tmp_path / "kept.jsonl"
    which = ["--kinds", "F26", "--formats", "fp4", "--seeds", "200", "--clean", "0", "--keep", str(kept)]
    command = [sys.executable, "-m", "benchmarks.accuracy", *which, "--out", str(tmp_path / "a.json")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as going:
        try:
            assert _before_long(lambda: kept.exists() and kept.read_text().count("\n") > 1)
            going.kill()
            going.wait()
            assert _before_long(lambda: not _alive(going.pid))
        finally:
            if _alive(going.pid):
                os.killpg(going.pid, signal.SIGKILL)


def test_a_folder_that_goes_away_is_no_answer_of_the_judge(tmp_path: Path) -> None:
    with pytest.raises(NotWrittenError, match="its folder does not exist") as told:
        run(Task("F26", "missing", "fp4", 0), tmp_path / "gone")
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)  # it comes from another process


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _before_long(told: Callable[[], bool]) -> bool:
    until = time.monotonic() + 120
    while not told():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
