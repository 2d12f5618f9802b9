from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay.cli import run
from replay.trace.builder import TraceBuilder
from replay.trace.reader import open_trace
from tests.unit.trace_samples import everything, journal, pages, small_trace


def call(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = run([str(arg) for arg in args])
    done = capsys.readouterr()
    return code, done.out, done.err


def lossy(path: Path) -> Path:
    with TraceBuilder(path) as builder:
        prefill, decode = builder.process(role="prefill", mode="digest"), builder.process(role="decode")
        prefill.hook(name="lab.store", covers="store", fired=0)
        prefill.hook(name="lab.send", covers="send", fired=4, state="detached", note="ValueError, 3 times")
        prefill.hook(name="lab.alloc", covers="alloc", fired=4, complete=False)
        prefill.hook(name="lab.read", covers="read", fired=0)
        prefill.hook(name="lab.read", covers="read", fired=9)  # the last record holds
        prefill.loss(stage="queue", what="snapshot", count=3, reason="the queue was full")
        prefill.loss(stage="queue", what="snapshot", count=4, reason="the queue was full")
        prefill.snapshot(stage="ST", pages=[1], digests=[[1, 2]])
        decode.killed("an unfinished frame at byte 99")
    return path


def test_info_says_first_what_is_missing_then_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "info", lossy(tmp_path / "t.h5"))
    assert code == 0
    missing, there = out.split("There\n")
    assert missing.splitlines() == [
        "Missing",
        "  decode 0: its journal is cut: an unfinished frame at byte 99",
        "  decode 0: no end recorded: it was killed, or is still alive",
        "  prefill 0: 7 snapshot records lost at the queue: the queue was full",
        "  prefill 0: hook lab.send (send) is detached: ValueError, 3 times",
        "  prefill 0: hook lab.alloc (alloc) does not see everything",
        "  decode 0: no hook was told, so absence of a record proves nothing",
        "  no page bytes were kept: differing bytes cannot be shown, only differing rows",
        "1 attached hook never fired: lab.store (-v lists them)",
    ]
    assert "prefill 0  mode digest" in there
    assert "snapshots ST: 1, 1 page\n" in there


def test_hooks_that_never_fired_are_one_line_and_a_list_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        for role in ("prefill", "decode"):
            process = builder.process(role=role)
            for name in ("a", "b", "c", "d"):
                process.hook(name=f"lab.{name}", covers="order", fired=0)
            process.hook(name="lab.e", covers="store", fired=1)
            process.hook(name="lab.f", covers="send", fired=0, state="missing", note="no such function")
    code, out, _ = call(capsys, "info", tmp_path / "t.h5")
    assert code == 0
    assert out.splitlines()[:4] == [
        "Missing",
        "  prefill 0: hook lab.f (send) is missing: no such function",
        "  decode 0: hook lab.f (send) is missing: no such function",
        "8 attached hooks never fired: lab.a, lab.b, lab.c, ... (-v lists them)",
    ]
    assert out.splitlines()[4] == "There"

    _, out, _ = call(capsys, "info", "-v", tmp_path / "t.h5")
    assert "8 attached hooks never fired\n  prefill 0: lab.a (order)\n" in out

    _, out, _ = call(capsys, "info", "--json", tmp_path / "t.h5")
    body = json.loads(out)
    assert body["never_fired"][0] == {"process": "prefill 0", "hook": "lab.a", "covers": "order"}
    assert len(body["never_fired"]) == 8
    assert len(body["missing"]) == 2


def test_what_is_told_of_a_trace_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TraceBuilder(Path("t.h5")) as builder:
        process = builder.process(role="prefill")
        process.hook(name="lab.store", covers="store", state="missing", note="it was not there " * 9)
        process.killed("an unfinished frame, and what stands before it " * 3)
        for number in range(40):
            process.hook(name=f"lab.{number}", covers="order", fired=0)
    for arguments in (["info"], ["verify"]):
        _, out, _ = call(capsys, *arguments, "t.h5")
        assert max(map(len, out.splitlines())) <= 80


def test_info_as_json_has_counts_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "info", small_trace(tmp_path / "t.h5"), "--json")
    body = json.loads(out)
    assert code == 0
    assert body["schema"] == "kv-replay/info/1"
    assert body["contents"] == {"distinct": 3, "with_row_digests": 3, "with_bytes": 3, "bytes": 3 * 8448}
    assert {"stage": "SE", "moment": "before", "snapshots": 1, "pages": 2} in body["snapshots"]
    assert body["requests"] == {"requests": 1, "phases": {"start": 1}}
    assert body["processes"][0]["buffers"] == [
        {"name": "index_k", "format": "fp8", "pages": 16, "pitch": 8448, "item_length": 8448, "layers": [0]}
    ]
    assert body["payload"]["read.logits"] == body["payload"]["store.keys"] == 1
    assert body["records"]["snapshot"] == 2
    assert "there is a prefill process but no decode process" in body["missing"]


