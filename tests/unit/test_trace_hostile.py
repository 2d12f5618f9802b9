"""Files that were made to mislead: every claim of a file is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replay.cli import run
from replay.trace.errors import TraceError
from replay.trace.reader import open_trace
from replay.trace.schema import TABLES
from replay.trace.verify import verify
from tests.unit.trace_samples import everything, small_trace

Change = Callable[[Any], None]


def put(name: str, values: Any, **how: Any) -> Change:
    def change(file: Any) -> None:
        if name in file:
            del file[name]
        file.create_dataset(name, data=values, **how)

    return change


def at(name: str, index: Any, value: Any) -> Change:
    def change(file: Any) -> None:
        file[name][index] = value

    return change


def gone(name: str) -> Change:
    def change(file: Any) -> None:
        del file[name]

    return change


def claimed(name: str, dtype: str, rows: int, *tail: int) -> Change:
    """A dataset that claims many rows of which not one is stored."""

    def change(file: Any) -> None:
        del file[name]
        file.create_dataset(name, (rows, *tail), dtype, chunks=(1024, *tail), compression="gzip")

    return change


def bomb(file: Any) -> None:
    """8 MB of zeros for 8 KB of file, in the table of a request that has one row."""
    del file["events/snapshot/pages"]
    file.create_dataset(
        "events/snapshot/pages", data=np.zeros(1_000_000, "<i8"), chunks=(100_000,), compression="gzip"
    )


def external_link(file: Any) -> None:
    del file["events/read"]
    file["events/read"] = h5py.ExternalLink("/etc/passwd", "/")


def soft_link(file: Any) -> None:
    del file["events/read/rows"]
    file["events/read/rows"] = h5py.SoftLink("/events/read/room")


def external_data(file: Any) -> None:
    del file["events/read/rows"]
    file.create_dataset("events/read/rows", (1,), "<i8", external=[("/etc/passwd", 0, 8)])


def virtual(file: Any) -> None:
    del file["events/read/rows"]
    layout = h5py.VirtualLayout((1,), "<i8")
    layout[:] = h5py.VirtualSource(str(file.filename), "events/read/room", (1,))
    file.create_virtual_dataset("events/read/rows", layout)


def other_filter(file: Any) -> None:
    put("events/read/rows", np.array([1]), chunks=(1,), compression="lzf")(file)


def large_chunks(file: Any) -> None:
    del file["events/read/rows"]
    file.create_dataset(
        "events/read/rows", data=np.zeros(2_200_000, "<i8"), chunks=(2_200_000,), compression="gzip"
    )


def missing_chunk(file: Any) -> None:
    """Two rows in two chunks, one of them not stored: HDF5 would give a zero for it."""
    del file["events/snapshot/room"]
    file.create_dataset("events/snapshot/room", (2,), "<i8", chunks=(1,))[0] = 7


def wrapping_offsets(file: Any) -> None:
    """Differences that are all positive modulo 2**64."""
    file["strings/offsets"][1:3] = [2**63 - 1, -2]


def strings_of_lengths(file: Any) -> None:
    put("events/request/rid", np.array(["abc"], object), dtype=h5py.string_dtype())(file)


def frame(payload: bytes, mask: int = 0) -> Change:
    def change(file: Any) -> None:
        file["blobs/contents.data/bytes"].id.write_direct_chunk((0,), payload, mask)

    return change


def zstd_bomb(size: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(size))


def too_many_rows(file: Any) -> None:
    """Every content claims all row digests of the file."""
    rows = file["contents/row_values"].shape[0]
    file["contents/rows"][:] = rows
    file["contents/row_start"][:] = 0


def overlapping_blobs(file: Any) -> None:
    file["blobs/contents.data/start"][:] = 0
    file["blobs/contents.data/length"][:] = file["blobs/contents.data/bytes"].shape[0]


CHANGES: dict[str, Change] = {
    "no strings": gone("strings"),
    "no processes": gone("processes"),
    "no seq": gone("events/read/seq"),
    "no room": gone("events/read/room"),
    "no offsets": gone("events/snapshot/pages.offsets"),
    "no row digests": gone("contents/row_values"),
    "no digests": gone("contents/digests"),
    "no payload": gone("blobs/read.logits/bytes"),
    "no blob keys": gone("blobs/read.logits/key"),
    "no blob store": gone("blobs/read.logits"),
    "a group for a column": lambda file: (
        gone("events/read/room")(file),
        file.create_group("events/read/room"),
    ),
    "a dataset for a table": put("events/read", np.zeros(1, "<i8")),
    "a dataset for all tables": put("events", np.zeros(1, "<i8")),
    "another type": put("events/read/room", np.zeros(1, "<f8")),
    "another byte order": put("events/read/room", np.zeros(1, ">i8")),
    "another shape": put("events/read/room", np.zeros((1, 1), "<i8")),
    "pairs of three": put("events/send/source", np.zeros((2, 3), "<u8")),
    "fewer rows": put("events/read/room", np.zeros(0, "<i8")),
    "more rows": put("events/read/room", np.zeros(2, "<i8")),
    "fewer codes": put("events/read/kernel", np.zeros(0, "<i4")),
    "strings of lengths": strings_of_lengths,
    "a code past the strings": at("events/read/kernel", 0, 10_000),
    "a negative code": at("events/read/kernel", 0, -1),
    "a process that is not there": at("events/read/process", 0, 1),
    "a negative process": at("events/read/process", 0, -1),
    "a blob that is not there": at("events/read/logits", 0, 5),
    "a blob below -1": at("events/read/logits", 0, -2),
    "a content that is not there": at("events/snapshot/content", 0, 3),
    "a content below -1": at("events/snapshot/content", 0, -2),
    "offsets that go back": at("events/snapshot/pages.offsets", 1, 4),
    "offsets below zero": at("events/snapshot/pages.offsets", 1, -(2**63)),
    "offsets that wrap around": wrapping_offsets,
    "a chunk that is not stored": missing_chunk,
    "offsets past the end": at("events/snapshot/pages.offsets", 2, 6),
    "offsets that leave out some": at("events/snapshot/pages.offsets", 2, 4),
    "pages and contents that do not go together": at("events/snapshot/content.offsets", 1, 2),
    "string offsets past the end": at("strings/offsets", -1, 2**40),
    "strings that are no text": at("strings/bytes", slice(0, 8), 0xFF),
    "rows past the end": at("contents/row_start", 0, 2**62),
    "rows before the begin": at("contents/row_start", 0, -1),
    "rows without number": at("contents/rows", 0, 2**31 - 1),
    "rows below zero": at("contents/rows", 0, -1),
    "rows that overlap": too_many_rows,
    "a format that is no string": at("contents/format", 0, 10_000),
    "bytes that are not there": at("contents/blob", 0, 3),
    "a blob past the end": at("blobs/contents.data/start", 0, 2**62),
    "a blob before the begin": at("blobs/contents.data/start", 0, -1),
    "a blob of negative length": at("blobs/contents.data/length", 0, -5),
    "a blob of great length": at("blobs/contents.data/length", 0, 2**62),
    "blobs that overlap": overlapping_blobs,
    "payload of no whole values": at("blobs/read.logits/length", 0, 699),
    "rows that are not stored": claimed("events/read/seq", "<i8", 2**40),
    "values that are not stored": claimed("events/snapshot/pages", "<i8", 2**40),
    "row digests that are not stored": claimed("contents/row_values", "<u8", 2**40),
    "digests that are not stored": claimed("contents/digests", "<u8", 2**40, 2),
    "more zeros than the file has a use for": bomb,
    "a link to another file": external_link,
    "a link within the file": soft_link,
    "data in another file": external_data,
    "a view of another dataset": virtual,
    "a filter that the format does not have": other_filter,
    "chunks without measure": large_chunks,
    "a frame that is none": frame(b"no frame"),
    "a frame of another size": frame(zstd_bomb(100)),
    "a frame of a gigabyte": frame(zstd_bomb(2**30)),
    "a raw chunk of another size": frame(b"short", 1),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_trace(tmp_path_factory.mktemp("sample") / "t.h5").read_bytes()


@pytest.fixture
def path(sample: bytes, tmp_path: Path) -> Path:
    """A trace to be changed."""
    (tmp_path / "t.h5").write_bytes(sample)
    return tmp_path / "t.h5"


def read_all(path: Path) -> None:
    with open_trace(path) as trace:
        everything(trace)


@pytest.mark.parametrize("name", CHANGES)
def test_a_false_claim_is_an_error_that_says_where_and_verify_finds_it(name: str, path: Path) -> None:
    with h5py.File(path, "a") as file:
        CHANGES[name](file)
    with pytest.raises(TraceError) as caught:
        read_all(path)
    assert str(path) in caught.value.where
    assert caught.value.todo
    assert "MemoryError" not in str(caught.value)
    problems = verify(path).problems
    assert problems
    assert all(str(path) in problem.where for problem in problems)


def test_the_file_of_these_tests_is_whole_before_it_is_changed(path: Path) -> None:
    read_all(path)
    checked = verify(path)
    assert not checked.problems
    assert (checked.contents, checked.contents_with_bytes, checked.blobs) == (3, 3, 8)


@pytest.mark.parametrize("version", ["2.0", "0.9", "99.1"])
def test_another_major_version_is_refused_by_name(version: str, path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["version"] = version
    with pytest.raises(TraceError, match=rf"version {version}, and this program reads 1\.x"):
        open_trace(path)


@pytest.mark.parametrize("version", ["", "1", "one.two", 1, "1.0.x" * 20_000, "-1.0", "²." + "0"])
def test_a_version_that_is_none_is_refused(version: Any, path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["version"] = version if len(str(version)) < 100 else str(version)[:60_000]
    with pytest.raises(TraceError):
        open_trace(path)


def test_an_hdf5_file_of_another_program_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(TraceError, match="no kv-replay trace"):
        open_trace(tmp_path / "t.h5")


def test_a_later_minor_version_with_more_in_it_is_read(path: Path) -> None:
    with open_trace(path) as trace:
        wanted = everything(trace)
    with h5py.File(path, "a") as file:
        file.attrs["version"] = "1.7"
        file.attrs["extra"] = "new"
        file.create_dataset("events/read/temperature", data=np.zeros(1))
        file.create_dataset("events/read/more", data=np.zeros((3, 3)), compression="lzf")
        file.create_dataset("events/new_table/seq", data=np.zeros(5, "<i8"))
        file.create_dataset("contents/entropy", data=np.zeros(3))
        file.create_dataset("blobs/new.store/x", data=np.zeros(3))
        file["elsewhere"] = h5py.ExternalLink("nowhere.h5", "/")
    with open_trace(path) as trace:
        assert everything(trace) == wanted
    checked = verify(path)
    assert not checked.problems
    assert set(checked.ignored) >= {"/elsewhere", "/events/new_table", "/events/read/temperature"}


def test_an_older_minor_version_without_some_columns_is_read_with_their_defaults(path: Path) -> None:
    with h5py.File(path, "a") as file:
        for name in ("k", "kernel", "top_k", "table_after", "table_after.offsets"):
            del file[f"events/read/{name}"]
        del file["events/buffer/format"]
        del file["events/send/written"]
        del file["processes/journal_bytes"]
        del file["processes/cut"]
    with open_trace(path) as trace:
        read = trace.table("read")
        assert (read["k"].tolist(), read["kernel"].tolist()) == ([-1], [""])
        assert read.bulk("top_k", 0).shape == (0,)
        assert read.ragged("table_after")[0].tolist() == []
        assert trace.table("buffer")["format"].tolist() == ["fp8"]
        assert trace.strings[trace.table("buffer").codes("format")].tolist() == ["fp8"]
        assert trace.table("send")["written"].tolist() == [-1]
        assert (trace.processes[0].journal_bytes, trace.processes[0].cut) == (-1, "")


@pytest.mark.parametrize("text", ["[1]", "{", "null", "[" * 100_000, '{"a": 1e999}'])
def test_options_that_are_no_json_object_are_nothing_known(text: str, tmp_path: Path) -> None:
    from replay.trace.builder import TraceBuilder

    with TraceBuilder(tmp_path / "t.h5") as builder:
        builder.process(role="prefill", options=text)
    with open_trace(tmp_path / "t.h5") as trace:
        assert isinstance(trace.processes[0].options, dict)


def test_every_table_is_looked_at(path: Path) -> None:
    """A wrong length in any column of any table of the sample is found."""
    with h5py.File(path) as file:
        columns = [f"events/{table}/{name}" for table in file["events"] for name in file["events"][table]]
    assert {name.split("/")[1] for name in columns} <= set(TABLES)
    with h5py.File(path, "a") as file:
        for name in columns:
            if name.endswith("/seq"):
                continue  # it says how many rows the table has
            dtype, width = file[name].dtype, file[name].shape[1:]
            put(name, np.zeros((77, *width), dtype))(file)
    found = {problem.where.removeprefix(f"{path}/") for problem in verify(path).problems}
    missing = {name.removesuffix(".offsets") for name in columns} - {
        item.removesuffix(".offsets") for item in found
    }
    assert {name for name in missing if not name.endswith("/seq")} == set()


AGAIN = "Seal its journal again, or copy it once more from where it is whole"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (0, f"it is empty. {AGAIN}"),
        (1, f"it was cut: only its first 1 byte is there. {AGAIN}"),
        (47, f"it was cut: only its first 47 bytes are there. {AGAIN}"),
        (48, f"it was cut: 48 of its {{whole:,}} bytes are there. {AGAIN}"),
        (-1, f"it was cut: {{left:,}} of its {{whole:,}} bytes are there. {AGAIN}"),
    ],
)
def test_a_cut_file_is_told_in_one_sentence(
    kept: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_trace(tmp_path / "t.h5")
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    assert run(["info", str(path)]) == 4
    told = told.format(whole=len(data), left=len(data) - 1)
    assert capsys.readouterr().err == f"replay: {path}: {told}\n"
    assert [f"{problem.where}: {problem.what}" for problem in verify(path).problems] == [
        f"{path}: {told.partition('. ')[0]}"
    ]


def test_a_file_of_another_kind_and_one_that_nobody_may_read_are_not_called_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.h5"
    path.write_bytes(b"PK\x03\x04 a ZIP file, much longer than the beginning of an HDF5 file")
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert str(caught.value) == (
        f"{path}: it is no HDF5 file. Give a trace (.h5), a journal (.journal) or a folder of them"
    )

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Unable to synchronously open file (errno = 13)")

    monkeypatch.setattr(h5py, "File", refused)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert str(caught.value) == (
        f"{path}: it cannot be opened: permission denied. Check its rights, and the disk that it is on"
    )
