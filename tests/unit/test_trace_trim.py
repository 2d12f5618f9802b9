from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay.cli import run
from replay.trace.builder import TraceBuilder
from replay.trace.errors import TraceError
from replay.trace.reader import open_trace
from replay.trace.trim import trim
from replay.trace.verify import verify
from tests.unit.trace_samples import pages


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
            prefill.store(room=room, buffer=0, keys=np.full((1, 128), room))
            prefill.send(transfer=room, room=room)
            prefill.transfer_state(state="posted", transfer=room)
            prefill.snapshot(stage="SE", transfer=room, buffer=0, pages=[room * 10], data=pages(1, room))
            decode.snapshot(stage="RC", room=room, buffer=0, pages=held, data=pages(2, room))
        prefill.transfer_state(state="posted", transfer=99)
        decode.snapshot(stage="RD", buffer=0, pages=[1], digests=[[8, 9]])
    return tmp_path / "t.h5"


def test_the_request_its_transfers_and_what_belongs_to_nobody_stay(path: Path, tmp_path: Path) -> None:
    done = trim([path], tmp_path / "out.h5", [3])
    assert done.rooms == (3,)
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
    assert trim([path], tmp_path / "both.h5", [1]).rooms == (1, 2)
    assert trim([path], tmp_path / "alone.h5", [1], neighbours=False).rooms == (1,)


def test_what_was_left_out_is_told_as_lost(path: Path, tmp_path: Path) -> None:
    trim([path], tmp_path / "out.h5", [3])
    with open_trace(tmp_path / "out.h5") as trace, open_trace(path) as before:
        loss = trace.table("loss")
        found = dict(zip(zip(loss["process"], loss["what"], strict=True), loss["count"], strict=True))
        assert found == {
            (0, "alloc"): 2,
            (0, "store"): 2,
            (0, "send"): 2,
            (0, "transfer_state"): 2,
            (0, "snapshot"): 2,
            (1, "alloc"): 2,
            (1, "snapshot"): 2,
        }
        assert set(loss["stage"]) == {"trim"}
        for row in range(len(loss)):
            table = before.table(loss["what"][row])
            seqs = table["seq"][table["process"] == loss["process"][row]]
            assert seqs.min() == loss["first_seq"][row]
            assert loss["last_seq"][row] < seqs.max()
            assert loss["seq"][row] > seqs.max()


def test_payload_can_be_left_out(path: Path, tmp_path: Path) -> None:
    trim([path], tmp_path / "out.h5", [3], payload=False)
    with open_trace(tmp_path / "out.h5") as trace:
        assert not trace.contents.has_data.any()
        assert trace.table("store").bulk_size("keys").tolist() == [0]
        assert (trace.contents.rows > 0).sum() == 2
        received = trace.table("snapshot").ragged("content")[1]
        assert trace.contents.row_values(received).shape == (2, 64)
    assert pages(1, 3).tobytes()[:64] not in (tmp_path / "out.h5").read_bytes()


def test_a_room_that_is_not_there_is_an_error_and_no_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="room 4"):
        trim([path], tmp_path / "out.h5", [1, 4])
    assert not (tmp_path / "out.h5").exists()


def test_the_command_trims(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.h5"
    assert run(["trim", str(path), "--room", "3", "-o", str(out)]) == 0
    assert "1 requests, " in capsys.readouterr().out
    assert run(["trim", str(path), "--room", "3", "-o", str(out)]) == 2
    assert run(["trim", str(path), "--room", "9", "-o", str(tmp_path / "no.h5")]) == 4
