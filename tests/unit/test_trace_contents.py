from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import LAYOUTS
from replay.trace import blobs, contents
from replay.trace.builder import TraceBuilder
from replay.trace.reader import open_trace
from replay.trace.schema import CHUNK_BYTES
from tests.unit.trace_samples import pages


def snapshots(path: Path, *seen: dict[str, object], role: str = "prefill", buffer: int = 0) -> Path:
    with TraceBuilder(path) as builder:
        process = builder.process(role=role)
        for number, name in enumerate(("fp8", "bf16", "fp4")):
            process.buffer(buffer=number, format=name)
        for fields in seen:
            count = len(next(iter(fields.values())))
            process.snapshot(stage="ST", buffer=buffer, pages=np.arange(count), **fields)
    return path


def ids(path: Path, *more: Path) -> list[list[int]]:
    with open_trace(path, *more) as trace:
        return [part.tolist() for part in trace.table("snapshot").ragged("content")]


def test_equal_pages_are_one_content_within_a_snapshot_and_across_many(tmp_path: Path) -> None:
    data = pages(4)
    path = snapshots(
        tmp_path / "t.h5", {"data": data[[0, 1, 0]]}, {"data": data[[2, 1, 3]]}, {"data": data[[3]]}
    )
    assert ids(path) == [[0, 1, 0], [2, 1, 3], [3]]
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.contents.data([3, 0, 0, 2]), data[[3, 0, 0, 2]])
        assert trace.contents.has_data.all()


def test_one_digest_with_other_rows_stays_apart(tmp_path: Path) -> None:
    digests = np.ones((2, 2), np.uint64)
    rows = np.array([[1, 2], [1, 3]], np.uint64)
    scales = np.zeros((2, 2), np.uint32)
    fields = {"digests": digests, "row_values": rows, "row_scales": scales}
    backwards = {name: value[::-1] for name, value in fields.items()}
    path = snapshots(tmp_path / "t.h5", fields, backwards, {"digests": digests})
    assert ids(path) == [[0, 1], [1, 0], [0, 0]]
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.contents.row_values([0, 1]), rows)


def test_one_digest_with_other_bytes_stays_apart(tmp_path: Path) -> None:
    digests, data = np.ones((3, 2), np.uint64), pages(3)
    data[2] = data[0]
    path = snapshots(
        tmp_path / "t.h5", {"digests": digests, "data": data}, {"digests": digests[:2], "data": data[1:]}
    )
    assert ids(path) == [[0, 1, 0], [1, 0]]
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.contents.data([0, 1]), data[:2])


def test_what_is_learned_later_is_added_to_the_content_that_is_there(tmp_path: Path) -> None:
    data = pages(2)
    found = digest_pages(LAYOUTS["fp8"], data)
    rows = {"row_values": found.row_values, "row_scales": found.row_scales}
    path = snapshots(
        tmp_path / "t.h5", {"digests": found.digests}, {"digests": found.digests, **rows}, {"data": data}
    )
    assert ids(path) == [[0, 1]] * 3
    with open_trace(path) as trace:
        assert len(trace.contents) == 2
        np.testing.assert_array_equal(trace.contents.row_values([0, 1]), found.row_values)
        np.testing.assert_array_equal(trace.contents.data([0, 1]), data)


def test_rows_that_come_later_for_one_digest_but_differ_stay_apart(tmp_path: Path) -> None:
    digests = np.ones((3, 2), np.uint64)
    rows = np.array([[1, 2], [1, 3], [1, 2]], np.uint64)
    path = snapshots(
        tmp_path / "t.h5",
        {"digests": digests},
        {"digests": digests, "row_values": rows, "row_scales": np.zeros((3, 2), np.uint32)},
    )
    assert ids(path) == [[0, 0, 0], [0, 1, 0]]
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.contents.row_values([0, 1]), rows[:2])


def test_equal_pages_of_two_files_have_one_index_and_different_ones_two(tmp_path: Path) -> None:
    data = pages(5)
    found = digest_pages(LAYOUTS["fp8"], data)
    rows = {"row_values": found.row_values[[4, 1, 3]], "row_scales": found.row_scales[[4, 1, 3]]}
    first = snapshots(tmp_path / "a.h5", {"data": data[:3]})
    second = snapshots(tmp_path / "b.h5", rows, role="decode")
    third = snapshots(tmp_path / "c.h5", {"digests": found.digests}, role="server")
    assert ids(first, second, third) == [[0, 1, 2], [3, 1, 4], [0, 1, 2, 4, 3]]
    with open_trace(third, second, first) as trace:
        assert trace.contents.has_data.tolist() == [True, True, True, False, False]
        np.testing.assert_array_equal(trace.contents.row_values([0, 1, 2, 4, 3]), found.row_values)
        np.testing.assert_array_equal(trace.contents.row_scales([4, 0]), found.row_scales[[3, 0]])
        np.testing.assert_array_equal(trace.contents.data([2, 0]), data[[2, 0]])


def test_contents_of_two_files_with_one_digest_but_other_rows_or_bytes_stay_apart(tmp_path: Path) -> None:
    digests, data = np.ones((1, 2), np.uint64), pages(2)
    first = snapshots(tmp_path / "a.h5", {"digests": digests, "data": data[:1]})
    second = snapshots(
        tmp_path / "b.h5", {"digests": digests, "data": data[1:]}, {"digests": digests, "data": data[:1]}
    )
    assert ids(first, second) == [[0], [1], [0]]
    rows = {"digests": digests, "row_values": np.ones((1, 64), np.uint64)}
    third = snapshots(tmp_path / "c.h5", {**rows, "row_scales": np.zeros((1, 64), np.uint32)})
    fourth = snapshots(tmp_path / "d.h5", {**rows, "row_scales": np.ones((1, 64), np.uint32)})
    assert ids(third, fourth) == [[0], [1]]


