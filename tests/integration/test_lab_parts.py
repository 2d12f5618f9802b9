"""The lab's parts one by one: allocator, stream, barriers, control channel, pool and configuration."""

from __future__ import annotations

import json
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.layouts import LAYOUTS
from replay.kernels.reference import logits_reference
from replay.lab import model
from replay.lab.audit import row_hashes
from replay.lab.barriers import Barriers, timeouts
from replay.lab.config import PAGE_TOKENS, Job, LabConfig, pages_for
from replay.lab.control import MAX_MESSAGE, Channel, ControlError, Listener, Message
from replay.lab.faults import FAULTS, FOREIGN_ITEM, Policy, policy
from replay.lab.kernels import TILE_HEADS, TILE_ROWS
from replay.lab.metadata import SLOT_BYTES, MetadataSlots
from replay.lab.pool import DUMMY_PAGE, PageAllocator, PagedPool, ReadBatch, StoreBatch, StorePart
from replay.lab.replies import padded
from replay.lab.stream import Event, Stream
from replay.lab.transport import Slice, Transfer, Transport, TransportError, Wire
from replay.lab.transports import choose

ROOT = Path(__file__).parents[2]


def test_a_lifo_list_gives_the_pages_of_the_last_request_in_the_same_order() -> None:
    allocator = PageAllocator(20)
    first = allocator.alloc(1, 0, 5)
    assert first is not None
    allocator.free(1, 0, first, "abort")
    again = allocator.alloc(2, 0, 5)
    assert again is not None
    assert again.tolist() == first.tolist()


def test_a_fifo_list_gives_the_pages_that_were_freed_longest_ago() -> None:
    allocator = PageAllocator(10, "fifo")
    first = allocator.alloc(1, 0, 4)
    assert first is not None
    allocator.free(1, 0, first, "finish")
    second = allocator.alloc(2, 0, 5)
    assert second is not None
    assert not set(second.tolist()) & set(first.tolist())


def test_the_dummy_page_is_never_given_away_and_too_much_is_refused() -> None:
    allocator = PageAllocator(9)
    assert allocator.alloc(1, 0, 9) is None
    pages = allocator.alloc(1, 0, 8)
    assert pages is not None
    assert DUMMY_PAGE not in pages


def test_pages_of_another_request_cannot_be_freed() -> None:
    allocator = PageAllocator(9)
    pages = allocator.alloc(1, 0, 2)
    assert pages is not None
    with pytest.raises(RuntimeError, match="not held by room 2"):
        allocator.free(2, 0, pages, "finish")


def test_a_shared_page_is_free_once_nobody_holds_it() -> None:
    allocator = PageAllocator(9)
    pages = allocator.alloc(1, 0, 3)
    assert pages is not None
    assert allocator.share(2, 0, pages[:2]).tolist() == pages[:2].tolist()
    allocator.free(1, 0, pages, "finish")
    assert allocator.available == 6, "one of the three; the others are still shared"
    with pytest.raises(RuntimeError, match="not held by room 3"):
        allocator.free(3, 0, pages[:2], "finish")
    allocator.free(2, 0, pages[:2], "finish")
    assert allocator.available == 8
    again = allocator.alloc(4, 0, 8)
    assert again is not None
    assert len(set(again.tolist())) == 8


def test_an_allocator_that_counts_no_sharers_frees_with_the_owner_and_only_then() -> None:
    allocator = PageAllocator(9, keep_shared=False)
    pages = allocator.alloc(1, 0, 2)
    assert pages is not None
    allocator.share(2, 0, pages)
    allocator.free(1, 0, pages, "finish")
    assert allocator.available == 8
    allocator.free(2, 0, pages, "finish")
    assert allocator.available == 8