def test_info_of_a_whole_pair_misses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        for role in ("prefill", "decode"):
            process = builder.process(role=role)
            process.hooks_complete()
            process.buffer(buffer=0)
            process.snapshot(stage="ST", buffer=0, pages=[0], data=pages(1))
    _, out, _ = call(capsys, "info", tmp_path / "t.h5")
    assert out.startswith("Missing: nothing that the trace knows of\nThere\n")


def test_verify_tells_whole_lossy_and_damaged_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_trace(tmp_path / "whole.h5", seed=1)
    code, out, _ = call(capsys, "verify", lossy(tmp_path / "lossy.h5"))
    assert code == 3
    assert "lossy.h5: whole" in out
    assert "lost while recording: prefill 0: 7 snapshot records lost at the queue" in out
    data = bytearray(path.read_bytes())
    data[data.index(pages(1, 1).tobytes()[:64])] ^= 1
    path.write_bytes(data)
    code, out, _ = call(capsys, "verify", path, "--json")
    body = json.loads(out)
    assert code == 4
    assert body["files"][0]["whole"] is False
    assert any("chunk 0" in problem["what"] for problem in body["files"][0]["problems"])
    code, out, _ = call(capsys, "verify", path)
    assert code == 4
    assert "DAMAGED" in out
    assert "Seal its journal again" in out
    with TraceBuilder(tmp_path / "clean.h5") as builder:
        builder.process(role="prefill")
    code, out, _ = call(capsys, "verify", tmp_path / "clean.h5")
    assert (code, out.splitlines()[0]) == (0, f"{tmp_path / 'clean.h5'}: whole")


@pytest.mark.parametrize(
    ("content", "advice"), [(b"no trace", "Give a trace (.h5)"), (b"", "Seal its journal again")]
)
def test_verify_says_what_to_do_with_a_file_that_cannot_be_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, advice: str
) -> None:
    path = tmp_path / "some.h5"
    path.write_bytes(content)
    code, out, _ = call(capsys, "verify", path)
    assert (code, advice in out) == (4, True), out


@pytest.mark.parametrize("command", ["info", "verify", "merge"])
def test_a_file_that_is_no_trace_is_exit_code_4_with_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.h5").write_text("text")
    more = ["-o", tmp_path / "out.h5"] if command == "merge" else []
    code, out, err = call(capsys, command, tmp_path / "t.h5", *more)
    assert code == 4
    assert "t.h5" in out + err
    assert "Traceback" not in out + err
    assert not (tmp_path / "out.h5").exists()


def test_seal_seals_a_folder_beside_the_journals_or_into_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal(tmp_path / "prefill-0-aa.journal")
    journal(tmp_path / "decode-0-bb.journal", "decode", end=False)
    code, out, _ = call(capsys, "seal", tmp_path)
    assert code == 0
    assert "prefill-0-aa.h5" in out
    assert "no end recorded: killed, or still alive" in out
    assert {path.name for path in tmp_path.glob("*.h5")} == {"prefill-0-aa.h5", "decode-0-bb.h5"}
    (tmp_path / "out").mkdir()
    one = tmp_path / "out" / "one.h5"
    assert call(capsys, "seal", tmp_path, "-o", one)[0] == 0
    with open_trace(tmp_path) as apart, open_trace(one) as together:
        assert everything(apart) == everything(together)
    code, _, err = call(capsys, "seal", tmp_path, "-o", one)
    assert code == 2
    assert "--force" in err
    assert call(capsys, "seal", tmp_path, "-o", one, "--force")[0] == 0
    code, _, err = call(capsys, "seal", one)
    assert code == 2
    assert "is a trace already" in err


def test_seal_goes_on_after_a_journal_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal(tmp_path / "prefill-0-aa.journal")
    (tmp_path / "decode-0-bb.journal").write_bytes(b"")
    code, _, err = call(capsys, "seal", tmp_path)
    assert code == 4
    assert "decode-0-bb.journal" in err
    assert (tmp_path / "prefill-0-aa.h5").exists()
    (tmp_path / "prefill-0-aa.journal").unlink()
    (tmp_path / "decode-0-bb.journal").unlink()
    assert call(capsys, "seal", tmp_path)[0] == 2


def test_merge_writes_one_file_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_trace(tmp_path / "a.h5")
    small_trace(tmp_path / "b.h5", "decode")
    journal(tmp_path / "prefill-0-aa.journal")
    (tmp_path / "decode-0-bb.journal").write_bytes(b"")
    code, out, err = call(capsys, "merge", tmp_path, "-o", tmp_path / "out.h5")
    assert code == 0
    assert str(tmp_path / "out.h5") in out
    assert "left out" in err
    with open_trace(tmp_path / "out.h5") as trace:
        assert len(trace.processes) == 3
    assert call(capsys, "merge", tmp_path / "a.h5", "-o", tmp_path / "out.h5")[0] == 2
