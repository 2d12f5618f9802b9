"""The command line: what is a command and what a trace, every exit code, and a quick help."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest

from replay import cli
from replay.classify.base import VOCABULARY
from replay.commands.output import Progress, write_new
from replay.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]

Judge = Callable[..., Verdict]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], list[Any]]:
    """Put a judge of the test's own in place; returns the list of calls it gets."""

    def install(judge: Judge) -> list[Any]:
        calls: list[Any] = []

        def record(trace: object, options: types.SimpleNamespace, progress: object) -> Verdict:
            calls.append((trace, options))
            return judge(trace)

        fake = types.ModuleType("replay.judge")
        fake.judge = record  # type: ignore[attr-defined]
        fake.JudgeOptions = types.SimpleNamespace  # type: ignore[attr-defined]
        reader = types.ModuleType("replay.trace.reader")
        reader.open_trace = lambda *paths: nullcontext(paths)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "replay.judge", fake)
        monkeypatch.setitem(sys.modules, "replay.trace.reader", reader)
        return calls

    return install


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.h5"
    path.touch()
    return str(path)


@pytest.mark.parametrize(("said", "code"), [("clean", 0), ("divergent", 1), ("inconclusive", 3)])
def test_the_exit_code_is_the_verdict(said: Any, code: int, judged: Any, trace: str) -> None:
    judged(lambda _: Verdict(said))

    assert cli.run([trace]) == code