def test_a_metadata_slot_keeps_its_room_until_the_next_one_writes() -> None:
    slots = MetadataSlots(2)
    first = slots.take(7000, 0)
    assert slots.read(7000, 0, first) == -1
    slots.write(7000, 0, first)
    assert slots.memory[first, :8].view("<i8")[0] == 7000
    assert slots.address(1) - slots.address(0) == SLOT_BYTES
    slots.give_back(7000, 0, first)
    assert slots.take(7001, 0) == first
    assert slots.read(7001, 0, first) == 7000
    slots.take(7002, 0)
    with pytest.raises(RuntimeError, match="metadata_slots is too small"):
        slots.take(7003, 0)


def test_a_stream_runs_in_order_and_an_event_happens_after_its_job() -> None:
    errors: list[BaseException] = []
    stream = Stream("test", errors.append)
    gate = threading.Event()
    done: list[int] = []

    def slow() -> None:
        gate.wait(5)
        done.append(1)

    first = stream.launch(slow)
    second = stream.launch(lambda: done.append(2))
    assert not first.query()
    assert not second.query()
    gate.set()
    assert second.wait(5)
    assert first.query()
    assert done == [1, 2]
    stream.close()
    assert not errors


def test_a_job_that_raises_is_told_once_and_later_events_still_happen() -> None:
    errors: list[BaseException] = []
    stream = Stream("test", errors.append)

    def broken() -> None:
        raise ZeroDivisionError

    stream.launch(broken)
    later: list[int] = []
    event = stream.launch(lambda: later.append(1))
    assert event.wait(5)
    stream.close()
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert not later


def test_a_barrier_waits_for_its_flag_and_tells_when_it_did_not_come(tmp_path: Path) -> None:
    barriers = Barriers(str(tmp_path), {"a:1": "b:2, b:3"})
    passed = threading.Event()

    def holder() -> None:
        barriers.at("a", 1)
        passed.set()

    thread = threading.Thread(target=holder)
    thread.start()
    assert barriers.wait("held a:1")
    barriers.at("b", 2)
    time.sleep(0.02)
    assert not passed.is_set(), "it waits for both"
    barriers.at("b", 3)
    assert passed.wait(20)
    thread.join()
    assert timeouts(tmp_path) == []
    Barriers(str(tmp_path), {"c:3": "never"}, timeout=0.05).at("c", 3)
    assert timeouts(tmp_path) == ["c:3"]


def test_a_thread_with_other_work_asks_again_until_a_barrier_lets_it_pass(tmp_path: Path) -> None:
    barriers = Barriers(str(tmp_path), {"a:1": "b:2"})
    assert not barriers.open("a", 1)
    assert barriers.up("held a:1")
    barriers.at("b", 2)
    assert barriers.open("a", 1)
    assert barriers.up("a:1")
    assert barriers.open("d", 4), "no rule"
    assert not Barriers(str(tmp_path), {"c:3": "never"}, timeout=600.0).open("c", 3)
    assert timeouts(tmp_path) == []
    short = Barriers(str(tmp_path), {"c:3": "never"}, timeout=0.05)
    short.open("c", 3)
    time.sleep(0.06)
    assert short.open("c", 3)
    assert timeouts(tmp_path) == ["c:3"]


def test_barriers_without_a_folder_do_nothing() -> None:
    begin = time.monotonic()
    Barriers("", {"a:1": "never"}, timeout=600.0).at("a", 1)
    assert Barriers("", {"a:1": "never"}).open("a", 1)
    assert time.monotonic() - begin < 300


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    listener = Listener("secret")
    left = Channel.connect(listener.port, "secret")
    right = listener.accept()
    yield left, right
    left.close()
    right.close()
    listener.close()


