from __future__ import annotations

import os
from pathlib import Path

import pytest

from capture_hooks.events import Request
from replay.trace import sources
from replay.trace.errors import TraceError
from replay.trace.merge import merge
from replay.trace.reader import open_trace
from replay.trace.seal import seal
from tests.unit.trace_samples import everything, journal, small_trace


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_of_journals_is_sealed_and_read_as_one_trace(tmp_path: Path) -> None:
    journal(tmp_path / "decode-0-bb.journal", "decode")
    journal(tmp_path / "prefill-0-aa.journal")
    with open_trace(tmp_path) as trace:
        assert [(process.role, process.run, process.ended) for process in trace.processes] == [
            ("prefill", "aa", True),
            ("decode", "bb", True),
        ]
        assert [part.tolist() for part in trace.table("snapshot").ragged("content")] == [[0, 1], [0, 1]]
        assert trace.problems == ()
    assert names(tmp_path) == [
        "decode-0-bb.h5",
        "decode-0-bb.journal",
        "prefill-0-aa.h5",
        "prefill-0-aa.journal",
    ]


def test_a_sealed_file_is_used_while_its_journal_has_not_grown_and_made_again_when_it_has(
    tmp_path: Path,
) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal", end=False)
    with open_trace(path) as trace:
        assert not trace.processes[0].ended
        records = len(trace.table("clock"))
    sealed = tmp_path / "prefill-0-aa.h5"
    before = sealed.stat().st_ino
    os.utime(path, (2**33, 2**33))  # copies of a folder have any times
    with open_trace(tmp_path):
        pass
    assert sealed.stat().st_ino == before
    with path.open("ab") as file:
        file.write(b"the next frame, not whole yet")
    with open_trace(tmp_path) as trace:
        assert sealed.stat().st_ino != before
        assert "byte" in trace.processes[0].cut
        assert len(trace.table("clock")) == records


def test_a_file_that_was_not_sealed_from_the_journal_is_never_written_over(tmp_path: Path) -> None:
    path = journal(tmp_path / "prefill-0-aa.journal")
    foreign = tmp_path / "prefill-0-aa.h5"
    for make in (lambda: foreign.write_bytes(b"somebody's work"), lambda: small_trace(foreign)):
        make()
        before = foreign.read_bytes()
        with open_trace(path) as trace:
            temporary = trace.paths[0]
            assert temporary.parent != tmp_path
            assert trace.processes[0].run == "aa"
        assert not temporary.exists()
        assert foreign.read_bytes() == before
        foreign.unlink()


def test_a_folder_that_cannot_be_written_is_sealed_elsewhere_and_that_goes_on_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / role).mkdir()
        journal(tmp_path / role / f"{role}-0-xx{role}.journal", role)
    monkeypatch.setattr(sources.os, "access", lambda path, mode: False)
    with open_trace(tmp_path / "prefill", tmp_path / "decode") as trace:
        assert len(trace.processes) == 2
        temporary = trace.paths[0].parent
        assert len(names(temporary)) == 2
    assert not temporary.exists()
    assert names(tmp_path / "prefill") == ["prefill-0-xxprefill.journal"]


def test_a_merged_file_beside_what_it_was_made_of_is_left_out(tmp_path: Path) -> None:
    journal(tmp_path / "prefill-0-aa.journal")
    journal(tmp_path / "decode-0-bb.journal", "decode")
    merge([tmp_path], tmp_path / "a-merged.h5")
    with open_trace(tmp_path) as trace, open_trace(tmp_path / "a-merged.h5") as merged:
        assert len(trace.processes) == 2
        assert [path.name for path in trace.paths] == ["prefill-0-aa.h5", "decode-0-bb.h5"]
        assert everything(trace) == everything(merged)
    with pytest.raises(TraceError, match="Give one of the two"):
        open_trace(tmp_path / "decode-0-bb.h5", tmp_path / "a-merged.h5")


