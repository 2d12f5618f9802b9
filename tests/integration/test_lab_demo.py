"""``replay demo`` from the outside: what it prints and writes, how it ends, and that it leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay.lab.faults import FAULTS

ROOT = Path(__file__).parents[2]
SMALL = ["--requests", "12", "--concurrency", "2,8", "--layers", "2", "--seed", "5"]


def replay(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from replay.cli import main; main()", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def test_the_faults_are_listed_without_starting_anything(tmp_path: Path) -> None:
    done = replay("demo", "--list-faults", cwd=tmp_path)
    assert done.returncode == 0
    named = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert named == list(FAULTS)
    assert not list(tmp_path.iterdir())


def test_a_demo_with_a_fault_prints_rates_and_verdict_and_writes_trace_and_plot(tmp_path: Path) -> None:
    done = replay("demo", "--fault", "wrong-item-length", *SMALL, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    rates = [line for line in done.stdout.splitlines() if "at a time:" in line]
    assert [line.split()[0] for line in rates] == ["2", "8"]
    assert all("(100 %)" in line for line in rates)
    assert "wrong item length (F03)" in done.stdout
    assert "Triton kernels on the interpreter" in done.stdout
    assert (tmp_path / "demo" / "trace.h5").stat().st_size > 10_000
    assert (tmp_path / "demo" / "stages.png").read_bytes().startswith(b"\x89PNG")
    # The trace alone gives the same verdict, in another folder and another process.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "t.h5").write_bytes((tmp_path / "demo" / "trace.h5").read_bytes())
    again = replay("t.h5", cwd=elsewhere)
    assert again.returncode == 1
    assert "wrong item length (F03)" in again.stdout


def test_a_demo_without_a_fault_is_clean_and_json_stands_alone(tmp_path: Path) -> None:
    done = replay("demo", "--fault", "none", "--json", "-q", "-o", "out", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["schema"] == "kv-replay/verdict/1"
    assert verdict["verdict"] == "clean"
    assert {"store", "source", "descriptor", "wire", "read-kernel"} <= set(verdict["cleared"])
    assert done.stderr == ""
    again = replay("demo", "-q", "-o", "out", *SMALL, "--concurrency", "2", cwd=tmp_path)
    assert again.returncode in (0, 1), "a second run into the same folder"


@pytest.mark.parametrize(
    "args", [["--fault", "gremlins"], ["--concurrency", "4,x"], ["--format", "fp7"], ["--concurrency", "0"]]
)
def test_wrong_options_are_usage_errors(tmp_path: Path, args: list[str]) -> None:
    assert replay("demo", *args, cwd=tmp_path).returncode == 2


def test_a_folder_with_files_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo" / "capture-2").mkdir(parents=True)
    (tmp_path / "demo" / "capture-2" / "thesis.txt").write_text("mine")
    done = replay("demo", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert (tmp_path / "demo" / "capture-2" / "thesis.txt").read_text() == "mine"


def test_a_child_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nif sys.orig_argv[-2:] == ['replay.lab.process', 'prefill']:\n    sys.exit('no prefill today')\n"
    )
    done = replay("demo", *SMALL, cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'site'}:{ROOT}")
    assert done.returncode == 70
    assert "no prefill today" in done.stderr


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_ctrl_c_ends_the_children_and_exits_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from replay.cli import main; main()", "demo", "--requests", "400"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "at a time" in line
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("demo/capture-4/*.journal"))) < 2:  # both are in the round
        assert time.monotonic() < end, "the round does not begin"
        time.sleep(0.02)
    children = _children(process.pid)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    assert "stopping the pair" in process.stderr.readline()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