def test_messages_arrive_whole_and_in_order(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    for i in range(50):
        left.send("number", i=i, pages=list(range(i)))
    assert [right.expect("number")["i"] for _ in range(50)] == list(range(50))
    left.close()
    assert right.receive() is None


def test_a_caller_without_the_token_is_refused() -> None:
    listener = Listener("secret")
    wrong = Channel.connect(listener.port, "guess")
    right = Channel.connect(listener.port, "secret")
    accepted = listener.accept()
    right.send("hello")
    assert accepted.expect("hello")
    assert wrong.receive() is None
    for end in (wrong, right, accepted):
        end.close()
    listener.close()


def test_a_length_that_cannot_be_right_is_refused_before_anything_is_allocated() -> None:
    left, right = socket.socketpair()
    channel = Channel.__new__(Channel)
    channel._socket, channel._reader, channel._lock = right, right.makefile("rb"), threading.Lock()
    left.sendall(struct.pack("<I", MAX_MESSAGE + 1))
    with pytest.raises(ControlError, match="announces a message"):
        channel.receive()
    left.sendall(struct.pack("<I", 2) + b"[]")
    with pytest.raises(ControlError, match="without a kind"):
        channel.receive()
    left.close()
    right.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_library_that_fails_ends_the_round_and_not_only_its_thread(side: str) -> None:
    class Falling(Transport):
        def describe(self) -> dict[str, Any]: ...
        def connect(self, peer: dict[str, Any]) -> None: ...
        def begin(self, transfer: Transfer, part: Slice) -> Any: ...
        def release(self, handle: Any) -> None: ...

        def poll(self, handle: Any) -> str:
            raise RuntimeError("the library fell over")

        def progress(self) -> None:
            raise RuntimeError("the library fell over")

    told: queue.Queue[BaseException] = queue.Queue()
    transport = Falling(
        "prefill", np.zeros((1, 2, 16), np.uint8), np.zeros((1, 64), np.uint8), Wire(1e9, 1 << 20), Barriers()
    )
    transport.on_error = told.put
    addresses = np.zeros(1, np.uint64)
    if side == "sender":
        transport.start_sender()
        part = Slice(0, 0, addresses, addresses, 16)
        pages = np.zeros(1, np.int64)
        transport.post(Transfer(7000, 0, 0, True, 0, pages, pages, 16, Event(1), (part,), 1))
    else:
        transport.start_receiver()
    assert str(told.get(timeout=10)) == "the library fell over"
    transport.close()


def test_a_handler_that_fails_is_told_and_not_only_its_thread_ends(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    told: queue.Queue[BaseException] = queue.Queue()

    def handler(message: Message) -> None:
        raise KeyError(message["kind"])

    right.serve(handler, "test-peer", told.put)
    left.send("hello")
    assert isinstance(told.get(timeout=10), KeyError)


def test_the_configuration_survives_json() -> None:
    config = LabConfig(
        format="fp4", jobs=(Job(7, 300, 5, 12.5), Job(8, 2000, 9, after="x:1")), rules={"a": "b"}
    )
    assert LabConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    drawn = LabConfig(seed=3, prefixes=0.5, outages=0.2)
    assert LabConfig.from_json(json.loads(json.dumps(drawn.to_json()))).clients() == drawn.clients()


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "fp7"},
        {"layers": 0},
        {"free_list": "stack"},
        {"transport": "pigeon"},
        {"chunk_tokens": 300},
        {"decode_pages": 8},
        {"jobs": (Job(1, 3, 4),)},
        {"layers": 2, "apart": 2},
    ],
)
def test_sizes_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        LabConfig(**wrong)  # type: ignore[arg-type]


def test_prefixes_and_outages_leave_the_clients_as_they_are() -> None:
    plain, more = LabConfig(seed=3).clients(), LabConfig(seed=3, prefixes=0.9, outages=0.3).clients()
    assert [(j.room, j.tokens, j.new_tokens, j.patience_ms) for j in plain] == [
        (j.room, j.tokens, j.new_tokens, j.patience_ms) for j in more
    ]
    tokens = {job.room: job.tokens for job in more}
    alike = [job for job in more if job.prefix_of >= 0]
    assert len(alike) > 20
    first = {job.room for job in more if job.prefix_of < 0}
    for job in alike:
        assert job.prefix_of in first, "of a prompt that is its own"
        assert 0 < job.prefix_pages * PAGE_TOKENS <= min(tokens[job.prefix_of], job.tokens - 1)
    assert 10 < sum(job.outage == 0 for job in more) < 50