def test_a_path_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "t.h5")
    with open_trace(path, tmp_path, tmp_path / "." / "t.h5") as trace:
        assert len(trace.processes) == 1


def test_a_journal_without_a_whole_record_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    journal(tmp_path / "prefill-0-aa.journal")
    (tmp_path / "decode-0-bb.journal").write_bytes(b"")
    (tmp_path / "decode-0-cc.journal").write_bytes((tmp_path / "prefill-0-aa.journal").read_bytes()[:40])
    with open_trace(tmp_path) as trace:
        assert len(trace.processes) == 1
        assert len(trace.problems) == 2
        assert "decode-0-bb.journal: it has no whole record" in trace.problems[0]
    assert "decode-0-bb.h5" not in names(tmp_path)
    with pytest.raises(TraceError, match="leave this file out"):
        open_trace(tmp_path / "decode-0-bb.journal")


@pytest.mark.parametrize("content", [None, b"", b"\x89HDF\r\n\x1a\n" + bytes(100), b"text"])
def test_what_cannot_be_opened_says_what_where_and_what_next(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert str(path) in caught.value.where
    assert caught.value.what
    assert caught.value.todo


def test_an_empty_folder_and_no_path_at_all_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace and no journal"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="no trace was given"):
        open_trace()


def test_without_merge_a_second_file_is_an_error(tmp_path: Path) -> None:
    small_trace(tmp_path / "a.h5")
    small_trace(tmp_path / "b.h5")
    with pytest.raises(TraceError, match="2 traces"):
        open_trace(tmp_path, merge=False)
    with open_trace(tmp_path / "a.h5", merge=False) as trace:
        assert len(trace.processes) == 1


def test_merging_does_not_depend_on_the_order_of_files_and_loses_nothing(tmp_path: Path) -> None:
    paths = [
        small_trace(tmp_path / f"{role}.h5", role, seed) for seed, role in enumerate(("decode", "prefill"))
    ]
    for name, order in (("one.h5", paths), ("two.h5", paths[::-1])):
        merge(order, tmp_path / name)
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()
    with open_trace(*paths) as apart, open_trace(tmp_path / "one.h5") as together:
        assert everything(apart) == everything(together)
        assert len(apart.contents) == len(together.contents)


def test_a_merge_onto_one_of_its_sources_is_refused(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "t.h5")
    before = path.read_bytes()
    with pytest.raises(TraceError, match="one of the traces"):
        merge([path], path, replace=True)
    assert path.read_bytes() == before


def test_sealing_several_journals_into_one_file_equals_merging_them(tmp_path: Path) -> None:
    events = [Request(room=room) for room in range(3)]
    paths = [
        journal(tmp_path / "prefill-0-aa.journal", events=list(events)),
        journal(tmp_path / "decode-0-bb.journal", "decode", seed=4),
    ]
    seal(paths, tmp_path / "sealed.h5")
    with open_trace(*paths) as apart, open_trace(tmp_path / "sealed.h5") as together:
        assert everything(apart) == everything(together)


def test_a_folder_of_captures_names_them(tmp_path: Path) -> None:
    for name in ("capture-4", "capture-60"):
        (tmp_path / name).mkdir()
        journal(tmp_path / name / "prefill-0-aa.journal")
    with pytest.raises(
        TraceError, match=r"There are captures in .*capture-4, .*capture-60: give one of them"
    ):
        open_trace(tmp_path)


def test_a_trace_beside_captures_is_what_a_folder_means(tmp_path: Path) -> None:
    """As the demo leaves it: the merged trace, and the journals it was made of one level down."""
    (tmp_path / "capture-60").mkdir()
    journal(tmp_path / "capture-60" / "prefill-0-aa.journal")
    small_trace(tmp_path / "trace.h5")
    with open_trace(tmp_path) as trace:
        assert [path.name for path in trace.paths] == ["trace.h5"]
