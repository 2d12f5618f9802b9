from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import zstandard

from capture_hooks import frames
from capture_hooks.codec import PREFIX, encode, schema_json
from capture_hooks.events import Alloc, Clock, Content, Loss, Order, Process, Request, Send, Snapshot, Store
from capture_hooks.journal import JournalError, JournalReader, JournalWriter
from capture_hooks.options import Options
from capture_hooks.records import Event, Stamp

PROCESS = Process("prefill", rank=2, run="abc", host="h", engine="lab", mode="pages")


def records(path: Path) -> list[Event]:
    with JournalReader(path) as reader:
        return [event for _, event in reader if not isinstance(event, Clock | Process)]


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, size), dtype=np.uint8)


# -- the normal life of a journal --------------------------------------------------------------------------------------


def test_the_reader_tells_the_process_and_a_clean_end(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    writer.write(Order("status", "7719.0", "tail"), Stamp(5, 4, 3, 2, 1, 0))
    writer.close()
    with JournalReader(tmp_path / "a.journal") as reader:
        assert reader.process == PROCESS or vars_of(reader.process) == vars_of(PROCESS)
        found = list(reader)
        assert reader.ended
        assert not reader.truncated
        assert reader.cut == ""
        assert reader.clock is not None
        assert reader.clock.moment == "end"
    stamp, event = next(pair for pair in found if isinstance(pair[1], Order))
    assert stamp == Stamp(5, 4, 3, 2, 1, 0)
    assert isinstance(event, Order)
    assert (event.what, event.key, event.end) == ("status", "7719.0", "tail")
    assert [type(event) for _, event in found[:2]] == [Process, Clock]


def vars_of(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in type(event).__slots__}


def test_a_journal_that_did_not_end_is_not_called_ended(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    writer.write(Alloc(1))
    writer.flush()
    with JournalReader(tmp_path / "a.journal") as reader:
        assert [event.TABLE for _, event in reader] == ["process", "clock", "alloc", "clock"]
        assert not reader.ended
        assert not reader.truncated


def test_a_journal_can_be_read_again_and_while_it_is_written(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    with JournalReader(tmp_path / "a.journal") as reader:
        assert len(list(reader)) == 2
        writer.write(Alloc(1))
        assert len(list(reader)) == 2, "not flushed yet"
        writer.flush()
        assert len(list(reader)) == 4
        assert len(list(reader)) == 4
        writer.close()
        list(reader)
        assert reader.ended


def test_a_full_buffer_is_written_without_being_asked(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS, Options(flush_bytes=1000))
    before = writer.written
    writer.write(Alloc(1, pages=np.arange(50)))
    assert writer.written == before
    for _ in range(3):
        writer.write(Alloc(1, pages=np.arange(50)))
    assert writer.written > before


def test_an_existing_file_is_never_opened_again(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "a.journal", PROCESS).close()
    size = (tmp_path / "a.journal").stat().st_size
    with pytest.raises(JournalError, match="EEXIST"):
        JournalWriter(tmp_path / "a.journal", PROCESS)
    assert (tmp_path / "a.journal").stat().st_size == size


def test_a_field_of_the_wrong_type_is_counted_and_not_raised(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    writer.write(Alloc("seven"))  # type: ignore[arg-type]
    writer.write(Alloc(2**63))
    writer.write(Send(1, source=np.zeros((3, 5), np.uint64)))
    writer.write(Alloc(8, pages=[4, 5]))  # type: ignore[arg-type]  # a list is as good as an array
    writer.close()
    *kept, loss, other = records(tmp_path / "a.journal")
    assert [event.TABLE for event in kept] == ["alloc"]
    assert isinstance(kept[0], Alloc)
    assert kept[0].pages.tolist() == [4, 5]
    assert isinstance(loss, Loss)
    assert isinstance(other, Loss)
    assert {loss.what: loss.count, other.what: other.count} == {
        "alloc": 2,
        "send": 1,
    } or loss.stage == "journal"


def test_a_record_over_the_limit_is_counted(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    writer.write(Content("fp8", data=np.zeros((1, frames.MAX_RECORD + 1), np.uint8)), Stamp(seq=77))
    writer.close()
    (loss,) = records(tmp_path / "a.journal")
    assert isinstance(loss, Loss)
    assert (loss.stage, loss.what, loss.count, loss.first_seq, loss.last_seq) == (
        "journal",
        "content",
        1,
        77,
        77,
    )


# -- budgets and full disks --------------------------------------------------------------------------------------------


def fill(writer: JournalWriter, count: int) -> None:
    """Records with bytes that do not compress, flushed one by one; ``seq`` counts them."""
    for seq in range(count):
        writer.write(
            Store(seq, keys=np.frombuffer(noise(128 * 4 * 8, seq), np.float32).reshape(-1, 128)),
            Stamp(seq=seq),
        )
        writer.write(Alloc(seq), Stamp(seq=1000 + seq))
        writer.flush()


def test_the_disk_limit_costs_bytes_first_then_records_and_both_are_told(tmp_path: Path) -> None:
    limit = 120_000
    writer = JournalWriter(tmp_path / "a.journal", PROCESS, Options(disk_limit=limit))
    fill(writer, 400)
    assert writer.level == "counters"
    writer.close()
    assert (tmp_path / "a.journal").stat().st_size <= limit
    found = records(tmp_path / "a.journal")
    stores = [event for event in found if isinstance(event, Store)]
    whole = [store.room for store in stores if store.keys.size]
    bare = [store.room for store in stores if not store.keys.size]
    assert whole == list(range(len(whole))), "whole records first"
    assert bare == list(range(len(whole), len(whole) + len(bare))), "then without bytes"
    assert whole
    assert bare
    losses = [event for event in found if isinstance(event, Loss)]
    assert {loss.stage for loss in losses} == {"disk"}
    assert total(losses, "content") == len(bare) + 1, "one more went bare into the frame that found no room"
    assert total(losses, "store") == 400 - len(whole) - len(bare)
    assert total(losses, "alloc") == 400 - sum(isinstance(event, Alloc) for event in found)
    lost = [loss for loss in losses if loss.what == "alloc"]
    assert min(loss.first_seq for loss in lost) == 1000 + len(stores)
    assert max(loss.last_seq for loss in lost) == 1399
    assert "limit" in losses[-1].reason
    with JournalReader(tmp_path / "a.journal") as reader:
        list(reader)
        assert reader.ended
        assert not reader.truncated


def total(losses: list[Loss], what: str) -> int:
    return sum(loss.count for loss in losses if loss.what == what)


def test_the_reserve_outlasts_a_long_life_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path / "a.journal", PROCESS, Options(disk_limit=100_000))
    fill(writer, 200)
    assert writer.level == "counters"
    start = time.monotonic_ns()
    for second in range(0, 10 * 24 * 3600, 600):
        monkeypatch.setattr(time, "monotonic_ns", lambda now=start + second * 10**9: now)
        writer.write(Alloc(1))
        writer.flush(alive=True)
    writer.close()
    assert (tmp_path / "a.journal").stat().st_size <= 100_000
    with JournalReader(tmp_path / "a.journal") as reader:
        list(reader)
        assert reader.ended


CHILD = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from capture_hooks.events import Alloc, Process, Store
from capture_hooks.records import Stamp
from capture_hooks.journal import JournalWriter
path, limit, lift = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writer = JournalWriter(path, Process("prefill"))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for seq in range(100):
    keys = np.frombuffer(np.random.default_rng(seq).bytes(4096), np.float32).reshape(-1, 128)
    writer.write(Store(seq, keys=keys), Stamp(seq=seq))
    writer.write(Alloc(seq), Stamp(seq=1000 + seq))
    writer.flush()
if lift:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (path.parent / "filler").unlink(missing_ok=True)
writer.close()
print(writer.level, "survived")
"""


def run_child(path: Path, limit: int, lift: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(limit), str(int(lift))],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("lift", [True, False], ids=["room-again", "full-to-the-end"])
def test_a_file_that_cannot_grow_loses_no_whole_frame_and_hurts_nobody(tmp_path: Path, lift: bool) -> None:
    path = tmp_path / "a.journal"
    assert "survived" in run_child(path, 60_000, lift)
    with JournalReader(path) as reader:
        found = [event for _, event in reader]
        assert reader.cuts == [], "the torn frame was cut off again"
        assert reader.ended == lift, "without room for it there is no clean end"
    stores = [event for event in found if isinstance(event, Store)]
    assert 5 < len(stores) < 100
    if lift:
        losses = [event for event in found if isinstance(event, Loss)]
        assert total(losses, "store") == 100 - len(stores)
        assert {loss.reason for loss in losses if loss.what == "store"} == {"writing failed (EFBIG)"}


def test_a_full_file_system(tmp_path: Path) -> None:
    """ENOSPC for real, on a small tmpfs that fills up; at the end there is room again."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here; the test with RLIMIT_FSIZE covers the same path")
    try:
        (tmp_path / "filler").write_bytes(b"x" * 64 * 1024)
        path = tmp_path / "a.journal"
        assert "survived" in run_child(path, 0, lift=True)
        with JournalReader(path) as reader:
            found = [event for _, event in reader]
            assert reader.cuts == []
            assert reader.ended
        stores = sum(isinstance(event, Store) for event in found)
        losses = [event for event in found if isinstance(event, Loss)]
        assert stores < 100
        assert total(losses, "store") == 100 - stores
        assert "writing failed (ENOSPC)" in {loss.reason for loss in losses}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_journal_that_cannot_be_created_says_why(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"cannot be created \(ENOENT\); choose another capture folder"):
        JournalWriter(tmp_path / "absent" / "a.journal", PROCESS)
    with pytest.raises(JournalError, match=r"cannot be written \(the disk limit"):
        JournalWriter(tmp_path / "a.journal", PROCESS, Options(disk_limit=10))
    assert list(tmp_path.iterdir()) == []


# -- other versions ----------------------------------------------------------------------------------------------------


def foreign(
    path: Path, schema: dict[str, Any], bodies: list[tuple[int, bytes]], kind: int = frames.RECORDS
) -> None:
    """A journal by another version: its schema, then one frame of (kind, record)."""
    text = json.dumps(schema).encode()
    raw = b"".join(PREFIX.pack(number, len(body)) + body for number, body in bodies)
    path.write_bytes(
        frames.pack(frames.SCHEMA, 0, 0, 0, crc32(text), text)
        + frames.pack(kind, 1, 0, len(bodies), crc32(text), raw)
    )


def own_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(schema_json())
    return schema


def kind_of(schema: dict[str, Any], table: str) -> dict[str, Any]:
    found: dict[str, Any] = next(kind for kind in schema["kinds"] if kind["table"] == table)
    return found


STAMP = struct.pack("<6q", 9, 8, 7, 6, 5, 4)


def test_unknown_kinds_and_fields_are_skipped_and_missing_fields_take_their_default(tmp_path: Path) -> None:
    schema = own_schema()
    schema["version"] = [1, 7]
    schema["kinds"].append({"kind": 900, "table": "wish", "fields": [["what", "str"]]})
    order = kind_of(schema, "order")
    order["fields"] = [["weight", "float"], ["what", "str"], ["tags", "array", "<i4", [None, 2], False], ["key", "str"],
                       ["blob", "array", "|u1", [None], True]]  # fmt: skip
    tags = np.arange(6, dtype="<i4").tobytes()
    body = STAMP + struct.pack("<d2I2I", 1.5, 3, 2, 3, 2) + b"ackk1" + tags + struct.pack("<I", 4) + b"blob"
    foreign(tmp_path / "a.journal", schema, [(900, b"anything"), (order["kind"], body)])
    with JournalReader(tmp_path / "a.journal") as reader:
        ((stamp, event),) = list(reader)
        assert reader.unknown == {"wish": 1}
        assert not reader.truncated
    assert stamp == Stamp(9, 8, 7, 6, 5, 4)
    assert isinstance(event, Order)
    assert (event.what, event.key, event.end) == ("ack", "k1", "")


def test_a_request_of_a_journal_from_before_it_had_a_row_has_none(tmp_path: Path) -> None:
    schema = own_schema()
    request = kind_of(schema, "request")
    request["fields"] = [
        field for field in request["fields"] if field[0] not in ("req_pool_idx", "generation")
    ]
    body = STAMP + struct.pack("<4q3I", 7, 1, 700, 175, 5, 0, 4) + b"startfake"
    foreign(tmp_path / "a.journal", schema, [(request["kind"], body)])
    (event,) = records(tmp_path / "a.journal")
    assert isinstance(event, Request)
    told = (event.room, event.attempt, event.phase, event.rid, event.tokens, event.rows, event.mark)
    assert told == (7, 1, "start", "", 700, 175, "fake")
    assert (event.req_pool_idx, event.generation) == (-1, -1)


def test_a_field_that_changed_its_type_is_left_out(tmp_path: Path) -> None:
    schema = own_schema()
    kind_of(schema, "alloc")["fields"] = [["room", "str"], ["pages", "array", "<i4", [None], False]]
    body = STAMP + struct.pack("<II", 1, 1) + b"7" + b"\1\0\0\0"
    foreign(tmp_path / "a.journal", schema, [(kind_of(schema, "alloc")["kind"], body)])
    (event,) = records(tmp_path / "a.journal")
    assert isinstance(event, Alloc)
    assert (event.room, event.pages.tolist()) == (-1, [])


def test_a_kind_with_a_type_of_the_future_is_skipped(tmp_path: Path) -> None:
    schema = own_schema()
    kind_of(schema, "alloc")["fields"].append(["when", "date"])
    kind_of(schema, "free")["fields"].append(["cost", "array", "<f16", [None], False])
    foreign(
        tmp_path / "a.journal", schema, [(kind_of(schema, name)["kind"], STAMP) for name in ("alloc", "free")]
    )
    with JournalReader(tmp_path / "a.journal") as reader:
        assert list(reader) == []
        assert reader.unknown == {"alloc": 1, "free": 1}


def test_another_major_version_is_refused(tmp_path: Path) -> None:
    schema = own_schema()
    schema["version"] = [2, 0]
    foreign(tmp_path / "a.journal", schema, [])
    with pytest.raises(JournalError, match="use the kv-replay that wrote it"):
        JournalReader(tmp_path / "a.journal")


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"format": "kv-replay/journal", "version": 1}', b"[" * 100_000, b"null",
     json.dumps({"format": "kv-replay/journal", "version": [1, 0], "kinds": [{}] * 5000}).encode(),
     json.dumps({"format": "kv-replay/journal", "version": [1, 0],
                 "kinds": [{"kind": 1, "table": "order", "fields": [["x", "array", "<i8", [-5], False]]}]}).encode()],
    ids=["empty", "list", "cut", "no-kinds", "deep", "null", "many", "shape"],
)  # fmt: skip
def test_a_damaged_schema_is_a_journal_error(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(frames.pack(frames.SCHEMA, 0, 0, 0, crc32(text), text))
    with pytest.raises(JournalError, match="schema"):
        JournalReader(path)


# -- damaged and hostile files -----------------------------------------------------------------------------------------


def test_the_schema_frame_may_be_damaged_if_this_version_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    writer = JournalWriter(path, PROCESS)
    writer.write(Alloc(4))
    writer.close()
    data = bytearray(path.read_bytes())
    data[frames.HEADER_BYTES + 3] ^= 0xFF
    path.write_bytes(data)
    with JournalReader(path) as reader:
        assert [event.TABLE for _, event in reader] == ["process", "clock", "alloc", "clock", "clock"]
        assert [cut.offset for cut in reader.cuts] == [0]
        assert "a damaged frame at byte 0" in reader.cut


def test_a_damaged_schema_frame_of_another_version_is_refused(tmp_path: Path) -> None:
    schema = own_schema()
    schema["version"] = [1, 9]
    foreign(tmp_path / "a.journal", schema, [])
    data = bytearray((tmp_path / "a.journal").read_bytes())
    data[frames.HEADER_BYTES + 3] ^= 0xFF
    (tmp_path / "a.journal").write_bytes(data)
    with pytest.raises(JournalError, match="another version wrote it"):
        JournalReader(tmp_path / "a.journal")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 30])
