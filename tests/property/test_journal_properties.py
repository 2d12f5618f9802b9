from __future__ import annotations

import contextlib
import math
import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import frames
from capture_hooks.codec import Decoder, encode, schema_json
from capture_hooks.events import EVENTS, Alloc, Clock, Loss, Process, Send, Snapshot
from capture_hooks.journal import JournalError, JournalReader, JournalWriter
from capture_hooks.options import Options
from capture_hooks.records import Event, Stamp, schema

i64 = st.integers(-(2**63), 2**63 - 1)
stamps = st.builds(Stamp, i64, i64, i64, i64, i64, i64)


def arrays(dtype: str, shape: tuple[int | None, ...]) -> st.SearchStrategy[np.ndarray]:
    def fill(sizes: list[int], seed: int) -> np.ndarray:
        whole = [size if fixed is None else fixed for fixed, size in zip(shape, sizes, strict=True)]
        raw = np.random.default_rng(seed).bytes(math.prod(whole) * np.dtype(dtype).itemsize)
        return np.frombuffer(raw, dtype).reshape(whole)

    sizes = st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape))
    return st.builds(fill, sizes, st.integers(0, 2**32 - 1))


def values(item: Any) -> st.SearchStrategy[Any]:
    if item.type == "array":
        return arrays(item.array.dtype, item.array.shape)
    return {"int": i64, "float": st.floats(), "bool": st.booleans(), "str": st.text(max_size=30)}[item.type]


events = st.one_of(
    *(st.builds(event, **{item.name: values(item) for item in schema(event)}) for event in EVENTS)
)


def same(left: Event, right: Event) -> bool:
    if type(left) is not type(right):
        return False
    for item in fields(left):  # type: ignore[arg-type]
        mine, other = getattr(left, item.name), getattr(right, item.name)
        if isinstance(mine, np.ndarray):
            if mine.size == other.size == 0:
                continue  # an array without elements is "not recorded", whatever its shape
            if mine.dtype != other.dtype or mine.shape != other.shape or mine.tobytes() != other.tobytes():
                return False
        elif type(mine) is not type(other) or (mine != other and not (mine != mine and other != other)):
            return False
    return True


@settings(max_examples=300)
@given(events, stamps)
def test_every_record_comes_back_as_it_was(event: Event, stamp: Stamp) -> None:
    record = encode(
        event, (stamp.seq, stamp.begin_seq, stamp.thread, stamp.stream, stamp.begin_ns, stamp.end_ns)
    )
    found = Decoder(schema_json()).decode(record.kind, memoryview(record.head + record.bulk))
    assert found is not None
    assert found[0] == stamp
    assert same(found[1], event)


@settings(max_examples=100)
@given(events)
def test_a_record_whose_bulk_was_given_up_keeps_all_its_other_fields(event: Event) -> None:
    record = encode(event, (1, 2, 3, 4, 5, 6))
    found = Decoder(schema_json()).decode(record.kind, memoryview(record.head + record.bare))
    assert found is not None
    bulk = {item.name: item.array.empty() for item in schema(type(event)) if item.array and item.array.bulk}
    assert same(found[1], replace(event, **bulk))  # type: ignore[type-var]
    assert record.has_bulk() == any(getattr(event, name).size for name in bulk)


