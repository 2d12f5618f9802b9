from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.events import Alloc, Content, Loss, Process, Request, Snapshot
from capture_hooks.journal import JournalWriter
from capture_hooks.layouts import LAYOUTS
from capture_hooks.options import Options
from replay.trace import writer as writer_module
from replay.trace.errors import TraceError
from replay.trace.reader import open_trace
from replay.trace.seal import seal
from replay.trace.verify import verify
from replay.writing import WriteError
from tests.unit.trace_samples import everything, journal, pages

ROOT = Path(__file__).parents[2]


def test_every_record_of_a_journal_is_in_the_trace(tmp_path: Path) -> None:
    events = [Alloc(room=room, pages=np.arange(room)) for room in range(300)]
    events.append(
        Content(format="fp8", digests=digest_pages(LAYOUTS["fp8"], pages(1, 9)).digests, data=pages(1, 9))
    )
    told: list[tuple[str, int, int]] = []
    path = journal(tmp_path / "prefill-0-aa.journal", events=[*events, *[Request(room=1)] * 1000])
    sealed = seal([path], tmp_path / "out.h5", progress=lambda *state: told.append(state))
    with open_trace(tmp_path / "out.h5") as trace:
        alloc = trace.table("alloc")
        assert alloc["room"].tolist() == list(range(300))
        assert [len(part) for part in alloc.ragged("pages")] == list(range(300))
        assert trace.table("content").ragged("content")[0].tolist() in ([0], [2])
        assert trace.contents.has_data[0]
        assert trace.processes[0].ended
        total = sum(
            len(trace.table(name))
            for name in ("process", "buffer", "alloc", "content", "request", "snapshot")
        )
        assert sealed[0].events == total + len(trace.table("store")) + len(trace.table("clock"))
    assert told
    assert not verify(tmp_path / "out.h5").problems


def test_bytes_that_come_after_the_snapshots_are_found_by_their_digests(tmp_path: Path) -> None:
    found = digest_pages(LAYOUTS["fp8"], pages(2))
    path = tmp_path / "prefill-0-bb.journal"
    log = JournalWriter(path, Process(role="prefill", run="bb"), Options())
    log.write(
        Snapshot(
            stage="ST",
            pages=np.arange(2),
            digests=found.digests,
            row_values=found.row_values,
            row_scales=found.row_scales,
        )
    )
    log.write(Content(format="fp8", digests=found.digests[1:], data=pages(2)[1:]))
    log.close()
    with open_trace(path) as trace:
        assert trace.table("snapshot").ragged("content")[0].tolist() == [0, 1]
        assert trace.table("snapshot").ragged("logical")[0].tolist() == [-1, -1]
        assert trace.table("content").ragged("content")[0].tolist() == [1]
        assert trace.contents.has_data.tolist() == [False, True]
        np.testing.assert_array_equal(trace.contents.data([1]), pages(2)[1:])


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_cut_journal_gives_all_that_is_whole_and_says_what_is_not(share: float, tmp_path: Path) -> None:
    path = tmp_path / "prefill-0-aa.journal"
    log = JournalWriter(path, Process(role="prefill", run="aa"), Options())
    ends = []
    for room in range(50):
        log.write(Request(room=room))
        log.flush()
        ends.append(log.written)
    log.close()
    size = int(path.stat().st_size * share)
    os.truncate(path, size)
    sealed = seal([path], tmp_path / "out.h5")
    assert not sealed[0].ended
    whole = sum(end <= size for end in ends)
    with open_trace(tmp_path / "out.h5") as trace:
        assert trace.table("request")["room"].tolist() == list(range(whole))
        assert trace.processes[0].journal_bytes == size
        assert not trace.processes[0].ended
        if size not in ends:
            assert "unfinished" in trace.processes[0].cut or "cut" in trace.processes[0].cut


