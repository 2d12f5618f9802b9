"""Files that cannot be written: one sentence, what to do next, exit code 2, and nothing half-written, everywhere."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from replay import cli
from replay.trace.builder import TraceBuilder
from replay.writing import WriteError, write_error, writing
from tests.unit.trace_samples import journal, small_trace

ROOT = Path(__file__).parents[2]
#: Each command that writes a file, without the file; {trace} and {journal} are there.
WRITERS = {
    "verdict": ["{trace}", "-o"],
    "seal": ["seal", "{journal}", "-o"],
    "merge": ["merge", "{trace}", "-o"],
    "trim": ["trim", "{trace}", "--request", "7", "-o"],
    "plot": ["plot", "{trace}", "-o"],
    "report": ["report", "{trace}", "-o"],
    "demo": ["demo", "-q", "-o"],
}
SUFFIX = {"verdict": ".json", "plot": ".png", "report": ".html", "demo": ""}


def arguments(tmp_path: Path, command: str) -> list[str]:
    trace = small_trace(tmp_path / "in.h5")
    made = journal(tmp_path / "prefill-0-aa.journal")
    return [part.format(trace=trace, journal=made) for part in WRITERS[command]]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("command", WRITERS)
def test_a_place_that_takes_no_file_is_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    args = arguments(tmp_path, command)
    before = files(tmp_path)
    for place in ("file/out", "file/deeper/out", "absent/out"):
        if command == "demo" and place == "absent/out":
            continue  # the demo makes its folder
        out = tmp_path / f"{place}{SUFFIX.get(command, '.h5')}"
        assert cli.run([*args, str(out)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"replay: cannot write '{out}': ")
        assert told.count("\n") == 1, "one line"
        assert "Make the folder, or choose another" in told
        assert files(tmp_path) == before


def _limited() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))


@pytest.mark.parametrize("command", [name for name in WRITERS if name != "demo"])
def test_a_disk_that_takes_no_more_ends_every_command_in_the_same_way(command: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: HDF5 sees the same failing write."""
    args, out = arguments(tmp_path, command), tmp_path / f"out{SUFFIX.get(command, '.h5')}"
    before = files(tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "replay", *args, str(out)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path.parent / "mpl")},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_limited,  # no threads run here
    )

    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"replay: cannot write '{out}': the limit on the size of a file is reached (ulimit -f). Raise it"
    )
    assert files(tmp_path) == before


def test_a_full_disk_in_the_middle_leaves_nothing_and_lets_the_process_end(tmp_path: Path) -> None:
    """What HDF5 still holds in its caches must not be tried again at the end of the process: it would crash."""
    code = f"""
import numpy as np
from pathlib import Path
from replay.trace.builder import TraceBuilder
from replay.writing import WriteError
try:
    with TraceBuilder(Path({str(tmp_path / "t.h5")!r})) as builder:
        process = builder.process(role="decode")
        process.buffer(buffer=0)
        rng = np.random.default_rng(0)
        for page in range(400):
            data = rng.integers(0, 256, (1, 8448), dtype=np.uint8)
            process.snapshot(stage="RC", buffer=0, pages=[page % 16], logical=[0], data=data)
except WriteError as error:
    print("told:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("told: cannot write")
    assert files(tmp_path) == set()


def test_wherever_the_disk_gets_full_sealing_ends_with_an_error(tmp_path: Path) -> None:
    """From the first byte of the file to its last structures; in one process for each limit."""
    made = journal(tmp_path / "prefill-0-aa.journal")
    code = f"""
import os, resource, sys
from pathlib import Path
from replay.trace.seal import seal
from replay.writing import WriteError
for limit in (1, *range(4_000, 100_000, 8_000)):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            seal([Path({str(made)!r})], Path({str(tmp_path / "out.h5")!r}))
        except WriteError:
            sys.exit(2)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    before = files(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert set(done.stdout.split()) == {"2"}, done.stdout + done.stderr
    assert files(tmp_path) == before


@pytest.mark.parametrize("step", ["create_group", "create_dataset"])
def test_what_fails_or_is_interrupted_at_the_beginning_of_a_file_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "x")):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(h5py.Group, step, fail)
        with pytest.raises((KeyboardInterrupt, WriteError)), TraceBuilder(tmp_path / "t.h5") as builder:
            builder.process(role="decode").buffer(buffer=0)
        assert files(tmp_path) == set()


def test_a_file_that_could_not_be_created_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 makes the file first, and writes to it then."""

    def fail(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(h5py, "File", fail)
    with pytest.raises(WriteError, match="the disk is full"):
        TraceBuilder(tmp_path / "t.h5")
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full. Make room on it, or choose another place"),
        (errno.EACCES, "you have no right to write there. Choose another place"),
        (errno.EROFS, "the file system is read-only. Choose another place"),
        (errno.EIO, "input/output error. Choose another place"),
    ],
)
def test_causes_are_told_in_words_whoever_raised_them(number: int, told: str) -> None:
    path = Path("out.h5")
    assert str(write_error(path, OSError(number, "x"))) == f"cannot write 'out.h5': {told}"
    inner = f"Can't write (file write failed: time = 1, errno = {number}, error message = 'y', buf = 0x1)"
    assert str(write_error(path, RuntimeError(inner))) == f"cannot write 'out.h5': {told}"


def test_a_mistake_of_ours_is_not_taken_for_the_disk() -> None:
    with pytest.raises(ValueError, match="shape"), writing(Path("out.h5")):
        raise ValueError("a wrong shape")


def test_a_folder_where_nothing_fits_beside_the_journal_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace that is sealed only to be read goes elsewhere where the disk of its journal is full."""
    from replay.trace import seal as module
    from replay.trace.reader import open_trace

    made = journal(tmp_path / "prefill-0-aa.journal")
    whole = module.seal

    def full(journals: list[Path], path: Path, **more: object) -> object:
        if path.parent == tmp_path:
            raise WriteError(path, "the disk is full", "Make room on it")
        return whole(journals, path, **more)

    monkeypatch.setattr(module, "seal", full)
    with open_trace(made) as trace:
        assert trace.processes[0].role == "prefill"
    assert files(tmp_path) == {"prefill-0-aa.journal"}


def test_a_trace_in_place_of_a_folder_is_told_by_the_builder_too(tmp_path: Path) -> None:
    (tmp_path / "t.h5").touch()
    with pytest.raises(WriteError, match="it exists already"), TraceBuilder(tmp_path / "t.h5"):
        pass