@settings(max_examples=25)
@given(st.lists(st.tuples(events, stamps), max_size=8), st.integers(1, 3000))
def test_a_journal_gives_back_its_records_in_order(records: list[tuple[Event, Stamp]], flush: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        writer = JournalWriter(path, Process("prefill", run="r"), Options(flush_bytes=flush))
        for event, stamp in records:
            writer.write(event, stamp)
        writer.close()
        with JournalReader(path) as reader:
            found = [pair for pair in reader if not _own(pair)]
            assert (reader.cuts, reader.ended, reader.unknown) == ([], True, {})
        wanted = [(event, stamp) for event, stamp in records if not _own((stamp, event))]
        assert len(found) == len(wanted)
        for (stamp, event), (wanted_event, wanted_stamp) in zip(found, wanted, strict=True):
            assert stamp == wanted_stamp
            assert same(event, wanted_event)


def _own(pair: tuple[Stamp, Event]) -> bool:
    return isinstance(pair[1], Clock | Process | Loss)


def _journal() -> tuple[bytes, list[int], list[list[str]]]:
    """A journal, the ends of its frames, and what each frame holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        writer = JournalWriter(path, Process("decode", run="r"))
        for room in range(6):
            writer.write(Alloc(room, pages=np.arange(room)), Stamp(seq=room))
            writer.write(Send(room, source=np.full((2, 2), room, np.uint64)), Stamp(seq=100 + room))
            writer.write(
                Snapshot("ST", room=room, data=np.full((1, 4, 50), room, np.uint8).reshape(1, 200)),
                Stamp(seq=200 + room),
            )
            if room % 3 == 2:
                writer.flush()
        writer.close()
        data = path.read_bytes()
        ends, held = [], []
        for offset, header, _ in frames.Scanner(path.open("rb"), len(data), lambda cut: None):
            ends.append(offset + frames.HEADER_BYTES + header.length)
        for end in ends:
            part = Path(folder) / f"{end}.journal"
            part.write_bytes(data[:end])
            with JournalReader(part) as reader:
                held.append([_show(stamp, event) for stamp, event in reader])
        return data, ends, held


def _show(stamp: Stamp, event: Event) -> str:
    parts = [f"{stamp}"]
    for item in fields(event):  # type: ignore[arg-type]
        value = getattr(event, item.name)
        parts.append(f"{item.name}={value.tobytes().hex() if isinstance(value, np.ndarray) else value!r}")
    return f"{type(event).__name__} {' '.join(parts)}"


DATA, ENDS, HELD = _journal()


def _read(data: bytes) -> tuple[list[str], JournalReader]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        path.write_bytes(data)
        with JournalReader(path) as reader:
            return [_show(stamp, event) for stamp, event in reader], reader


def test_a_journal_cut_at_any_byte_gives_exactly_the_whole_frames_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(DATA)
    for cut in range(len(DATA), -1, -1):
        os.truncate(path, cut)
        whole = [index for index, end in enumerate(ENDS) if end <= cut]
        with JournalReader(path) as reader:
            found = [_show(stamp, event) for stamp, event in reader]
        assert found == (HELD[whole[-1]] if whole else [])
        left = cut - (ENDS[whole[-1]] if whole else 0)
        assert [(c.offset, c.size, c.what) for c in reader.cuts] == (
            [(cut - left, left, "an unfinished frame")] if left else []
        ), cut
        assert reader.ended == (cut == len(DATA))


@settings(max_examples=600)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_never_gives_a_wrong_record_and_is_always_told(at: int, flip: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= flip
    found, reader = _read(bytes(damaged))
    frame = next(index for index, end in enumerate(ENDS) if at < end)
    inside = set(HELD[frame]) - set(HELD[frame - 1] if frame else [])
    assert found == [shown for shown in HELD[-1] if shown not in inside]
    if frame == len(ENDS) - 1:
        assert [cut.records for cut in reader.cuts] == [-1]
        assert not reader.ended
    elif frame > 0:
        assert [cut.records for cut in reader.cuts] == [len(inside)]
        assert reader.ended
    assert reader.truncated
    assert reader.cuts[0].offset <= at < reader.cuts[0].offset + reader.cuts[0].size


@settings(max_examples=150)
@given(st.integers(0, len(DATA)), st.integers(0, 400), st.binary(max_size=300))
def test_bytes_taken_out_and_put_in_never_give_a_wrong_record(at: int, length: int, other: bytes) -> None:
    try:
        found, reader = _read(DATA[:at] + other + DATA[at + length :])
    except JournalError:
        return
    kept = iter(HELD[-1])
    assert all(shown in kept for shown in found), "records are a subsequence of what was written"
    if len(found) < len(HELD[-1]):
        assert reader.truncated or not reader.ended


@settings(max_examples=150)
@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_give_a_journal_error_or_nothing(data: bytes, magic: bool) -> None:
    found: list[str] = []
    with contextlib.suppress(JournalError):
        found, _ = _read((frames.MAGIC if magic else b"") + data)
    assert found == []