def test_a_process_killed_before_its_first_frame_leaves_a_readable_nothing(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(frames.pack(frames.SCHEMA, 0, 0, 0, 0, schema_json())[:size])
    with JournalReader(path) as reader:
        assert list(reader) == []
        assert reader.process is None
        assert not reader.ended
        assert [cut.size for cut in reader.cuts] == ([size] if size else [])


@pytest.mark.parametrize(
    "data", [b"\x89HDF\r\n\x1a\n" + bytes(500), b"x", bytes(10_000), frames.MAGIC + bytes(90)]
)
def test_what_is_no_journal_is_a_journal_error_that_says_what_to_do(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.journal").write_bytes(data)
    with pytest.raises(JournalError, match="not a journal") as caught:
        JournalReader(tmp_path / "a.journal")
    assert caught.value.where.endswith("a.journal")
    assert caught.value.remedy


def test_a_file_that_is_not_there_is_a_journal_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="ENOENT"):
        JournalReader(tmp_path / "a.journal")
    with pytest.raises(JournalError, match="EISDIR"):
        JournalReader(tmp_path)


def crafted(records_: int, raw: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame with right CRCs and whatever sizes."""
    head = struct.pack(
        "<8sBBHIQIIIII", frames.MAGIC, 1, frames.RECORDS, 0, 1, 0, records_, raw,
        len(payload) if length is None else length, crc32(schema_json()), crc32(payload),
    )  # fmt: skip
    return head + struct.pack("<I", crc32(head)) + payload


def schema_frame() -> bytes:
    return frames.pack(frames.SCHEMA, 0, 0, 0, crc32(schema_json()), schema_json())


def read_crafted(path: Path, data: bytes) -> tuple[list[Event], JournalReader, int]:
    """Records, the reader, and the peak of memory in bytes."""
    path.write_bytes(schema_frame() + data)
    tracemalloc.start()
    try:
        with JournalReader(path) as reader:
            found = [event for _, event in reader]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found, reader, peak


def zstd(data: bytes, stated: int | None = None) -> bytes:
    """A zstd frame; ``stated`` replaces the content size in its header."""
    packed = bytearray(zstandard.ZstdCompressor().compress(data))
    if stated is not None:
        # Frame header descriptor: 8-byte content size, single segment.
        packed = bytearray(
            packed[:4] + bytes([0b1110_0000]) + struct.pack("<Q", stated) + packed[_header(packed) :]
        )
    return bytes(packed)


def _header(packed: bytes) -> int:
    return zstandard.frame_header_size(bytes(packed))


@pytest.mark.parametrize(
    "frame",
    [
        crafted(1, 2**32 - 1, zstd(bytes(2**20))),
        crafted(1, frames.MAX_RAW, zstd(bytes(2**20), stated=2**62)),
        crafted(1, 100, zstd(bytes(2**20))),
        crafted(1, 100, zstd(bytes(2**20), stated=100)),
        crafted(1, 100, b"not zstd at all"),
        crafted(1, 100, zstd(bytes(100)) + b"more"),
        crafted(1, 50, zstd(bytes(50)), length=2**32 - 1),
        crafted(1, 0, b""),
    ],
    ids=[
        "raw-too-large",
        "zstd-claims-much",
        "zstd-is-more",
        "zstd-lies",
        "no-zstd",
        "trailing",
        "length",
        "empty",
    ],
)
def test_a_hostile_frame_is_a_cut_and_allocates_little(tmp_path: Path, frame: bytes) -> None:
    found, reader, peak = read_crafted(tmp_path / "a.journal", frame)
    assert found == []
    assert [cut.offset for cut in reader.cuts] == [len(schema_frame())]
    assert peak < 4 * 2**20


def body_of(event: Event) -> bytes:
    record = encode(event, (1, 1, 1, -1, 1, 1))
    return record.head + record.bulk


SEND = body_of(Send(1, agent="a", pages=np.arange(3), source=np.ones((2, 2), np.uint64)))
#: Where the sizes of strings and arrays of a Send begin: stamp, scalars, then 3 strings.
SIZES = 48 + struct.calcsize("<qqqq?qqq")


@pytest.mark.parametrize("at", range(SIZES, SIZES + 36, 4))
@pytest.mark.parametrize("value", [2**32 - 1, 2**31, 10**6])
def test_hostile_sizes_in_a_record_cost_that_record_only(tmp_path: Path, at: int, value: int) -> None:
    bad = SEND[:at] + struct.pack("<I", value) + SEND[at + 4 :]
    raw = b"".join(PREFIX.pack(Send.KIND, len(body)) + body for body in (SEND, bad, SEND))
    found, reader, peak = read_crafted(tmp_path / "a.journal", crafted(3, len(raw), zstd(raw)))
    assert [event.TABLE for event in found] == ["send", "send"]
    assert [cut.records for cut in reader.cuts] == [1]
    assert peak < 4 * 2**20


def test_records_that_end_past_their_frame_or_are_too_few_are_told(tmp_path: Path) -> None:
    raw = PREFIX.pack(Send.KIND, len(SEND)) + SEND + PREFIX.pack(Send.KIND, 2**31) + SEND
    found, reader, _ = read_crafted(tmp_path / "a.journal", crafted(5, len(raw), zstd(raw)))
    assert [event.TABLE for event in found] == ["send"]
    assert [cut.records for cut in reader.cuts] == [4]


def test_a_file_full_of_magics_is_read_in_time_and_memory(tmp_path: Path) -> None:
    data = frames.MAGIC * 50_000 + crafted(0, 10, b"", length=2**25)[: frames.HEADER_BYTES] * 5_000
    start = time.monotonic()
    found, reader, peak = read_crafted(tmp_path / "a.journal", data)
    assert found == []
    assert len(reader.cuts) == 1
    assert time.monotonic() - start < 20
    assert peak < 16 * 2**20


def test_thousands_of_damaged_records_are_summed_up(tmp_path: Path) -> None:
    raw = PREFIX.pack(Send.KIND, 0) * 12_000
    _, reader, peak = read_crafted(tmp_path / "a.journal", crafted(12_000, len(raw), zstd(raw)))
    assert len(reader.cuts) == 10_000
    assert "more" in reader.cut
    assert len(reader.cut) < 1000
    assert peak < 32 * 2**20


def test_a_frame_that_is_gone_without_a_trace_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    writer = JournalWriter(path, PROCESS)
    ends = [writer.written]
    for room in range(3):
        writer.write(Alloc(room))
        writer.flush()
        ends.append(writer.written)
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data[: ends[1]] + data[ends[2] :])
    with JournalReader(path) as reader:
        assert [event.room for _, event in reader if isinstance(event, Alloc)] == [0, 2]
        assert [(cut.offset, cut.size, cut.records) for cut in reader.cuts] == [(ends[1], 0, 2)]
    path.write_bytes(data + data)
    with JournalReader(path) as reader:
        assert [event.room for _, event in reader if isinstance(event, Alloc)] == [0, 1, 2]
        assert reader.truncated, "a second journal behind the first is no part of it"


def test_reading_needs_no_more_memory_than_a_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    writer = JournalWriter(path, PROCESS)
    for seed in range(40):
        writer.write(Snapshot("ST", data=noise(300_000, seed)))
    writer.close()
    tracemalloc.start()
    with JournalReader(path) as reader:
        count = sum(isinstance(event, Snapshot) for _, event in reader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 40
    assert peak < 8 * 2**20 < path.stat().st_size


def test_the_file_is_closed_on_exec_and_readable_by_owner_and_group_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        writer = JournalWriter(tmp_path / "a.journal", PROCESS)
    finally:
        os.umask(old)
    assert (tmp_path / "a.journal").stat().st_mode & 0o777 == 0o640
    assert not os.get_inheritable(writer._file)
    writer.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