def test_json_is_alone_on_standard_output(
    judged: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(lambda _: Verdict("clean", cleared=("wire",)))

    cli.run([trace, "--json"])

    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "kv-replay/verdict/1"
    assert err == ""


def test_options_may_stand_before_the_trace(
    judged: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = judged(lambda _: Verdict("clean"))

    assert cli.run(["--json", "--sample", "3", trace]) == 0
    assert calls[0][1].sample == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "clean"


def test_every_option_reaches_the_judge(judged: Any, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = judged(lambda _: Verdict("clean"))
    monkeypatch.setattr(
        "replay.commands.kernel_names.find_kernels", lambda specs, timeout: [None] * len(specs)
    )

    cli.run(
        [trace, trace, "--exhaustive", "--read-kernel", "a.b:c", "--store-kernel", "d:e", "--timeout", "5"]
    )

    paths, options = calls[0]
    assert paths == (Path(trace), Path(trace))
    assert vars(options) == {
        "exhaustive": True,
        "sample": 8,
        "read_kernel": "a.b:c",
        "store_kernel": "d:e",
        "reexecute": True,
        "timeout": 5.0,
    }


def test_the_verdict_is_written_to_a_file_but_not_over_one(judged: Any, trace: str, tmp_path: Path) -> None:
    calls = judged(lambda _: Verdict("divergent"))
    out = tmp_path / "verdict.json"

    assert cli.run([trace, "-o", str(out)]) == 1
    assert json.loads(out.read_text())["verdict"] == "divergent"
    assert cli.run([trace, "-o", str(out)]) == 2
    assert len(calls) == 1, "a refusal comes before the work"
    assert cli.run([trace, "-o", str(out), "--force"]) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--read-kernel", "no-colon"],
        ["--read-kernel", "a b:c"],
        ["--sample", "-1"],
        ["--timeout", "0"],
        ["--no-reexecute", "--read-kernel", "a:b"],
        ["--no-such-option"],
        ["-o", "/nowhere/at/all.json"],
    ],
)
def test_a_wrong_option_is_a_usage_error(args: list[str], judged: Any, trace: str) -> None:
    judged(lambda _: Verdict("clean"))

    assert cli.run([trace, *args]) == 2


def test_a_kernel_that_is_not_there_is_a_usage_error_before_any_judging(
    judged: Any,
    trace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = judged(lambda _: Verdict("clean"))
    (tmp_path / "mine.py").write_text("def read(*arguments): ...")
    monkeypatch.chdir(tmp_path)

    assert cli.run([trace, "--read-kernel", "mine:raed", "--store-kernel", "mine:read"]) == 2
    assert capsys.readouterr().err.endswith(
        "Error: --read-kernel mine:raed: module mine has no function raed; did you mean mine:read?\n"
    )
    assert calls == []


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evn"]) == 2
    assert "Did you mean 'replay env'?" in capsys.readouterr().err


def test_a_missing_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["missing.h5"]) == 2
    assert "'missing.h5' is neither a command nor an existing trace" in capsys.readouterr().err


def test_a_trace_named_like_a_command_needs_a_path(
    judged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = judged(lambda _: Verdict("clean"))
    monkeypatch.chdir(tmp_path)
    Path("env").touch()

    assert cli.run(["env"]) == 0
    assert "KV_REPLAY_CAPTURE" in capsys.readouterr().out
    assert cli.run(["./env"]) == 0
    assert len(calls) == 1


def _raise(error: BaseException) -> Judge:
    def judge(_: object) -> Verdict:
        raise error

    return judge


def test_an_unreadable_trace_gives_its_own_message(
    judged: Any, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from capture_hooks import journal
    from replay.trace import errors

    for kind in (errors.TraceError, journal.JournalError):
        error = kind.__new__(kind)
        monkeypatch.setattr(kind, "__str__", lambda _: "trace.h5: cut at byte 77; run 'replay seal' again")
        judged(_raise(error))
        assert cli.run([trace]) == 4
        assert capsys.readouterr().err == "replay: trace.h5: cut at byte 77; run 'replay seal' again\n"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/x"), FileNotFoundError(2, "No", "/x")]
)
def test_a_file_that_cannot_be_read_is_an_unreadable_trace(error: OSError, judged: Any, trace: str) -> None:
    judged(_raise(error))

    assert cli.run([trace]) == 4


def test_an_internal_error_is_short_and_asks_for_a_report(
    judged: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(_raise(KeyError("x")))

    assert cli.run([trace]) == 70
    err = capsys.readouterr().err
    assert "internal error: KeyError: 'x' (test_cli.py:" in err
    assert "--debug" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("place", [0, 1])
def test_debug_shows_the_traceback(
    place: int, judged: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(_raise(KeyError("x")))
    args = [trace]
    args.insert(place, "--debug")

    assert cli.run(args) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (click.Abort(), 130), (BrokenPipeError(), 141), (MemoryError(), 70)],
)
def test_an_interruption_has_its_own_code(error: BaseException, code: int, judged: Any, trace: str) -> None:
    judged(_raise(error))

    assert cli.run([trace]) == code


def test_help_and_version() -> None:
    for flag in ("-h", "--help", "-V", "--version"):
        assert cli.run([flag]) == 0
    assert cli.run([]) == 2


def test_the_help_shows_the_options_of_the_verdict_and_each_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.run(["--help"])

    out = capsys.readouterr().out
    assert out.startswith("Usage: replay TRACE|FOLDER... [OPTIONS]\n")
    for word in ("--read-kernel", "--exhaustive", *cli.available()):
        assert word in out


def test_no_help_imports_torch_or_h5py(tmp_path: Path) -> None:
    """One process a help, in which the import of anything slow fails."""
    for name in ("torch", "h5py", "matplotlib", "triton"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('slow import')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = (
        "import sys; from replay import cli\n"
        "for args in [['--help'], ['x', '--help'], *([name, '--help'] for name in cli.available())]:\n"
        "    assert cli.run(args) == 0, args\n"
    )
    (tmp_path / "x").touch()

    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", cli.available())
def test_each_command_is_a_click_command_with_help(name: str) -> None:
    command = importlib.import_module(cli.COMMANDS[name].module).command

    assert isinstance(command, click.Command)
    assert command.help
    shown = command.get_help(
        click.Context(
            command, info_name=f"replay {name}", terminal_width=80, help_option_names=["-h", "--help"]
        )
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_a_closed_pipe_is_quiet() -> None:
    """Like ``replay env | head -0``, with the reader gone before the first write."""
    read, write = os.pipe()
    os.close(read)

    done = subprocess.run(
        [sys.executable, "-c", "from replay.cli import main; main(['env'])"],
        stdout=write,
        stderr=subprocess.PIPE,
    )

    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


def test_progress_is_silent_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress("reading", 1, 2)

    assert capsys.readouterr().err == ""


def test_progress_appears_only_when_work_is_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress(enabled=True) as progress:
        progress("early", 1, 2)
        now[0] += 1
        progress("reading pages", 1000, 2000)
        progress("too soon", 1001, 2000)

    err = capsys.readouterr().err
    assert "reading pages [==========          ] 1,000 of 2,000" in err
    assert "early" not in err
    assert "too soon" not in err


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_new(path, "one", force=False)
    with pytest.raises(click.UsageError, match="exists"):
        write_new(path, "two", force=False)

    assert path.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25])
def test_ctrl_c_while_the_program_is_loaded_tells_no_traceback(delay: float, tmp_path: Path) -> None:
    """The signal goes out once Python itself is up, which cannot be helped, and ``delay`` later."""
    code = (
        "import os, signal, sys, threading, time\n"
        "delay = float(sys.argv.pop())\n"
        "def send():\n"
        "    time.sleep(delay)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "from replay import interrupt\n"
        "threading.Thread(target=send, daemon=True).start()\n"
        "from replay.cli import main\n"
        "main()\n"
        "time.sleep(5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "merge", str(tmp_path), "-o", str(tmp_path / "out.h5"), str(delay)],
        cwd=Path(cli.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Traceback" not in done.stderr
    assert done.returncode in (130, 4), (
        "interrupted, or faster than the signal: there is no trace in the folder"
    )
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_that_nobody_could_handle_is_told_again() -> None:
    """In the callback of a weak reference Python prints KeyboardInterrupt and goes on."""
    code = (
        "import os, signal, sys, time, weakref\n"
        "from replay import cli\n"
        "class Thing: pass\n"
        "def gone(_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "def run(args):\n"
        "    thing = Thing()\n"
        "    seen = weakref.ref(thing, gone)\n"
        "    del thing\n"
        "    time.sleep(20)\n"
        "    return 0\n"
        "cli.run = run\n"
        "cli.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_after_the_end_of_a_command_does_not_change_its_code() -> None:
    code = (
        "import atexit, os, signal\n"
        "from replay import cli\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "cli.run = lambda args: 3\n"
        "cli.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_stream_that_the_shell_closed_is_no_error(stream: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m replay explain F09 {stream}>&-', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("args", ["explain", "explain F09", "--help"])
def test_output_that_goes_to_a_full_disk_is_told_as_such(args: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m replay {args} >/dev/full', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    told = "replay: cannot write the output: the disk where it goes is full. Make room on it\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    "args", [["demo", "--list-faults"], ["plot", "--list-kinds"], *(["explain", code] for code in VOCABULARY)]
)
def test_what_people_read_fits_into_80_columns(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(args) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("  " in line.lstrip() for line in lines if args[0] == "explain")


def test_a_demo_whose_disk_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pair:
        transport, note = "tcp", "a note"

        def __init__(self, environ: dict[str, str], transport: str) -> None:
            (Path(environ["KV_REPLAY_CAPTURE"]) / "decode-0-aa.journal").touch()

        def __enter__(self) -> Pair:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, config: object) -> object:
            return types.SimpleNamespace(stats={"seconds": 1.0})

    monkeypatch.setattr("replay.lab.run.Pair", Pair)

    assert cli.run(["demo", "-q", "-o", str(tmp_path / "demo")]) == 2

    said = capsys.readouterr().err
    assert f"cannot write '{tmp_path / 'demo' / 'capture-4'}': nothing of the recording" in said
    assert "Make room on the disk" in said


def test_a_note_of_the_demo_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    from replay.commands.demo import _Say

    say = _Say(quiet=True)
    for note in ("no NIXL", "", "no NIXL"):
        say("a line", note)

    assert capsys.readouterr().err == "replay: no NIXL\n"


@pytest.mark.parametrize("name", cli.available())
def test_every_command_knows_h(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "-h"]) == 0
    assert "-h, --help" in capsys.readouterr().out


def test_what_writes_a_file_never_does_so_silently_over_another() -> None:
    """The demo owns its folder."""
    for name in set(cli.available()) - {"demo"}:
        options = {
            opt for p in importlib.import_module(cli.COMMANDS[name].module).command.params for opt in p.opts
        }
        assert ("--out" in options) <= ("--force" in options), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("name", ["replay", "kv-replay"])
def test_a_shell_gets_its_completions(name: str, shell: str) -> None:
    variable = cli.COMPLETION[name]

    done = subprocess.run(
        [sys.executable, "-c", "from replay.cli import main; main()"],
        env={**os.environ, variable: f"{shell}_source"}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert f"{variable}={shell}_complete" in done.stdout, done.stderr


def test_commands_options_and_traces_are_completed() -> None:
    def offered(words: str, cword: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", "from replay.cli import main; main()"],
            env={**os.environ, "_REPLAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(cword)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout.split()

    assert {"plain,plot", "file,pl"} <= set(offered("replay pl", 1))
    assert {"plain,grid", "plain,bytes"} <= set(offered("replay plot --kind ", 3))
    assert "plain,--markdown" in offered("replay report --m", 2)


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from analysis import plots
    from tests.scenarios.scene import Job, Scene

    scene = Scene(tmp_path)
    scene.healthy(Job(5, 0, 64, [1], [2]))
    scene.close()
    path = str(scene.paths[0])
    before = sorted(tmp_path.iterdir())

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def half(figure: object, out: Path) -> None:
        out.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(plots, "save", half)
    assert cli.run(["plot", path, "-o", str(tmp_path / "x.png")]) == 130
    monkeypatch.setattr(Path, "replace", interrupted)
    assert cli.run([path, "--no-reexecute", "-o", str(tmp_path / "x.json")]) == 130
    monkeypatch.setattr("replay.trace.merge._copy_table", interrupted)
    assert cli.run(["merge", path, "-o", str(tmp_path / "x.h5")]) == 130
    assert cli.run(["trim", path, "--request", "5", "-o", str(tmp_path / "x.h5")]) == 130
    assert sorted(tmp_path.iterdir()) == before
