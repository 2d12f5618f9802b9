"""The device tap on CPU tensors: places in its memory, order of arrival, snapshots. Tests of CUDA are in tests/gpu."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.events import Buffer, Content, Loss, Process, Snapshot
from capture_hooks.journal import JournalReader
from capture_hooks.layouts import LAYOUTS
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import device_tap, look

torch = pytest.importorskip("torch")
from capture_hooks.taps.device import DeviceTap, Job, PinnedRing, gather  # noqa: E402

FP8 = LAYOUTS["fp8"]


def read(recorder: Recorder) -> list[Any]:
    recorder.close()
    with JournalReader(recorder.path) as reader:
        return list(reader)


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="decode"))
    yield recorder
    recorder.close()


def test_places_are_given_back_in_order_and_never_overlap() -> None:
    rng = np.random.default_rng(3)
    ring = PinnedRing(4096)
    live: list[tuple[int, int]] = []
    taken = 0
    for _ in range(5000):
        size = int(rng.integers(0, 1500))
        at = ring.take(size)
        if at is None:
            if not live:
                assert size > ring.size
                continue
            ring.give()
            live.pop(0)
            continue
        taken += 1
        assert at >= 0
        assert at + size <= ring.size
        assert all(at + size <= other or other + length <= at for other, length in live)
        live.append((at, max(size, 64)))
    assert taken > 1000


def test_what_is_larger_than_the_ring_finds_no_place() -> None:
    assert PinnedRing(128).take(129) is None


def test_jobs_arrive_whole_and_in_the_order_of_their_submits(recorder: Recorder) -> None:
    tap = DeviceTap(recorder, torch.device("cpu"), 2**20)
    seen: list[list[Any]] = []
    for number in range(200):
        job = Job()
        job.take(torch.full((3, number % 7), number, dtype=torch.int32))
        job.take(torch.tensor([number], dtype=torch.int64))
        job.take(torch.arange(5, dtype=torch.float32).bfloat16())
        job.take(torch.zeros((0, 8), dtype=torch.uint8))
        while not tap.submit(job, lambda arrays: seen.append([np.array(a) for a in arrays])):
            time.sleep(0.001)
    assert tap.flush(10)
    assert [int(arrays[1][0]) for arrays in seen] == list(range(200))
    assert all((arrays[0] == n).all() and arrays[0].shape == (3, n % 7) for n, arrays in enumerate(seen))
    assert seen[5][2].dtype == np.uint16
    assert seen[5][3].shape == (0, 8)
    tap.close()


def test_a_failing_finish_is_counted_and_the_next_job_still_arrives(recorder: Recorder) -> None:
    tap = DeviceTap(recorder, torch.device("cpu"), 2**16)
    arrived = threading.Event()

    def broken(_: Any) -> None:
        raise ValueError("no")

    for finish in (broken, lambda _: arrived.set()):
        job = Job()
        job.take(torch.zeros(4, dtype=torch.uint8))
        assert tap.submit(job, finish)
    assert arrived.wait(10)
    assert recorder.guard("device-tap").errors == 1


def test_a_job_without_a_place_is_counted_as_lost(tmp_path: Path) -> None:
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process(role="decode"))
    tap = DeviceTap(recorder, torch.device("cpu"), 1024)
    job = Job()
    job.take(torch.zeros(2048, dtype=torch.uint8))
    assert not tap.submit(job, lambda _: None, [("snapshot", 3)])
    losses = [event for _, event in read(recorder) if isinstance(event, Loss)]
    assert sum(loss.count for loss in losses if loss.what == "snapshot") == 3


def test_a_page_id_outside_the_pool_is_not_followed() -> None:
    pool = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    found = gather(pool, torch.tensor([-7, 1, 99]), 3)
    assert found.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


@pytest.mark.parametrize("aside", [False, True])
def test_a_look_at_a_device_is_an_interval_until_its_copy_is_over(tmp_path: Path, aside: bool) -> None:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="decode"))
    pools = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, (2, 9, FP8.page_bytes), dtype=np.uint8)
    )
    for number in range(2):
        event = Buffer(number, layer=number, pages=9, pitch=FP8.page_bytes, address=4096 + number * 2**20)
        recorder.inventory.add(event, None, pools[number])
    before = recorder.mark()
    look(
        recorder, "RC", "", [0, 1], [7, 2], [0, 1], room=5, attempt=1, transfer=3, step=4, rows=70, aside=aside
    )  # fmt: skip
    pools.zero_()  # the copy was made in order
    tap = device_tap(recorder)
    assert tap is not None
    tap.close()
    pages = np.random.default_rng(1).integers(0, 256, (2, 9, FP8.page_bytes), dtype=np.uint8)
    found = read(recorder)
    looks = [(stamp, event) for stamp, event in found if isinstance(event, Snapshot)]
    kept = {bytes(d.tobytes()) for _, e in found if isinstance(e, Content) for d in e.data}
    assert [event.buffer for _, event in looks] == [0, 1]
    for number, (stamp, event) in enumerate(looks):
        assert (event.room, event.attempt, event.rows, event.transfer, event.step) == (5, 1, 70, 3, 4)
        assert before.seq < stamp.begin_seq < stamp.seq
        assert stamp.stream == -1
        want = digest_pages(FP8, pages[number][[7, 2]])
        assert np.array_equal(event.digests, want.digests)
        assert np.array_equal(event.row_values, want.row_values)
        assert {pages[number][7].tobytes(), pages[number][2].tobytes()} <= kept


def test_a_look_at_pages_that_do_not_exist_is_counted_and_recorded_nowhere(tmp_path: Path) -> None:
    recorder = Recorder(Options(capture=tmp_path, seal=False), Process(role="decode"))
    recorder.inventory.add(
        Buffer(0, pages=2, pitch=FP8.page_bytes), None, torch.zeros((2, FP8.page_bytes), dtype=torch.uint8)
    )
    look(recorder, "RC", "", [0], [5], [0], room=1)
    assert recorder.guard("look").errors == 1
    assert not [event for _, event in read(recorder) if isinstance(event, Snapshot)]
