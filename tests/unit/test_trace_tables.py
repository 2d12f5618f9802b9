from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from replay.trace.builder import TraceBuilder
from replay.trace.errors import TraceError
from replay.trace.merge import merge
from replay.trace.ragged import Ragged
from replay.trace.reader import open_trace
from replay.trace.schema import CHUNK_ROWS, TABLES, spec_tables
from replay.trace.verify import verify
from tests.unit.trace_samples import small_trace

ROOT = Path(__file__).parents[2]


def test_rows_are_ordered_by_process_and_sequence_whatever_the_order_of_writing(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        first, second = builder.process(role="prefill"), builder.process(role="decode")
        second.alloc(room=21, pages=[1, 2, 3], seq=9)
        first.alloc(room=12, pages=[], seq=8)
        second.alloc(room=20, pages=[4], seq=3)
        first.alloc(room=11, pages=[5, 6], seq=2)
        second.read(room=31, logits=[1.0], seq=20)
        second.read(room=30, logits=[2.0, 3.0], seq=19)
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table("alloc")
        assert table["process"].tolist() == [0, 0, 1, 1]
        assert table["seq"].tolist() == [2, 8, 3, 9]
        assert table["room"].tolist() == [11, 12, 20, 21]
        pages = table.ragged("pages")
        assert [part.tolist() for part in pages] == [[5, 6], [], [4], [1, 2, 3]]
        assert pages.owner().tolist() == [0, 0, 2, 3, 3, 3]
        assert pages.lengths.tolist() == [2, 0, 1, 3]
        reads = trace.table("read")
        assert reads.bulk_size("logits").tolist() == [2, 1]
        assert [reads.bulk("logits", row).tolist() for row in (0, 1)] == [[2.0, 3.0], [1.0]]


def test_strings_have_codes_that_agree_over_all_files(tmp_path: Path) -> None:
    for name, role, phases in (("a", "prefill", ["start", "abort"]), ("b", "decode", ["late", "start"])):
        with TraceBuilder(tmp_path / f"{name}.h5") as builder:
            process = builder.process(role=role)
            for phase in phases:
                process.request(room=1, phase=phase)
    with open_trace(tmp_path / "b.h5", tmp_path / "a.h5") as trace:
        table = trace.table("request")
        assert table["phase"].tolist() == ["start", "abort", "late", "start"]
        codes = table.codes("phase")
        assert codes.dtype == np.int32
        assert trace.strings[codes].tolist() == table["phase"].tolist()
        assert codes[0] == codes[3] == trace.code("start")
        assert trace.code("no such text") == -1
        assert table["process"].tolist() == [0, 0, 1, 1]
        assert [process.role for process in trace.processes] == ["prefill", "decode"]


def test_columns_have_the_promised_types(tmp_path: Path) -> None:
    with open_trace(small_trace(tmp_path / "t.h5")) as trace:
        hook, params, request = (trace.table(name) for name in ("hook", "store_params", "request"))
        assert hook["complete"].dtype == np.bool_
        assert params["epsilon"].dtype == np.float64
        assert request["room"].dtype == np.int64
        assert request["rid"].dtype == object
        assert (request["process"].dtype, request["seq"].dtype) == (np.int32, np.int64)
        assert trace.table("send").ragged("source").values.dtype == np.uint64
        assert trace.table("send").ragged("source")[0].tolist() == [[1 << 40, 4], [1 << 41, 8]]
        assert trace.table("store").bulk("keys", 0).shape == (2, 128)


def test_a_file_from_before_requests_had_a_row_is_read_as_if_none_had(tmp_path: Path) -> None:
    path = tmp_path / "old.h5"
    with TraceBuilder(path) as builder:
        builder.process(role="decode", run="old").request(room=7, req_pool_idx=3, generation=2)
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = "1.1"
        for column in ("req_pool_idx", "generation"):
            del file[f"events/request/{column}"]
    assert not verify(path).problems
    with TraceBuilder(tmp_path / "new.h5") as builder:
        builder.process(role="prefill", run="new").request(room=7, req_pool_idx=5, generation=0)
    merge([path, tmp_path / "new.h5"], tmp_path / "both.h5")
    for paths in ((path, tmp_path / "new.h5"), (tmp_path / "both.h5",)):
        with open_trace(*paths) as trace:
            table = trace.table("request")
            roles = [trace.processes[process].role for process in table["process"].tolist()]
            places, generations = table["req_pool_idx"].tolist(), table["generation"].tolist()
            assert set(zip(roles, places, generations, strict=True)) == {
                ("decode", -1, -1),
                ("prefill", 5, 0),
            }


def test_a_table_without_records_has_columns_of_no_rows(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill")
    with open_trace(tmp_path / "t.h5") as trace:
        for name, columns in TABLES.items():
            if name == "process":
                continue
            table = trace.table(name)
            assert len(table) == len(table["seq"]) == 0
            for column in columns:
                if column.kind in ("ragged", "content"):
                    found = table.ragged(column.name)
                    assert (len(found), len(found.values)) == (0, 0)
                elif column.kind == "bulk":
                    assert len(table.bulk_size(column.name)) == 0
                else:
                    assert len(table[column.name]) == 0
        assert len(trace.contents) == 0
        assert trace.contents.data([]).shape == (0, 0)


def test_a_wrong_table_column_or_row_is_a_clear_error(tmp_path: Path) -> None:
    with open_trace(small_trace(tmp_path / "t.h5")) as trace:
        with pytest.raises(KeyError, match="snapshot"):
            trace.table("snapshots")
        read = trace.table("read")
        with pytest.raises(KeyError, match="kernel"):
            _ = read["kernels"]
        with pytest.raises(KeyError, match="table_after"):
            read.ragged("logits")
        with pytest.raises(IndexError, match="1 row,"):
            read.bulk("logits", 1)


def test_only_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "t.h5")
    with h5py.File(path, "a") as file:
        del file["events/read/rows"]
        file["events/read/rows"] = np.zeros(0, "<i8")
    with open_trace(path) as trace:
        assert trace.table("read")["room"].tolist() == [7]
        with pytest.raises(TraceError, match="0 rows"):
            _ = trace.table("read")["rows"]


def test_ragged_rows_can_be_taken_from_either_end() -> None:
    ragged = Ragged(np.arange(5), np.array([0, 2, 2, 5]))
    assert [part.tolist() for part in ragged] == [[0, 1], [], [2, 3, 4]]
    assert ragged[-1].tolist() == [2, 3, 4]
    with pytest.raises(IndexError):
        _ = ragged[3]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_rows_of_a_large_ragged_column_are_read_alone_in_any_order(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """The rows beside the one that is asked for are read with it; these lie in several chunks of the file."""
    assert 10_000 < CHUNK_ROWS < 20_000
    rows = [np.arange(10_000 * row, 10_000 * (row + 1)) for row in range(4)]
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="prefill")
        for pages in rows:
            process.alloc(room=1, pages=pages)
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table("alloc")
        for row in order:
            assert np.array_equal(table.array("pages", row), rows[row])


def test_any_hdf5_tool_can_read_the_event_columns_as_the_specification_shows(tmp_path: Path) -> None:
    small_trace(tmp_path / "trace.h5")
    code = re.search(r"```python\n(.*?)```", (ROOT / "replay/trace/SPEC.md").read_text(), re.S).group(1)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + "\nprint(stage, [part.tolist() for part in pages])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['ST', 'SE'] [[5, 6, 7], [5, 6]]"


def test_the_tables_in_the_specification_are_those_of_the_records() -> None:
    text = (ROOT / "replay/trace/SPEC.md").read_text()
    assert text.endswith(spec_tables())


def test_a_trace_is_read_by_a_fresh_process_in_an_empty_folder_without_torch(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "t.h5")
    (tmp_path / "empty").mkdir()
    code = (
        "import sys; from replay.trace.reader import open_trace; t = open_trace(sys.argv[1]); "
        "print(len(t.table('snapshot')), t.contents.data([2]).shape, 'torch' in sys.modules, 'click' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "2 (1, 8448) False False"
    assert not list((tmp_path / "empty").iterdir())