def test_rows_of_different_formats_cannot_be_read_together_but_apart(tmp_path: Path) -> None:
    two = {"row_values": np.ones((1, 2), np.uint64), "row_scales": np.ones((1, 2), np.uint32)}
    three = {"row_values": np.ones((1, 3), np.uint64), "row_scales": np.ones((1, 3), np.uint32)}
    with open_trace(snapshots(tmp_path / "t.h5", two, three, two)) as trace:
        assert trace.contents.rows.tolist() == [2, 3]
        assert trace.contents.row_values([1]).shape == (1, 3)
        assert trace.contents.row_values([]).shape == (0, 0)
        with pytest.raises(ValueError, match=r"\[2, 3\] rows"):
            trace.contents.row_values([0, 1])
        with pytest.raises(ValueError, match="not kept"):
            trace.contents.data([0])
        with pytest.raises(ValueError, match=r"0\.\.1"):
            trace.contents.row_values([2])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_bytes_give_the_digests_of_the_buffers_own_format(number: int, tmp_path: Path) -> None:
    layout = list(LAYOUTS.values())[number]
    data = np.random.default_rng(1).integers(0, 256, (3, layout.page_bytes), dtype=np.uint8)
    with open_trace(snapshots(tmp_path / "t.h5", {"data": data}, buffer=number)) as trace:
        found = digest_pages(layout, data)
        np.testing.assert_array_equal(trace.contents.digests, found.digests)
        np.testing.assert_array_equal(trace.contents.row_values([0, 1, 2]), found.row_values)
        np.testing.assert_array_equal(trace.contents.row_scales([0, 1, 2]), found.row_scales)
        assert trace.strings[trace.content_formats()].tolist() == [layout.name] * 3


def test_only_the_chunks_that_hold_the_asked_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    count = 20_000  # 1,280,000 rows: 79 chunks
    rows = rng.integers(0, 2**63, (count, 64)).astype(np.uint64)
    scales = rng.integers(0, 2**31, (count, 64)).astype(np.uint32)
    seen = [
        {"row_values": rows[at : at + 500], "row_scales": scales[at : at + 500]}
        for at in range(0, count, 500)
    ]
    path = snapshots(tmp_path / "t.h5", *seen)
    with open_trace(path) as trace:
        order = np.concatenate(list(trace.table("snapshot").ragged("content")))
        assert order.tolist() == list(range(count))
        wanted = np.array([19_999, 3, 4, 9_000, 3])
        read: list[int] = []
        original = contents.read

        def counting(dataset: object, where: str, start: int = 0, stop: int | None = None) -> object:
            read.append((stop or 0) - start)
            return original(dataset, where, start, stop)

        monkeypatch.setattr(contents, "read", counting)
        np.testing.assert_array_equal(trace.contents.row_values(wanted), rows[wanted])
        assert sum(read) <= 4 * 64
        shuffled = rng.permutation(count)
        np.testing.assert_array_equal(trace.contents.row_scales(shuffled), scales[shuffled])


def test_a_key_that_two_byte_strings_share_does_not_mix_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "blob_key", lambda payload: b"\1" * 16)
    data = pages(3)
    path = snapshots(tmp_path / "t.h5", {"data": data}, {"data": data})
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.contents.data([0, 1, 2]), data)
    with h5py.File(path) as file:
        assert len(file["blobs/contents.data/start"]) == 3


def test_payload_of_any_length_comes_back_and_is_kept_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sizes = [1, 7, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 3 * CHUNK_BYTES // 4 + 5, 2]
    payload = [rng.random(size).astype(np.float32) for size in sizes]
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        for logits in (*payload, *payload, np.zeros(0)):
            process.read(room=1, logits=logits)
    with open_trace(tmp_path / "t.h5") as trace:
        table = trace.table("read")
        assert table.bulk_size("logits").tolist() == [*sizes, *sizes, 0]
        for row in (11, 0, 4, 3, 8, 5):
            np.testing.assert_array_equal(table.bulk("logits", row), payload[row % 6])
        assert table.bulk("logits", 12).shape == (0,)
    with h5py.File(tmp_path / "t.h5") as file:
        assert file["blobs/read.logits/length"][:].tolist() == [4 * size for size in sizes]


def test_chunks_are_compressed_where_that_helps_and_raw_where_it_does_not(tmp_path: Path) -> None:
    with TraceBuilder(tmp_path / "t.h5") as builder:
        process = builder.process(role="decode")
        process.read(room=1, query=np.tile(np.arange(64), CHUNK_BYTES // 256))
        process.read(
            room=1,
            weights=np.random.default_rng(0).integers(0, 2**32, CHUNK_BYTES // 4, np.uint32).view("<f4"),
        )
    with h5py.File(tmp_path / "t.h5") as file:
        for name, mask, stored in (
            ("query", 0, range(100, 5_000)),
            ("weights", 1, range(CHUNK_BYTES, CHUNK_BYTES + 1)),
        ):
            dataset = file[f"blobs/read.{name}/bytes"]
            found_mask, chunk = dataset.id.read_direct_chunk((0,))
            assert (found_mask, len(chunk) in stored) == (mask, True)
            plist = dataset.id.get_create_plist()
            assert plist.get_filter(0)[:2] == (32015, h5py.h5z.FLAG_OPTIONAL)
