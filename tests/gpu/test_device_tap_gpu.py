"""The device tap on CUDA: copies are ordered behind what is on the stream, nobody waits, captures are left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.events import Buffer, Process, Snapshot
from capture_hooks.journal import JournalReader
from capture_hooks.layouts import LAYOUTS
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import device_tap, look

FP8 = LAYOUTS["fp8"]
PAGES = 4096


@pytest.fixture
def cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch


@pytest.fixture
def held(cuda: Any, tmp_path: Path) -> Any:
    recorder = Recorder(Options(capture=tmp_path, mode="full", seal=False), Process(role="decode"))
    rng = np.random.default_rng(2)
    before = rng.integers(0, 256, (PAGES, FP8.page_bytes), dtype=np.uint8)
    pool = cuda.from_numpy(before).cuda()
    recorder.inventory.add(
        Buffer(0, pages=PAGES, pitch=FP8.page_bytes, address=pool.data_ptr(), memory="VRAM"), None, pool
    )
    look(recorder, "RC", "before", [0], [1], [0], room=1)  # makes the tap
    tap = device_tap(recorder)
    assert tap is not None
    tap.flush(10)
    cuda.cuda.synchronize()
    yield recorder, tap, pool, before
    recorder.close()


def busy(torch: Any, milliseconds: float) -> None:
    """Keep the current stream at work for about that long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def snapshots(recorder: Recorder, tap: Any) -> list[Any]:
    tap.close(20)
    recorder.close()
    with JournalReader(recorder.path) as reader:
        return [event for _, event in reader if isinstance(event, Snapshot) and event.moment != "before"]


def test_a_look_in_order_sees_what_was_put_on_the_stream_before_it_and_does_not_wait(
    cuda: Any, held: Any
) -> None:
    recorder, tap, pool, before = held
    stream = cuda.cuda.Stream()
    stream.wait_stream(cuda.cuda.current_stream())
    with cuda.cuda.stream(stream):
        busy(cuda, 200)
        pool[7] += 1
        began = time.perf_counter()
        look(recorder, "RC", "", [0], [7, 9], [0, 1], room=5)
        asked = time.perf_counter() - began
        busy(cuda, 50)
        pool[7] += 1
    assert asked < 0.1  # the stream had 200 ms of work before it
    cuda.cuda.synchronize()
    (event,) = snapshots(recorder, tap)
    right = before[[7, 9]].copy()
    right[0] += 1
    assert np.array_equal(event.digests, digest_pages(FP8, right).digests)


def test_a_look_aside_sees_the_memory_as_it_is_while_the_engine_is_at_work(cuda: Any, held: Any) -> None:
    recorder, tap, pool, before = held
    stream = cuda.cuda.Stream()
    stream.wait_stream(cuda.cuda.current_stream())
    with cuda.cuda.stream(stream):
        busy(cuda, 300)
        pool[7] += 1
        look(recorder, "LT", "", [0], [7], [0], room=5, aside=True)
        assert tap.flush(0.25)
        still = not stream.query()
    cuda.cuda.synchronize()
    (event,) = snapshots(recorder, tap)
    assert still
    assert np.array_equal(event.digests, digest_pages(FP8, before[[7]]).digests)


def test_large_looks_and_many_of_them_arrive_whole(cuda: Any, held: Any) -> None:
    recorder, tap, _pool, before = held
    order = np.random.default_rng(3).permutation(PAGES)
    for start in range(0, PAGES, 700):
        look(
            recorder,
            "RC",
            "",
            [0],
            order[start : start + 700],
            np.arange(700)[: PAGES - start],
            room=start + 2,
        )
        tap.flush(10)
    found = snapshots(recorder, tap)
    want = digest_pages(FP8, before)
    assert sum(len(event.pages) for event in found) == PAGES
    for event in found:
        assert np.array_equal(event.digests, want.digests[event.pages])
        assert np.array_equal(event.row_values, want.row_values[event.pages])


def test_nothing_is_taken_while_a_graph_is_captured(cuda: Any, held: Any) -> None:
    recorder, tap, _pool, _ = held
    graph = cuda.cuda.CUDAGraph()
    one = cuda.zeros(1, device="cuda")
    with cuda.cuda.graph(graph):
        one += 1
        look(recorder, "RC", "", [0], [3], [0], room=5)
    graph.replay()
    cuda.cuda.synchronize()
    assert one.item() == 1
    assert not snapshots(recorder, tap)


def test_what_a_graph_is_given_is_copied_out_at_each_replay(cuda: Any) -> None:
    from capture_hooks.taps.graphs import GraphPlaces

    places = GraphPlaces(cuda.device("cuda"))
    given, pool = cuda.zeros(8, 128, device="cuda"), cuda.zeros(64, 128, device="cuda")
    side, other = cuda.cuda.Stream(), cuda.cuda.Stream()

    def run() -> None:
        """As an engine: the kernel is on a stream of its own, and what it is given is nobody's afterwards."""
        here = cuda.cuda.current_stream()
        scaled = given * 2
        other.wait_stream(here)
        with cuda.cuda.stream(other):
            pool[:8] = scaled
            if places.capturing():
                assert places.put(3, {"kv": scaled}, "about")
            else:
                places.reserve(3, {"kv": scaled})
        here.wait_stream(other)
        scaled.add_(7)

    graph = cuda.cuda.CUDAGraph()
    side.wait_stream(cuda.cuda.current_stream())
    with cuda.cuda.stream(side):
        run()
    cuda.cuda.current_stream().wait_stream(side)
    with cuda.cuda.graph(graph):
        run()
    assert places.counters().tolist() == [0], "a capture runs nothing"
    for number in range(1, 4):
        given.fill_(number)
        graph.replay()
        assert (places.places[3].parts["kv"] == 2 * number).all()
        assert places.counters().tolist() == [number]


def test_the_host_pays_less_than_a_millisecond_for_a_look(cuda: Any, held: Any) -> None:
    recorder, tap, _, _ = held
    times = []
    for number in range(200):
        began = time.perf_counter()
        look(recorder, "RC", "", [0], list(range(number, number + 16)), list(range(16)), room=5)
        times.append(time.perf_counter() - began)
        if number % 20 == 0:
            tap.flush(5)
    median, most = (1e6 * float(np.quantile(times, q)) for q in (0.5, 0.99))
    print(f"a look at 16 pages: median {median:.0f} us, 99 % {most:.0f} us")
    assert np.median(times) < 1e-3
