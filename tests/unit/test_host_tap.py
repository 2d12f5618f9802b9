from __future__ import annotations

import threading
from collections.abc import Iterator
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
from capture_hooks.records import Event, Stamp
from capture_hooks.taps import host
from capture_hooks.taps.host import snapshot

FP8 = LAYOUTS["fp8"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Recorder] = []

    def build(**options: Any) -> tuple[Recorder, np.ndarray]:
        recorder = Recorder(Options(capture=tmp_path, seal=False, **options), Process("prefill"))
        made.append(recorder)
        view = np.random.default_rng(1).integers(0, 256, (10, FP8.page_bytes + 64), dtype=np.uint8)
        recorder.inventory.add(Buffer(0, pages=10, pitch=FP8.page_bytes + 64), view)
        recorder.inventory.add(Buffer(1, pages=10, pitch=FP8.page_bytes, memory="VRAM"))
        return recorder, view

    yield build
    for recorder in made:
        recorder.close()


def read(recorder: Recorder) -> list[tuple[Stamp, Event]]:
    recorder.close()
    with JournalReader(recorder.path) as reader:
        return list(reader)


def pick(found: list[tuple[Stamp, Event]], *kinds: type[Event]) -> list[Any]:
    return [event for _, event in found if isinstance(event, kinds)]


def test_a_snapshot_holds_the_pages_as_they_were_at_the_call(make: Any) -> None:
    recorder, view = make(mode="full")
    wanted = view[[7, 2], : FP8.page_bytes].copy()
    digests = digest_pages(FP8, wanted)
    pages, logical = np.array([7, 2]), np.array([0, 1])
    mark = recorder.mark()
    seq = snapshot(
        recorder,
        "SE",
        "before",
        0,
        pages,
        logical,
        room=7719,
        attempt=1,
        transfer=5,
        step=6,
        rows=100,
        mark=mark,
    )
    view[:] = 0
    pages[:] = logical[:] = 9
    found = read(recorder)
    ((stamp, event),) = [(s, e) for s, e in found if isinstance(e, Snapshot)]
    assert (stamp.begin_seq, stamp.seq) == (mark.seq, seq)
    assert stamp.begin_ns == mark.ns <= stamp.end_ns
    assert (event.stage, event.moment, event.room, event.attempt) == ("SE", "before", 7719, 1)
    assert (event.buffer, event.transfer, event.step, event.rows) == (0, 5, 6, 100)
    assert event.pages.tolist() == [7, 2]
    assert event.logical.tolist() == [0, 1]
    assert np.array_equal(event.digests, digests.digests)
    assert np.array_equal(event.row_values, digests.row_values)
    assert np.array_equal(event.row_scales, digests.row_scales)
    (content,) = pick(found, Content)
    assert content.format == "fp8"
    assert np.array_equal(content.digests, digests.digests)
    assert np.array_equal(content.data, wanted)


def test_pages_mode_writes_bytes_only_after_a_trigger(make: Any) -> None:
    recorder, view = make()
    snapshot(recorder, "ST", "", 0, [1], [0], room=1)
    snapshot(recorder, "SE", "before", 0, [1], [0], room=1)
    recorder.trigger("garbled", room=1)
    found = read(recorder)
    assert len(pick(found, Snapshot)) == 2
    (content,) = pick(found, Content)
    assert np.array_equal(content.data, view[[1], : FP8.page_bytes])


@pytest.mark.parametrize("mode", ["digest", "pages"])
def test_without_a_trigger_no_bytes_are_written(make: Any, mode: str) -> None:
    recorder, _ = make(mode=mode)
    snapshot(recorder, "ST", "", 0, [1, 2, 3], [0, 1, 2], room=1)
    found = read(recorder)
    assert pick(found, Content) == []
    (event,) = pick(found, Snapshot)
    assert event.row_values.shape == (3, 64)
    assert event.data.size == 0


def test_a_tap_that_is_off_does_nothing(make: Any) -> None:
    recorder, _ = make(taps=("read",))
    results = {
        stage: snapshot(recorder, stage, "", 0, [1], [0], room=1) >= 0
        for stage in ("ST", "SE", "RC", "LT", "RD")
    }
    assert results == {"ST": False, "SE": False, "RC": False, "LT": False, "RD": True}
    assert [event.stage for event in pick(read(recorder), Snapshot)] == ["RD"]


def test_a_buffer_that_the_host_cannot_read_is_passed_over(make: Any) -> None:
    recorder, _ = make()
    assert snapshot(recorder, "ST", "", 1, [1], [0], room=1) == -1
    assert pick(read(recorder), Loss, Snapshot) == []


@pytest.mark.parametrize(
    ("buffer", "pages", "logical"),
    [(0, [10], [0]), (0, [-1], [0]), (0, [1, 2], [0]), (9, [1], [0]), (0, [[1]], [[0]])],
)
def test_a_wrong_page_or_buffer_is_counted_and_not_raised(
    make: Any, buffer: int, pages: list[Any], logical: list[Any]
) -> None:
    recorder, _ = make()
    assert snapshot(recorder, "ST", "", buffer, pages, logical, room=1) == -1
    found = read(recorder)
    assert pick(found, Snapshot) == []
    (loss,) = pick(found, Loss)
    assert loss.stage == "hook"
    assert loss.reason.startswith("host-tap: ")


def test_over_the_host_limit_a_snapshot_is_dropped_and_counted(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, _ = make(host_limit=4 * 5 * FP8.page_bytes)
    free, entered = threading.Event(), threading.Event()
    real = host.digest_pages

    def slow(*arguments: Any) -> Any:
        entered.set()
        free.wait(30)
        return real(*arguments)

    monkeypatch.setattr(host, "digest_pages", slow)
    results = [snapshot(recorder, "ST", "", 0, [1, 2], [0, 1], room=room) for room in range(6)]
    assert entered.wait(10)
    free.set()
    kept = [room for room, seq in enumerate(results) if seq >= 0]
    assert kept == [0, 1]
    found = read(recorder)
    assert [event.room for event in pick(found, Snapshot)] == kept
    losses = pick(found, Loss)
    assert {(loss.stage, loss.what) for loss in losses} == {("queue", "snapshot")}
    assert sum(loss.count for loss in losses) == 4


def test_a_digest_that_fails_costs_the_snapshot_only(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = make()
    monkeypatch.setattr(host, "digest_pages", lambda *_: 1 / 0)
    assert snapshot(recorder, "ST", "", 0, [1], [0], room=1) >= 0
    (loss,) = pick(read(recorder), Loss)
    assert (loss.stage, loss.what, loss.reason) == (
        "journal",
        "snapshot",
        "a record cannot be made: ZeroDivisionError",
    )


def test_a_large_snapshot_becomes_several_records_that_cover_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, _ = make()
    monkeypatch.setattr(host, "MAX_BYTES", 3 * FP8.page_bytes)
    snapshot(recorder, "RC", "", 0, list(range(10)), list(range(10)), room=1)
    parts = pick(read(recorder), Snapshot)
    assert [part.pages.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [part.digests.shape for part in parts] == [(3, 2), (3, 2), (3, 2), (1, 2)]


def test_after_the_end_nothing_is_taken(make: Any) -> None:
    recorder, _ = make()
    recorder.close()
    assert snapshot(recorder, "ST", "", 0, [1], [0], room=1) == -1
