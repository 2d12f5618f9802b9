from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.digest import digest_pages, page_digests
from capture_hooks.events import EVENTS, Content, Process
from capture_hooks.layouts import LAYOUTS
from capture_hooks.records import schema
from replay.trace.builder import COVERS, ProcessBuilder, TraceBuilder
from replay.trace.reader import open_trace
from replay.writing import WriteError
from tests.unit.trace_samples import PAGE_BYTES, pages

ROOT = Path(__file__).parents[2]


def test_the_documented_example_runs_alone_in_an_empty_folder_and_prints_what_the_page_says(
    tmp_path: Path,
) -> None:
    text = (ROOT / "docs/building-traces.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S).groups()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == printed
    assert [path.name for path in tmp_path.iterdir()] == ["example.h5"]


def test_there_is_a_method_for_every_kind_of_record_but_those_that_the_builder_makes_itself() -> None:
    made = {event.TABLE for event in EVENTS if event not in (Process, Content)}
    assert made <= set(dir(ProcessBuilder))


def _value(name: str, kind: str, spec: object) -> object:
    if kind == "array":
        shape = [2 if n is None else n for n in spec.shape]
        return np.arange(np.prod(shape)).reshape(shape).astype(spec.dtype)
    return {"int": 41, "float": 0.5, "bool": True, "str": f"text {name}"}[kind]


@pytest.mark.parametrize("event", [e for e in EVENTS if e.TABLE not in ("process", "content", "snapshot")])
def test_every_field_of_every_record_comes_back_as_it_was_given(event: type, tmp_path: Path) -> None:
    given = {item.name: _value(item.name, item.type, item.array) for item in schema(event)}
    if event.TABLE == "buffer":
        given["format"] = "bf16"
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        seq = getattr(process, event.TABLE)(**given, thread=3, stream=9, begin_seq=0, begin_ns=5, end_ns=6)
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table(event.TABLE)
        stamp = [int(table[name][0]) for name in ("process", "seq", "begin_seq", "thread", "stream")]
        assert stamp == [0, seq, 0, 3, 9]
        assert (int(table["begin_ns"][0]), int(table["end_ns"][0])) == (5, 6)
        for item in schema(event):
            if item.array is None:
                assert table[item.name][0] == given[item.name], item.name
            else:
                found = table.bulk(item.name, 0) if item.array.bulk else table.ragged(item.name)[0]
                assert found.dtype == np.dtype(item.array.dtype)
                np.testing.assert_array_equal(found, given[item.name])
                if item.array.bulk:
                    assert table.bulk_size(item.name).tolist() == [given[item.name].size]


def test_a_wrong_name_or_value_is_refused_and_says_what_is_right(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        with pytest.raises(TypeError, match="did you mean 'logits'"):
            process.read(room=1, logit=[1.0])
        with pytest.raises(TypeError, match="room"):
            process.request()
        for field, value, says in (
            ("slots", [0.5], "expected int64"),
            ("slots", [[1, 2]], "expected int64"),
            ("keys", np.zeros((2, 127)), "128"),
            ("room", "7", "no 64-bit integer"),
            ("room", 2**63, "no 64-bit integer"),
        ):
            with pytest.raises(ValueError, match=says):
                process.store(**{"room": 1, field: value})
        with pytest.raises(ValueError, match="does not fit uint64"):
            process.send(transfer=1, source=[[-1, 4]])
        with pytest.raises(ValueError, match="unknown page format"):
            process.buffer(buffer=0, format="fp9")
    with open_trace(tmp_path / "t.h5") as trace:
        assert len(trace.table("store")) == len(trace.table("send")) == 0


def test_a_snapshot_is_checked_against_its_own_pages_and_its_buffer(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        with pytest.raises(ValueError, match="add buffer 0 first"):
            process.snapshot(stage="RC", buffer=0, pages=[1], logical=[0], data=pages(1))
        process.buffer(buffer=0)
        with pytest.raises(ValueError, match="1 logical page for 2 pages"):
            process.snapshot(stage="RC", buffer=0, pages=[1, 2], logical=[0])
        with pytest.raises(ValueError, match="data has 1 entry for 2 pages"):
            process.snapshot(stage="RC", buffer=0, pages=[1, 2], logical=[0, 1], data=pages(1))
        with pytest.raises(ValueError, match="8448"):
            process.snapshot(stage="RC", buffer=0, pages=[1], logical=[0], data=pages(1)[:, :4352])


def test_a_snapshot_may_give_bytes_or_rows_or_digests_and_the_rest_is_computed(tmp_path: Path) -> None:
    data = pages(2)
    found = digest_pages(LAYOUTS["fp8"], data)
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        process.buffer(buffer=0)
        process.snapshot(
            stage="A", buffer=0, pages=[1, 2], logical=[0, 1], data=[bytes(data[0]), bytes(data[1])]
        )
        process.snapshot(
            stage="B", buffer=0, pages=[1, 2], row_values=found.row_values, row_scales=found.row_scales
        )
        process.snapshot(stage="C", buffer=0, pages=[1, 2], digests=found.digests)
        process.snapshot(stage="D", buffer=0, pages=[1, 2])
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table("snapshot")
        assert [part.tolist() for part in table.ragged("content")] == [[0, 1], [0, 1], [0, 1], [-1, -1]]
        assert table.ragged("logical")[3].tolist() == [-1, -1]
        contents = trace.contents
        np.testing.assert_array_equal(contents.digests, found.digests)
        np.testing.assert_array_equal(contents.digests, page_digests(found.row_values, found.row_scales))
        np.testing.assert_array_equal(contents.data([1, 0]), data[::-1])


def test_arrays_are_copied_when_they_are_given(tmp_path: Path) -> None:
    table, data = np.array([1, 2]), pages(1)
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        process.buffer(buffer=0)
        process.read(room=1, table=table)
        process.snapshot(stage="RD", buffer=0, pages=[1], data=data)
        table[:] = 9
        data[:] = 0
    with open_trace(tmp_path / "t.h5") as trace:
        assert trace.table("read").ragged("table")[0].tolist() == [1, 2]
        np.testing.assert_array_equal(trace.contents.data([0]), pages(1))


def test_sequence_numbers_and_times_count_on_from_what_was_given(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        assert process.request(room=1) == 1  # 0 is the process record
        assert process.request(room=2, seq=10, begin_seq=4) == 10
        assert process.next_seq == 11
        assert process.request(room=3, seq=5) == 5
        assert process.request(room=4, begin_ns=77) == 11
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table("request")
        assert table["room"].tolist() == [1, 3, 2, 4]  # by sequence number, whatever the order of the calls
        assert table["begin_seq"].tolist() == [1, 5, 4, 11]
        assert table["end_ns"].tolist()[3] == 77
        assert (np.diff(table["begin_ns"][[0, 2, 1]]) > 0).all()


def test_an_edge_has_a_tail_on_one_thread_and_a_head_on_the_other(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        first, second = builder.process(role="prefill"), builder.process(role="decode")
        builder.edge(second, first, "announce", "7.0", before_thread=2)
        builder.edge(first, second, after_thread=5)
    with open_trace(tmp_path / "t.h5") as trace:
        order = trace.table("order")
        found = list(
            zip(order["process"], order["what"], order["key"], order["end"], order["thread"], strict=True)
        )
    assert found == [
        (0, "announce", "7.0", "head", 0),
        (0, "queue", "edge-2", "tail", 0),
        (1, "announce", "7.0", "tail", 2),
        (1, "queue", "edge-2", "head", 5),
    ]


def test_hooks_complete_declares_all_or_the_named_hooks(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill").hooks_complete()
        builder.process(role="decode").hooks_complete("read")
    with open_trace(tmp_path / "t.h5") as trace:
        hooks = trace.table("hook")
        assert hooks["covers"].tolist() == [*COVERS, "read"]
        assert hooks["complete"].all()
        assert (hooks["fired"] > 0).all()


def test_how_a_process_ended_is_told(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill", options={"mode": "full"})
        builder.process(role="decode").killed("the last frame")
    with open_trace(tmp_path / "t.h5") as trace:
        assert [(p.ended, p.cut) for p in trace.processes] == [(True, ""), (False, "the last frame")]
        assert trace.processes[0].options == {"mode": "full"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_no_file(error: type[BaseException], tmp_path: Path) -> None:
    def build() -> None:
        with TraceBuilder(tmp_path / "t.h5") as builder:
            builder.process(role="prefill").buffer(buffer=0)
            raise error

    with pytest.raises(error):
        build()
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_written_over_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    path.write_text("mine")
    with pytest.raises(WriteError, match="exists already"):
        TraceBuilder(path)
    assert path.read_text() == "mine"
    with TraceBuilder(path, replace=True) as builder:
        builder.process(role="prefill")
        assert path.read_text() == "mine"
    with open_trace(path) as trace:
        assert len(trace.processes) == 1


def test_a_file_that_appears_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    builder = TraceBuilder(path)
    builder.process(role="prefill")
    path.write_text("mine")
    with pytest.raises(WriteError, match="exists already"):
        builder.close()
    assert [item.name for item in tmp_path.iterdir()] == ["t.h5"]
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="Make the folder"):
        TraceBuilder(tmp_path / "nowhere" / "t.h5")


def test_two_builds_of_one_trace_are_equal_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        with TraceBuilder(tmp_path / name) as builder:
            process = builder.process(role="prefill")
            process.buffer(buffer=0)
            process.snapshot(stage="ST", buffer=0, pages=[1, 2], data=pages(2))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_many_snapshots_are_built_in_little_memory(tmp_path: Path) -> None:
    """16,000 page snapshots carry 13 MB of row digests and 135 MB of page bytes, of which 2 % are distinct."""
    code = f"""
import re
from pathlib import Path
import numpy as np
from replay.trace.builder import TraceBuilder
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
data = np.random.default_rng(0).integers(0, 256, (400, {PAGE_BYTES}), dtype=np.uint8)
with TraceBuilder("t.h5") as builder:
    process = builder.process(role="prefill")
    process.buffer(buffer=0, pages=400)
    for step in range(400):
        at = step * 40 % 400
        process.snapshot(stage="ST", buffer=0, room=step, pages=np.arange(at, at + 40), data=data[at : at + 40])
print(peak() - before)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 80
    with open_trace(tmp_path / "t.h5") as trace:
        assert len(trace.table("snapshot").ragged("pages").values) == 16_000
        assert len(trace.contents) == 400