def test_unknown_faults_name_the_known_ones() -> None:
    with pytest.raises(ValueError, match="late-foreign-write"):
        policy("late", LAYOUTS["fp8"])


def test_only_the_fault_free_policy_is_the_default_one() -> None:
    for layout in LAYOUTS.values():
        assert {kind: policy(kind, layout) == Policy() for kind in FAULTS} == {k: k == "none" for k in FAULTS}
        assert FOREIGN_ITEM[layout.name] != layout.page_bytes


def test_nixl_is_preferred_and_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.lab.transports.nixl_missing", lambda: "")
    assert choose("auto") == ("nixl", "")
    monkeypatch.setattr("replay.lab.transports.nixl_missing", lambda: "the package 'nixl' is not installed")
    kind, note = choose("auto")
    assert kind == "tcp"
    assert "nixl" in note
    assert choose("tcp") == ("tcp", "")
    with pytest.raises(TransportError, match="not installed"):
        choose("nixl")


def rows_of_a_request() -> StorePart:
    rows = np.arange(200, dtype=np.int64)
    slots = np.array([4, 9, 2, 7])[rows // 64] * 64 + rows % 64
    return StorePart(7000, 0, slots, model.position(rows), rows, model.keys(5, 7000, 0, rows))


def _pool(format_: str, kind: str = "none") -> PagedPool:
    layout = LAYOUTS[format_]
    pool = PagedPool(layout, 1, 12, policy(kind, layout))
    pool.store(StoreBatch(0, 1, (rows_of_a_request(),)))
    return pool


def _read(pool: PagedPool, rows: int, heads: int = 8) -> tuple[ReadBatch, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    table = np.array([[4, 9, 2, 7]])
    query, weights = model.queries(5, np.array([7000]), 0, np.array([rows * 4]), heads)
    batch = ReadBatch(0, 1, ((7000, 0),), table, np.array([rows]), query, weights, 64)
    logits, bound = logits_reference(pool.layout, pool.memory[0][table[0]], rows, query[0], weights[0])
    return batch, logits, bound


@pytest.mark.parametrize("format_", list(LAYOUTS))
def test_padding_is_skipped_or_lands_in_the_last_row_of_the_last_page(format_: str) -> None:
    layout = LAYOUTS[format_]
    one, rows = np.zeros(1, np.int64), np.arange(1)
    stored = StorePart(7000, 0, one + 4 * 64, one, one, model.keys(5, 7000, 0, rows))
    parts = padded((stored,), 0, 8, 5)
    assert [len(part.slots) for part in parts] == [1, 7]
    assert padded((stored,), 0, 0, 5) == (stored,)
    assert padded((), 0, 8, 5) == ()
    for kind, hit in (("none", []), ("padding-row-written", [11])):
        pool = PagedPool(layout, 1, 12, policy(kind, layout))
        pool.store(StoreBatch(0, 1, parts))
        assert np.flatnonzero(pool.memory[0].any(axis=1)).tolist() == [4, *hit]
        values = layout.values(pool.memory[0][[11]])[0]
        assert np.flatnonzero(values.any(axis=1)).tolist() == [63 for _ in hit]


@pytest.mark.parametrize("format_", list(LAYOUTS))
def test_the_plain_read_is_within_the_references_bound(format_: str) -> None:
    pool = _pool(format_)
    batch, logits, bound = _read(pool, 200)
    found = pool.read(batch)
    assert (np.abs(found.logits[0] - logits) <= bound).all()
    assert found.kernels == ("torch",)


@pytest.mark.parametrize("format_", list(LAYOUTS))
def test_the_tiled_read_leaves_the_bound_clearly(format_: str) -> None:
    pool = _pool(format_, "kernel-numerics")
    batch, logits, bound = _read(pool, 200)
    wrong = np.abs(pool.read(batch).logits[0] - logits) > 3 * bound
    rows = np.arange(200) % 64
    if pool.layout.scale_bytes:
        assert not wrong[rows <= TILE_ROWS].any(), "right up to the tile boundary and in its first row"
        assert wrong[rows > TILE_ROWS].mean() > 0.5
    else:
        assert 8 % TILE_HEADS, "the last tile of heads is not whole"
        assert wrong.mean() > 0.1, "wherever a dropped head is not zero after relu"
    assert pool.read(batch).kernels == ("torch",), "its name says nothing"


SAMPLE = """
import numpy as np
from replay.lab import kernels
kernels.prepare()  # triton decides when it is imported, so this needs a process of its own
from capture_hooks.layouts import LAYOUTS
from replay.lab.pool import PagedPool, StoreBatch
from replay.lab.faults import Policy
from tests.integration.test_lab_parts import _pool, _read, rows_of_a_request
for name, layout in LAYOUTS.items():
    pool, plain = PagedPool(layout, 1, 12, Policy(), triton_pages=1), _pool(name)
    pool.store(StoreBatch(0, 1, (rows_of_a_request(),)))
    assert pool.interpreted == {"store": 1, "read": 0}
    assert np.array_equal(pool.memory, plain.memory), name
    batch, logits, bound = _read(pool, 60)
    found = pool.read(batch)
    assert found.kernels == ("triton",)
    assert (np.abs(found.logits[0] - logits) <= bound).all(), name
    assert pool.interpreted == {"store": 1, "read": 1}
    assert pool.read(batch).kernels == ("torch",), "the sample is used up"
"""


def test_the_sample_on_the_interpreter_has_the_bytes_of_the_torch_twin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_slots_and_pages_outside_the_pool_are_refused_before_a_kernel_gets_them() -> None:
    pool = _pool("fp8")
    batch, _, _ = _read(pool, 100)
    with pytest.raises(ValueError, match="outside the pool"):
        pool.read(replace(batch, table=np.array([[4, 12, 2, 7]])))
    one = np.zeros(1, np.int64)
    for slot in (3, 12 * 64):
        part = StorePart(1, 0, one + slot, one, one, model.keys(0, 1, 0, one))
        with pytest.raises(ValueError, match="outside the pool"):
            pool.store(StoreBatch(0, 1, (part,)))


def test_keys_depend_on_seed_room_layer_and_row_alone() -> None:
    rows = np.arange(40)
    whole = model.keys(1, 7000, 2, rows)
    assert np.array_equal(model.keys(1, 7000, 2, rows[13:20]), whole[13:20])
    for other in ((2, 7000, 2), (1, 7001, 2), (1, 7000, 3)):
        assert not np.isclose(model.keys(*other, rows), whole).any(axis=1).all()


@pytest.mark.parametrize("format_", list(LAYOUTS))
def test_row_hashes_see_every_byte_of_a_row_and_nothing_else(format_: str) -> None:
    layout = LAYOUTS[format_]
    memory = np.zeros((1, 3, layout.page_bytes), np.uint8)
    pages = np.array([2, 1])
    before = row_hashes(layout, memory, pages, 100)
    draw = np.random.default_rng(0)
    for row in (0, 63, 64, 99, 101):
        page, inside = pages[row // 64], row % 64
        places = [*range(*layout.value_range(inside, inside)), *range(*layout.scale_range(inside, inside))]
        for place in draw.choice(places, 6):
            memory[0, page, place] ^= 0x40
            changed = np.flatnonzero(row_hashes(layout, memory, pages, 100)[0] != before[0])
            assert changed.tolist() == ([row] if row < 100 else [])
            memory[0, page, place] ^= 0x40


def test_pages_hold_256_tokens() -> None:
    assert [pages_for(tokens) for tokens in (1, 256, 257, 1024)] == [1, 1, 2, 4]
