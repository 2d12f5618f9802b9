from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay import trim as module
from replay.cli import run
from replay.rooms import NotInTraceError
from replay.scope import Scope
from replay.trace.builder import TraceBuilder
from replay.trace.merge import merge
from replay.trace.reader import open_trace
from replay.trace.verify import verify
from replay.trim import trim
from replay.verdict import Verdict
from tests.scenarios.outcome import verdict_of_paths
from tests.scenarios.scene import Scene
from tests.scenarios.side import Job
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.unit.trace_samples import pages


def rooms(*numbers: int) -> Scope:
    return Scope(rooms=frozenset(numbers))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rooms 1 and 2 share page 6 of the decode side; room 3 shares nothing; transfers 1, 2, 3 are theirs."""
    with TraceBuilder(tmp_path / "t.h5") as builder:
        prefill, decode = builder.process(role="prefill"), builder.process(role="decode")
        for process in (prefill, decode):
            process.buffer(buffer=0)
            process.hooks_complete("store")
        for room, held in ((1, [5, 6]), (2, [6, 7]), (3, [1, 2])):
            decode.alloc(room=room, pages=held)
            prefill.alloc(room=room, pages=[room * 10, room * 10 + 1])
            prefill.store(room=room, buffer=0, slots=[room * 640], keys=np.full((1, 128), room))
            prefill.send(transfer=room, room=room)
            prefill.transfer_state(state="posted", transfer=room)
            prefill.snapshot(
                stage="SE", transfer=room, buffer=0, logical=[0], pages=[room * 10], data=pages(1, room)
            )
            decode.snapshot(stage="RC", room=room, buffer=0, logical=[0, 1], pages=held, data=pages(2, room))
        prefill.transfer_state(state="posted", transfer=99)
        decode.snapshot(stage="RD", buffer=0, logical=[0], pages=[1], digests=[[8, 9]])
    return tmp_path / "t.h5"


def test_the_request_its_transfers_and_what_belongs_to_nobody_stay(path: Path, tmp_path: Path) -> None:
    done = trim([path], tmp_path / "out.h5", rooms(3))
    assert (done.rooms, done.requests, done.level) == ((3,), 1, 0)
    with open_trace(tmp_path / "out.h5") as trace:
        assert trace.table("alloc")["room"].tolist() == [3, 3]
        assert trace.table("send")["transfer"].tolist() == [3]
        assert trace.table("transfer_state")["transfer"].tolist() == [3, 99]
        assert trace.table("snapshot")["stage"].tolist() == ["SE", "RC", "RD"]
        assert len(trace.table("buffer")) == len(trace.table("hook")) == 2
        assert len(trace.contents) == 3
        received = trace.table("snapshot").ragged("content")[1]
        np.testing.assert_array_equal(trace.contents.data(received), pages(2, 3))
        np.testing.assert_array_equal(trace.table("store").bulk("keys", 0), np.full((1, 128), 3))
        assert [process.ended for process in trace.processes] == [True, True]
    assert not verify(tmp_path / "out.h5").problems
    assert (tmp_path / "out.h5").stat().st_size < path.stat().st_size


def test_requests_that_held_a_page_of_it_stay_too_unless_it_is_to_be_alone(
    path: Path, tmp_path: Path
) -> None:
    assert trim([path], tmp_path / "both.h5", rooms(1)).requests == 2
    assert trim([path], tmp_path / "alone.h5", rooms(1), alone=True).requests == 1


def test_attempts_are_counted_as_requests_and_records_of_trimming_as_none_of_the_trace(
    tmp_path: Path,
) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        decode = builder.process(role="decode")
        decode.buffer(buffer=0)
        for room, attempt in ((1, 0), (1, 1), (2, 0)):
            decode.alloc(room=room, attempt=attempt, pages=[3 * room + attempt])

    one = trim([tmp_path / "t.h5"], tmp_path / "one.h5", rooms(1))
    assert (one.own, one.requests, one.known) == (2, 2, 3)
    assert one.of - one.records == 1
    both = trim([tmp_path / "t.h5"], tmp_path / "both.h5", rooms(1, 2))
    assert (both.own, both.requests, both.known) == (3, 3, 3)
    assert both.records == both.of


def test_what_was_left_out_is_scope_and_no_loss(path: Path, tmp_path: Path) -> None:
    trim([path], tmp_path / "out.h5", rooms(3))
    with open_trace(tmp_path / "out.h5") as trace, open_trace(path) as before:
        assert len(trace.table("loss")) == 0
        told = trace.table("trim")
        assert [values.tolist() for values in told.ragged("rooms")] == [[3], [3]]
        assert len(set(told["run"])) == 1
        counts = [len(before.table(name)) - len(trace.table(name)) for name in ("alloc", "store", "send")]
        assert counts == [4, 2, 2]
        assert told["left_out"].tolist() == [10, 4]
        assert (told["seq"] > 7).all()


def test_evidence_left_out_by_alone_is_told_as_lost(path: Path, tmp_path: Path) -> None:
    done = trim([path], tmp_path / "out.h5", rooms(1), alone=True)
    with open_trace(tmp_path / "out.h5") as trace:
        loss = trace.table("loss")
        found = dict(zip(zip(loss["process"], loss["what"], strict=True), loss["count"], strict=True))
        assert found[1, "alloc"] == found[0, "send"] == 1
        assert set(loss["stage"]) == {"trim"}
        assert sum(found.values()) == done.lost


def test_payload_can_be_left_out(path: Path, tmp_path: Path) -> None:
    trim([path], tmp_path / "out.h5", rooms(3), payload=False)
    with open_trace(tmp_path / "out.h5") as trace:
        assert not trace.contents.has_data.any()
        assert trace.table("store").bulk_size("keys").tolist() == [0]
        assert (trace.contents.rows > 0).sum() == 2
        received = trace.table("snapshot").ragged("content")[1]
        assert trace.contents.row_values(received).shape == (2, 64)
    assert pages(1, 3).tobytes()[:64] not in (tmp_path / "out.h5").read_bytes()


@pytest.mark.parametrize(
    ("scope", "named"),
    [
        (Scope(rooms=frozenset({1, 4})), "room 4"),
        (Scope(layers=frozenset({0, 9})), "layer 9"),
        (Scope(logical=frozenset({7})), "logical page 7"),
    ],
)
def test_what_is_not_there_is_an_error_and_no_file(
    path: Path, tmp_path: Path, scope: Scope, named: str
) -> None:
    with pytest.raises(NotInTraceError, match=f"there is no {named} in "):
        trim([path], tmp_path / "out.h5", scope)
    assert not (tmp_path / "out.h5").exists()


def test_a_page_alone_leaves_the_other_looks_of_its_snapshots_out(path: Path, tmp_path: Path) -> None:
    trim([path], tmp_path / "out.h5", Scope(frozenset({3}), logical=frozenset({1})))
    with open_trace(tmp_path / "out.h5") as trace:
        table = trace.table("snapshot")
        received = [row for row in range(len(table)) if table["stage"][row] == "RC"]
        assert [table.ragged("logical")[row].tolist() for row in received] == [[1]]
        assert [table.ragged("pages")[row].tolist() for row in received] == [[2]]
        np.testing.assert_array_equal(
            trace.contents.data(table.ragged("content")[received[0]]), pages(2, 3)[1:]
        )
    assert not verify(tmp_path / "out.h5").problems


def test_only_requests_of_the_last_seconds_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(7000, 0, 64, [21], [5]), finish=True)
    scene.at(5_000)
    scene.healthy(Job(7001, 1, 64, [22], [6]), finish=True)
    scene.close()
    done = trim(scene.paths, tmp_path / "out.h5", Scope(), last=2.0)
    assert done.rooms == (7001,)
    assert done.verdict == "clean"
    with open_trace(tmp_path / "out.h5") as trace:
        assert "active in the last 2 s" in trace.table("trim")["choice"][0]


def test_a_part_of_a_part_is_what_both_allow(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, layers=(0, 3)))
    scene.close()
    trim(scene.paths, tmp_path / "one.h5", Scope(layers=frozenset({3})))
    trim([tmp_path / "one.h5"], tmp_path / "two.h5", rooms(7001))
    verdict = verdict_of_paths([tmp_path / "two.h5"])
    assert verdict.scope["cut_to"] == {"rooms": [7001], "layers": [3]}
    assert [(f.code, f.layer) for f in verdict.findings] == [("F14", 3)]


def test_sides_that_were_cut_down_apart_and_joined_prove_no_absence(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, split=True))
    scene.close()
    for name in ("prefill", "decode"):
        trim([tmp_path / f"{name}.h5"], tmp_path / f"{name}-cut.h5", rooms(7001))
    merge([tmp_path / "prefill-cut.h5", tmp_path / "decode-cut.h5"], tmp_path / "joined.h5")
    verdict = verdict_of_paths([tmp_path / "joined.h5"])
    assert {f.code for f in verdict.findings} <= {"F14"}
    assert verdict.verdict != "clean"
    assert any("trim them together" in item.why for item in verdict.not_judged)


def test_a_part_that_was_not_judged_to_the_end_has_no_name_yet(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.h5"
    out.write_bytes(b"the part of yesterday")
    whole, calls = module.judge, []

    def interrupted(*args: Any) -> Verdict:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(module, "judge", interrupted)
    assert run(["trim", str(path), "--request", "3", "-o", str(out), "--force"]) == 130
    assert len(calls) == 2
    assert out.read_bytes() == b"the part of yesterday"
    assert {item.name for item in tmp_path.iterdir()} == {"t.h5", "out.h5"}


def test_the_command_trims(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.h5"
    assert run(["trim", str(path), "--request", "3", "-o", str(out)]) == 0
    assert "1 request, " in capsys.readouterr().out
    assert run(["trim", str(path), "--request", "3", "-o", str(out)]) == 2
    assert run(["trim", str(path), "--request", "9", "-o", str(tmp_path / "no.h5")]) == 2
    assert run(["trim", str(path), "-o", str(tmp_path / "no.h5")]) == 2
    assert run(["trim", str(path), "--page", "3-1", "-o", str(tmp_path / "no.h5")]) == 2
    assert run(["trim", str(path), "--request", "1", "--alone", "-o", str(tmp_path / "alone.h5")]) == 3
