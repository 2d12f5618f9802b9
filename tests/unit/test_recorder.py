from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capture_hooks
from capture_hooks import recorder as recorder_module
from capture_hooks.events import (
    Alloc,
    Buffer,
    Clock,
    Content,
    Hook,
    Loss,
    Order,
    Process,
    Read,
    Store,
    StoreParams,
    Trigger,
)
from capture_hooks.journal import JournalError, JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder
from capture_hooks.records import Event, Stamp

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "capture"


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    made: list[Recorder] = []

    def build(**options: Any) -> Recorder:
        made.append(
            Recorder(Options(capture=folder, seal=False, **options), Process("prefill", rank=3, engine="lab"))
        )
        return made[-1]

    yield build
    for recorder in made:
        recorder.close()


def read(recorder: Recorder) -> list[tuple[Stamp, Event]]:
    recorder.close()
    with JournalReader(recorder.path) as reader:
        found = list(reader)
        assert reader.ended
        assert not reader.truncated
    return found


def events(recorder: Recorder, *kinds: type[Event]) -> list[Any]:
    return [event for _, event in read(recorder) if isinstance(event, kinds)]


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


class Stall:
    """A writer whose disk does not answer."""

    def __init__(self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.entered = threading.Event(), threading.Event()
        real = recorder._journal.flush

        def flush(alive: bool = False) -> bool:
            self.entered.set()
            self.free.wait(30)
            return real(alive)

        monkeypatch.setattr(recorder._journal, "flush", flush)


# -- records -----------------------------------------------------------------------------------------------------------


def test_records_arrive_with_their_stamps(make: Any) -> None:
    recorder = make()
    before = time.monotonic_ns()
    first = recorder.emit(Alloc(1, pages=np.array([4, 5])))
    mark = recorder.mark()
    second = recorder.emit(Order("status", "1.0", "tail"), mark, stream=7)
    found = {event.TABLE: (stamp, event) for stamp, event in read(recorder)}
    stamp, alloc = found["alloc"]
    assert alloc.pages.tolist() == [4, 5]
    assert stamp.seq == stamp.begin_seq == first
    assert before <= stamp.begin_ns == stamp.end_ns
    stamp, _ = found["order"]
    assert (stamp.begin_seq, stamp.seq, stamp.stream) == (mark.seq, second, 7)
    assert first < mark.seq < second
    assert stamp.begin_ns == mark.ns <= stamp.end_ns


def test_each_thread_has_its_number_and_its_own_order(make: Any) -> None:
    recorder = make()

    def work(room: int) -> None:
        for logical in range(300):
            recorder.emit(Alloc(room, logical=logical))

    threads = [threading.Thread(target=work, args=(room,)) for room in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(stamp, event) for stamp, event in read(recorder) if isinstance(event, Alloc)]
    assert len({stamp.seq for stamp, _ in found}) == len(found) == 1200
    numbers = {event.room: stamp.thread for stamp, event in found}
    assert len(set(numbers.values())) == 4
    assert 0 not in numbers.values(), "0 is the writer"
    for room in range(4):
        mine = sorted((stamp.seq, event.logical) for stamp, event in found if event.room == room)
        assert [logical for _, logical in mine] == list(range(300))


def test_arrays_are_copied_when_they_are_emitted(make: Any) -> None:
    recorder = make()
    table = np.arange(6)
    recorder.emit(Read(1, table=table[::2], logits=np.zeros(5000, np.float32)))
    table[:] = -1
    (event,) = events(recorder, Read)
    assert event.table.tolist() == [0, 2, 4]


def test_a_wrong_field_is_counted_and_the_caller_hears_nothing(make: Any) -> None:
    recorder = make()
    assert recorder.emit(Alloc("x")) == -1
    assert recorder.emit(object()) == -1
    losses = {loss.what: loss for loss in events(recorder, Loss)}
    assert set(losses) == {"alloc", ""}
    assert losses["alloc"].stage == "journal"


def test_the_process_record_says_who_recorded_and_names_nobody(make: Any, folder: Path) -> None:
    recorder = make()
    with JournalReader(recorder.path) as reader:
        process = reader.process
    assert process is not None
    assert (process.role, process.rank, process.engine, process.mode) == ("prefill", 3, "lab", "pages")
    assert re.fullmatch(r"prefill-3-[0-9a-f]{12}\.journal", recorder.path.name)
    assert recorder.path.name == f"prefill-3-{process.run}.journal"
    assert len(process.host) == 16
    assert json.loads(process.options)["mode"] == "pages"
    assert json.loads(process.environment)["numpy"] == np.__version__
    text = f"{process.options}{process.environment}{process.host}{process.run}"
    assert str(folder) not in text
    assert os.uname().nodename not in text


def test_a_record_is_flushed_within_the_bound(make: Any) -> None:
    recorder = make(flush_ms=200)
    seen: list[float] = []
    for room in range(5):
        time.sleep(0.03)
        start = time.monotonic()
        recorder.emit(Alloc(room))
        with JournalReader(recorder.path) as reader:
            wait_for(lambda room=room: any(getattr(event, "room", -1) == room for _, event in reader), 5)
        seen.append(time.monotonic() - start)
    assert sorted(seen)[2] < 0.4, "half of them at least; the machine may be busy"


def test_an_idle_process_gives_signs_of_life(make: Any) -> None:
    start = time.monotonic()
    recorder = make()
    time.sleep(1.3)
    with JournalReader(recorder.path) as reader:
        moments = [event.moment for _, event in reader if isinstance(event, Clock)]
    assert moments[0] == "start"
    assert 1 <= len(moments) - 1 <= time.monotonic() - start + 1


# -- what cannot be kept -----------------------------------------------------------------------------------------------


def test_a_stalled_writer_costs_records_and_never_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(queue=100)
    stall = Stall(recorder, monkeypatch)
    recorder.emit(Alloc(-1))
    assert stall.entered.wait(10)
    longest, first_lost, last = 0.0, -1, -1
    for room in range(3000):
        start = time.thread_time()
        seq = recorder.emit(Alloc(room))
        longest = max(longest, time.thread_time() - start)
        last = recorder.mark().seq - 1
        if seq < 0 and first_lost < 0:
            first_lost = last
    assert longest < 0.05
    stall.free.set()
    found = read(recorder)
    kept = [event.room for _, event in found if isinstance(event, Alloc)]
    (loss,) = [event for _, event in found if isinstance(event, Loss)]
    assert kept == list(range(-1, len(kept) - 1)), "the newest are dropped"
    assert len(kept) >= 100
    assert (loss.stage, loss.what, loss.count) == ("queue", "alloc", 3001 - len(kept))
    assert (loss.first_seq, loss.last_seq) == (first_lost, last)


def test_large_records_are_bounded_by_their_bytes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(host_limit=4 * 2**20)
    stall = Stall(recorder, monkeypatch)
    recorder.emit(Alloc(-1))
    assert stall.entered.wait(10)
    keys = np.zeros((400, 128), np.float32)  # 200 KiB
    results = [recorder.emit(Store(room, keys=keys)) for room in range(20)]
    assert recorder.emit(Alloc(5)) >= 0, "small records still go through"
    stall.free.set()
    kept = sum(seq >= 0 for seq in results)
    assert kept == 5, "a quarter of the host limit"
    wait_for(lambda: recorder._queued == 0)
    assert recorder.emit(Store(99, keys=keys)) >= 0, "the bytes are free again"
    assert recorder.emit(Store(99, keys=keys[:20])) >= 0
    wait_for(lambda: recorder._queued == 0)
    found = read(recorder)
    assert sum(isinstance(event, Store) for _, event in found) == 7
    (loss,) = [event for _, event in found if isinstance(event, Loss)]
    assert (loss.stage, loss.what, loss.count) == ("queue", "store", 15)


def test_concurrent_drops_are_counted_exactly(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(queue=10)
    stall = Stall(recorder, monkeypatch)
    recorder.emit(Alloc(-1))
    assert stall.entered.wait(10)
    threads = [
        threading.Thread(target=lambda: [recorder.emit(Alloc(1)) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stall.free.set()
    counted = Counter({"kept": 0, "lost": 0})
    for _, event in read(recorder):
        counted["kept"] += isinstance(event, Alloc)
        counted["lost"] += event.count if isinstance(event, Loss) else 0
    assert counted["kept"] + counted["lost"] == 2001


def test_a_writer_that_fails_now_and_then_carries_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make()
    calls = iter(range(10**9))
    real = recorder._keeper.expire

    def expire(now: int) -> None:
        if next(calls) % 3 == 0:
            raise RuntimeError("once in a while")
        real(now)

    monkeypatch.setattr(recorder._keeper, "expire", expire)
    for room in range(20):
        recorder.emit(Alloc(room))
        time.sleep(0.02)
    monkeypatch.setattr(recorder._keeper, "expire", real)
    found = read(recorder)
    assert [event.room for _, event in found if isinstance(event, Alloc)] == list(range(20))
    assert {event.reason for _, event in found if isinstance(event, Loss)} == {
        "the writer failed: RuntimeError"
    }


def test_a_writer_that_always_fails_gives_up_and_the_server_runs_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make(flush_ms=4)

    def fail(last: bool) -> None:
        raise RuntimeError("always")

    monkeypatch.setattr(recorder, "_turn", fail)
    wait_for(lambda: recorder.closed)
    assert recorder.emit(Alloc(1)) == -1
    recorder.close()


def test_the_disk_limit_is_survived_and_told(make: Any) -> None:
    recorder = make(disk_limit=150_000, flush_bytes=4096)
    for room in range(40):
        keys = np.frombuffer(np.random.default_rng(room).bytes(8 * 512), np.float32).reshape(8, 128)
        recorder.emit(Store(room, keys=keys))
        for _ in range(50):
            recorder.emit(Read(room, query=np.frombuffer(os.urandom(400), np.float32)))
        time.sleep(0.005)
    recorder.hook("lab.x", "store")
    recorder.fired("lab.x")
    found = read(recorder)
    assert recorder.path.stat().st_size <= 150_000
    lost: Counter[str] = Counter()
    for _, event in found:
        if isinstance(event, Loss):
            assert event.stage == "disk"
            lost[event.what] += event.count
    kept = Counter(event.TABLE for _, event in found)
    assert kept["store"] + lost["store"] == 40
    assert kept["read"] + lost["read"] == 2000
    assert lost["content"] > 0
    assert kept["hook"] == 1, "the counters of the hooks are in the reserve"


# -- start and stop ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _stopped() -> Iterator[None]:
    yield
    capture_hooks.stop()


@pytest.mark.usefixtures("_stopped")
def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    for environ in ({}, {"KV_REPLAY_MODE": "full"}, {"KV_REPLAY_CAPTURE": ""}, {"KV_REPLAY_CAPTURE": "  "}):
        assert capture_hooks.start(Process("decode"), environ) is None
    assert capture_hooks.active() is None
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_off_imports_nothing() -> None:
    code = (
        "import sys, capture_hooks; capture_hooks.start(None, {}); "
        "print([m for m in sys.modules if m.startswith('capture_hooks.') or m in ('numpy', 'torch', 'zstandard')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_recording_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, capture_hooks; from capture_hooks.events import Process; from capture_hooks.taps import host; "
        f"r = capture_hooks.start(Process('x'), {{'KV_REPLAY_CAPTURE': {str(tmp_path)!r}, 'KV_REPLAY_SEAL': '0'}}); "
        "print(r is not None, [m for m in ('torch', 'triton', 'h5py', 'click', 'replay') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "True []"


@pytest.mark.usefixtures("_stopped")
def test_start_gives_the_recorder_that_runs_and_stop_ends_it(folder: Path) -> None:
    environ = {"KV_REPLAY_CAPTURE": str(folder), "KV_REPLAY_SEAL": "0"}
    recorder = capture_hooks.start(Process("decode"), environ)
    assert recorder is not None
    assert capture_hooks.active() is recorder
    assert capture_hooks.start(Process("prefill"), environ) is recorder
    capture_hooks.stop()
    assert capture_hooks.active() is None
    assert recorder.emit(Alloc(1)) == -1
    assert len(list(folder.iterdir())) == 1
    again = capture_hooks.start(Process("decode"), environ)
    assert again is not None
    assert again.path != recorder.path


@pytest.mark.usefixtures("_stopped")
def test_warnings_about_options_go_to_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"KV_REPLAY_CAPTURE": str(folder), "KV_REPLAY_SEAL": "0", "KV_REPLAY_MOOD": "full"}
    with caplog.at_level(logging.WARNING, "kv_replay"):
        assert capture_hooks.start(Process("decode"), environ) is not None
    assert "did you mean KV_REPLAY_MODE?" in caplog.text


@pytest.mark.usefixtures("_stopped")
def test_a_folder_that_cannot_be_written_leaves_the_server_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environ = {"KV_REPLAY_CAPTURE": str(tmp_path / "file" / "capture"), "KV_REPLAY_SEAL": "0"}
    with caplog.at_level(logging.WARNING, "kv_replay"):
        assert capture_hooks.start(Process("decode"), environ) is None
    assert "nothing is recorded" in caplog.text


READ_ONLY = """
import os, sys, capture_hooks
from capture_hooks.events import Process
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
print(capture_hooks.start(Process("decode"), {"KV_REPLAY_CAPTURE": sys.argv[1], "KV_REPLAY_SEAL": "0"}))
"""


def test_a_read_only_folder_leaves_the_server_alone(tmp_path: Path) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir(mode=0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(folder)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "None"
    assert "nothing is recorded" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_recorder_without_a_folder_is_refused() -> None:
    with pytest.raises(JournalError, match="KV_REPLAY_CAPTURE"):
        Recorder(Options(), Process("decode"))


END = """
import sys, capture_hooks
from capture_hooks.events import Alloc, Process
recorder = capture_hooks.start(Process("decode"))
for room in range(1000):
    recorder.emit(Alloc(room))
print(recorder.path)
if sys.argv[1] == "raise":
    raise SystemExit(3)
if sys.argv[1] == "spawned":
    import multiprocessing
"""


def run_to_end(folder: Path, how: str, **environ: str) -> tuple[int, Path]:
    done = subprocess.run(
        [sys.executable, "-c", END, how],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=60,
        env={**os.environ, "KV_REPLAY_CAPTURE": str(folder), "PYTHONPATH": str(ROOT), **environ},
    )  # fmt: skip
    return done.returncode, Path(done.stdout.strip())


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 3)])
def test_a_process_that_ends_writes_everything_and_its_end(folder: Path, how: str, code: int) -> None:
    returned, path = run_to_end(folder, how, KV_REPLAY_SEAL="0")
    assert returned == code
    with JournalReader(path) as reader:
        rooms = [event.room for _, event in reader if isinstance(event, Alloc)]
        assert rooms == list(range(1000))
        assert reader.ended


def test_the_seal_child_is_started_for_the_journal_and_does_not_record(
    make: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(recorder_module, "start_seal", started.append)
    recorder = Recorder(Options(capture=folder), Process("prefill"))
    recorder.close()
    recorder.close()
    assert started == [recorder.path]

    from capture_hooks import seal_child

    calls: list[Any] = []
    monkeypatch.setenv("KV_REPLAY_CAPTURE", str(folder))
    monkeypatch.setattr(seal_child.subprocess, "Popen", lambda command, **more: calls.append((command, more)))
    monkeypatch.setattr(seal_child, "_is_installed", lambda: True)
    seal_child.start_seal(recorder.path)
    ((command, more),) = calls
    assert command == [sys.executable, "-m", "replay.trace.seal", str(recorder.path)]
    assert more["start_new_session"]
    assert not [name for name in more["env"] if name.startswith("KV_REPLAY_")]
    monkeypatch.setattr(seal_child, "_is_installed", lambda: False)
    assert seal_child.start_seal(recorder.path) is None
    assert len(calls) == 1


FORK = """
import os, sys, time, capture_hooks
from capture_hooks.events import Alloc, Process
recorder = capture_hooks.start(Process("decode"))
recorder.emit(Alloc(1))
pid = os.fork()
if pid == 0:
    ok = recorder.closed and capture_hooks.active() is None and recorder.emit(Alloc(2)) == -1
    recorder.hook("x", "store"); recorder.close(); capture_hooks.stop()
    own = capture_hooks.start(Process("decode"))
    own.emit(Alloc(3)); own.close()
    os._exit(0 if ok and own.path != recorder.path else 1)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
recorder.emit(Alloc(4))
print(recorder.path)
sys.exit(code)
"""


def test_a_forked_child_never_writes_into_its_parents_journal(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=60,
        env={**os.environ, "KV_REPLAY_CAPTURE": str(folder), "KV_REPLAY_SEAL": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rooms = {}
    for path in folder.glob("*.journal"):
        with JournalReader(path) as reader:
            rooms[path.name] = [event.room for _, event in reader if isinstance(event, Alloc)]
            assert reader.ended
            assert not reader.truncated
    assert rooms.pop(Path(done.stdout.strip()).name) == [1, 4]
    assert list(rooms.values()) == [[3]]


MULTIPROCESSING = """
import multiprocessing, sys, capture_hooks
from capture_hooks.events import Alloc, Process
def child(room):
    recorder = capture_hooks.start(Process("decode", rank=room))
    recorder.emit(Alloc(room))
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=child, args=(room,)) for room in range(2)]
    [process.start() for process in processes]
    [process.join() for process in processes]
"""


def test_children_of_multiprocessing_end_their_journals_too(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", MULTIPROCESSING], cwd=ROOT, check=True, timeout=60,
        env={**os.environ, "KV_REPLAY_CAPTURE": str(folder), "KV_REPLAY_SEAL": "0"},
    )  # fmt: skip
    ended = []
    for path in folder.glob("*.journal"):
        with JournalReader(path) as reader:
            ended.append((len([1 for _, event in reader if isinstance(event, Alloc)]), reader.ended))
    assert ended == [(1, True), (1, True)]


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_a_hook_that_raises_is_swallowed_counted_and_at_last_detached(make: Any) -> None:
    recorder = make(hook_errors=3)
    recorder.hook("lab.store", "store")
    for count in range(3):
        assert not recorder.detached("lab.store")
        with recorder.guard("lab.store"):
            recorder.fired("lab.store")
            raise KeyError("a secret text")
        assert recorder.guard("lab.store").errors == count + 1
    assert recorder.detached("lab.store")
    assert not recorder.detached("lab.other")
    found = events(recorder, Hook, Loss)
    hooks = [event for event in found if isinstance(event, Hook)]
    losses = [event for event in found if isinstance(event, Loss)]
    assert (hooks[-1].state, hooks[-1].complete, hooks[-1].fired) == ("detached", False, 3)
    assert sum(loss.count for loss in losses) == 3
    assert {(loss.stage, loss.reason) for loss in losses} == {("hook", "lab.store: KeyError")}


def test_a_hook_that_is_not_attached_any_more_is_not_told_as_attached(make: Any) -> None:
    recorder = make(hook_errors=1)
    for name in ("seen", "failed", "missing"):
        recorder.hook(name, "store", "missing" if name == "missing" else "attached", name != "missing")
    with recorder.guard("failed"):
        raise KeyError
    for name in ("seen", "failed", "missing", "unknown"):
        recorder.incomplete(name, "somebody holds the original")
    last = {hook.name: (hook.state, hook.complete, hook.note) for hook in events(recorder, Hook)}
    assert last == {
        "seen": ("attached", False, "somebody holds the original"),
        "failed": ("detached", False, ""),
        "missing": ("missing", False, ""),
    }


def test_a_guard_lets_through_what_ends_the_process(make: Any) -> None:
    recorder = make()
    with pytest.raises(KeyboardInterrupt), recorder.guard("lab.store"):
        raise KeyboardInterrupt
    assert recorder.guard("lab.store").errors == 0


def test_the_last_record_of_a_hook_holds_its_count(make: Any) -> None:
    recorder = make()
    recorder.hook("a", "send", note="wire")
    recorder.hook("b", "read", "missing", complete=False)
    wait_for(lambda: recorder._hooks._states["b"]._told is not None)
    for _ in range(500):
        recorder.fired("a")
    recorder.fired("unknown")
    recorder.hook("a", "send", "attached", note="wire 2")
    last = {hook.name: hook for hook in events(recorder, Hook)}
    assert (last["a"].covers, last["a"].state, last["a"].fired, last["a"].note) == (
        "send",
        "attached",
        500,
        "wire 2",
    )
    assert (last["b"].state, last["b"].fired, last["b"].complete) == ("missing", 0, False)


def test_the_first_call_of_a_hook_is_told_with_the_next_flush(make: Any) -> None:
    recorder = make()
    recorder.hook("a", "send")
    wait_for(lambda: recorder._hooks._states["a"]._told is not None)
    recorder.fired("a")

    def told() -> bool:
        with JournalReader(recorder.path) as reader:
            return any(isinstance(event, Hook) and event.fired == 1 for _, event in reader)

    wait_for(told, 5)


def test_what_a_thread_is_about_nests_and_is_its_own(make: Any) -> None:
    recorder = make()
    assert recorder.current() is None
    with recorder.about(7719, attempt=1, chunk=2, last=True, buffer=5) as about:
        assert recorder.current() is about
        assert (about.room, about.attempt, about.chunk, about.last, about.more) == (
            7719,
            1,
            2,
            True,
            {"buffer": 5},
        )
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(recorder.current()))
        thread.start()
        thread.join()
        assert seen == [None]
        rooms: list[int] = []
        with contextlib.suppress(ValueError), recorder.about(8):
            rooms.append(recorder.current().room)
            raise ValueError
        assert rooms == [8]
        assert recorder.current() is about
    assert recorder.current() is None


def test_the_inventory_keeps_views_and_maps_their_bytes(make: Any) -> None:
    recorder = make()
    view = np.zeros((4, 8500), np.uint8)
    recorder.inventory.add(Buffer(2, layer=9, address=10_000, pages=4, pitch=8500, item_length=8448), view)
    recorder.inventory.add(Buffer(3, layer=10, address=99_000, pages=4, pitch=8448))
    assert recorder.inventory.buffer(2).view is view
    assert recorder.inventory.buffer(3).view is None
    assert recorder.inventory.regions.resolve(10_000 + 8500, 1)[0].page == 1
    with pytest.raises(ValueError, match=r"expected memory uint8\[4, 8448 or more\]"):
        recorder.inventory.add(Buffer(4, pages=4, pitch=8448), np.zeros((4, 8000), np.uint8))
    with pytest.raises(ValueError, match="in the map already"):
        recorder.inventory.add(Buffer(3, pages=1, pitch=8448))
    assert [event.buffer for event in events(recorder, Buffer)] == [2, 3]


def test_a_buffer_lies_where_its_memory_does(make: Any) -> None:
    torch = pytest.importorskip("torch")
    recorder = make()
    view = np.zeros((4, 9000), np.uint8)[1:, :8448]
    tensor = torch.zeros((5, 9000), dtype=torch.uint8)
    recorder.inventory.add(Buffer(0, layer=1), view)
    recorder.inventory.add(Buffer(1, layer=2), None, tensor)
    recorder.inventory.add(Buffer(2, layer=3, address=7, pitch=8448, memory="VRAM"), None, tensor)
    told = [(event.address, event.pages, event.pitch) for event in events(recorder, Buffer)]
    assert told == [(view.ctypes.data, 3, 9000), (tensor.data_ptr(), 5, 9000), (7, 5, 8448)]
    with pytest.raises(ValueError, match="expected memory"):
        recorder.inventory.add(Buffer(3), np.zeros(8448, np.uint8))


def test_an_edge_has_a_tail_and_a_head(make: Any) -> None:
    recorder = make()
    first, second = recorder.tail("status", "7.0"), recorder.head("status", "7.0")
    assert first < second
    assert [(o.what, o.key, o.end) for o in events(recorder, Order)] == [
        ("status", "7.0", "tail"),
        ("status", "7.0", "head"),
    ]


# -- modes and triggers ------------------------------------------------------------------------------------------------


def test_digest_mode_never_writes_bytes(make: Any) -> None:
    recorder = make(mode="digest")
    recorder.emit(StoreParams(0, norm_weight=np.ones(128, np.float32)))
    recorder.emit(Store(1, slots=np.arange(2), keys=np.ones((2, 128), np.float32)))
    recorder.emit(Read(1, rows=5, table=np.arange(3), logits=np.ones(5, np.float32)))
    params, store, reading = events(recorder, StoreParams, Store, Read)
    assert params.norm_weight.size == 128, "a constant of the model, no data of a request"
    assert (store.slots.tolist(), store.keys.size) == ([0, 1], 0)
    assert (reading.table.tolist(), reading.logits.size) == ([0, 1, 2], 0)


def test_a_trigger_is_recorded(make: Any) -> None:
    recorder = make()
    recorder.trigger("garbled", room=7719, attempt=2)
    (event,) = events(recorder, Trigger)
    assert (event.reason, event.room, event.attempt) == ("garbled", 7719, 2)


def test_trigger_files_that_appear_are_obeyed_once(make: Any, folder: Path) -> None:
    folder.mkdir()
    (folder / "trigger-0.json").write_text('{"room": 1}')
    recorder = make()
    (folder / "trigger-1.json").write_text('{"room": 7719, "attempt": 1, "reason": "garbled"}')
    (folder / "trigger-2.json").write_text('{"rid_hash": "abc", "room": "no number"}')
    (folder / "trigger-3.json").write_text("[1, 2")
    (folder / "trigger-4.json").write_text("[1, 2]")
    (folder / "other.json").write_text('{"room": 5}')
    wait_for(lambda: {"trigger-1.json", "trigger-2.json"} <= recorder._control._done)
    wait_for(lambda: recorder._control._done >= {f"trigger-{n}.json" for n in range(5)})
    found = sorted((t.room, t.attempt, t.rid, t.reason) for t in events(recorder, Trigger))
    assert found == [(-1, 0, "abc", "asked"), (7719, 1, "", "garbled")]


def test_contents_are_written_once_each(make: Any) -> None:
    recorder = make(mode="full")
    pages = np.arange(3, dtype=np.uint8)[:, None].repeat(100, 1)
    digests = np.array([[1, 1], [2, 2], [3, 3]], np.uint64)
    recorder.keep("fp8", digests[:2], pages[:2], time.monotonic_ns())
    recorder.keep("fp8", digests[1:], pages[1:], time.monotonic_ns())
    contents = events(recorder, Content)
    assert [content.digests[:, 0].tolist() for content in contents] == [[1, 2], [3]]
    assert [content.data[:, 0].tolist() for content in contents] == [[0, 1], [2]]