def test_damage_in_the_middle_costs_what_was_there_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prefill-0-aa.journal"
    log = JournalWriter(path, Process(role="prefill", run="aa"), Options())
    marks = []
    for room in range(10):
        marks.append(log.written)
        log.write(Request(room=room))
        log.flush()
    log.close()
    data = bytearray(path.read_bytes())
    data[marks[4] + 80] ^= 1
    path.write_bytes(data)
    with open_trace(path) as trace:
        assert trace.table("request")["room"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert trace.processes[0].ended
        assert "records missing" in trace.processes[0].cut


def test_who_wrote_a_journal_is_known_from_its_name_when_its_first_records_are_lost(tmp_path: Path) -> None:
    path = journal(tmp_path / "decode-3-ab12.journal", "decode")
    data = bytearray(path.read_bytes())
    second = data.index(data[:8], 8)  # the magic of the frame with the process record
    data[second + 60] ^= 0xFF
    path.write_bytes(data)
    with open_trace(path) as trace:
        process = trace.processes[0]
        assert (process.role, process.rank, process.run) == ("decode", 3, "ab12")
        assert process.cut
        assert len(trace.table("snapshot")) == 1


def test_journals_of_nothing_and_of_another_kind_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    for content in (b"", b"not a journal at all, only some text that is long enough to be looked at" * 3):
        path = tmp_path / "prefill-0-aa.journal"
        path.write_bytes(content)
        with pytest.raises(TraceError) as caught:
            seal([path], tmp_path / "out.h5")
        assert str(path) in caught.value.where
        assert [item.name for item in tmp_path.iterdir()] == [path.name]
    with pytest.raises(TraceError, match="cannot be opened"):
        seal([tmp_path / "no.journal"], tmp_path / "out.h5")


def test_ctrl_c_while_sealing_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal")
    old = tmp_path / "prefill-0-aa.h5"
    old.write_bytes(b"old")

    def interrupted(self: object, table: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer_module.TraceWriter, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        seal([path], old, replace=True)
    assert old.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal")

    def full(self: object, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module.Appender, "append", full)
    with pytest.raises(WriteError, match="the disk is full"):
        seal([path], tmp_path / "out.h5")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_trace_may_be_read_by_no_more_people_than_its_journals(tmp_path: Path) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal")
    path.chmod(0o600)
    seal([path], tmp_path / "out.h5")
    assert stat.S_IMODE((tmp_path / "out.h5").stat().st_mode) == 0o600


def test_the_child_seals_each_journal_beside_itself_and_reports_failure(tmp_path: Path) -> None:
    good = journal(tmp_path / "prefill-0-aa.journal")
    bad = tmp_path / "decode-0-bb.journal"
    bad.write_bytes(b"")
    command = [sys.executable, "-X", "importtime", "-m", "replay.trace.seal", str(good), str(bad)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert "decode-0-bb.journal: it has no whole record" in done.stderr
    assert "torch" not in done.stderr
    assert "click" not in done.stderr
    assert not verify(good.with_suffix(".h5")).problems


def test_several_sealings_of_one_journal_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal", events=[Request(room=room) for room in range(2000)])
    with open_trace(path) as trace:
        wanted = everything(trace)
    (tmp_path / "prefill-0-aa.h5").unlink()
    command = [sys.executable, "-m", "replay.trace.seal", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda _: subprocess.run(command, env=env, check=False).returncode, range(3)))
    assert codes == [0, 0, 0]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["prefill-0-aa.h5", "prefill-0-aa.journal"]
    with open_trace(path) as trace:
        assert everything(trace) == wanted


def test_losses_are_in_the_trace(tmp_path: Path) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal", events=[Loss(stage="queue", what="snapshot", count=5)])
    with open_trace(path) as trace:
        assert (trace.table("loss")["stage"].tolist(), trace.table("loss")["count"].tolist()) == (
            ["queue"],
            [5],
        )


def test_events_wait_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_ALL_WAITING_BYTES", 4096)
    flushed: list[str] = []
    original = writer_module.TraceWriter.flush

    def counting(self: writer_module.TraceWriter, table: str) -> None:
        flushed.append(table)
        original(self, table)

    monkeypatch.setattr(writer_module.TraceWriter, "flush", counting)
    path = journal(tmp_path / "prefill-0-aa.journal", events=[Request(room=room) for room in range(100)])
    seal([path], tmp_path / "out.h5")
    assert len(flushed) > 100 * 256 // 4096
    with open_trace(tmp_path / "out.h5") as trace:
        assert trace.table("request")["room"].tolist() == list(range(100))
