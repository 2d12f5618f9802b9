"""The pair without a fault: it serves, it frees, its capture is complete, and capture never gets into its way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.adapters import nixl
from capture_hooks.events import (
    Alloc,
    Buffer,
    Free,
    Hook,
    Loss,
    Order,
    Process,
    Read,
    Receive,
    Request,
    Send,
    Snapshot,
    Store,
    TransferState,
)
from replay.judge import judge
from replay.lab import capture
from replay.lab.decode import DecodeEngine
from replay.lab.pool import PageAllocator, PagedPool
from replay.lab.prefill import PrefillEngine
from replay.lab.run import LabError, Pair
from replay.lab.sender import Sender
from replay.lab.stream import Event, Stream
from replay.lab.tcp_transport import TcpTransport
from replay.lab.transport import Transport
from replay.lab.transports import nixl_missing
from replay.trace.reader import open_trace
from tests.integration.lab_rounds import OPTIONS, counts, journals, of, small, with_aborts

ROOT = Path(__file__).resolve().parents[2]

TRANSPORTS = ["tcp"] if nixl_missing() else ["nixl", "tcp"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(transport=request.param) as found:
        yield found


def test_sixty_requests_at_once_are_served_rightly(pair: Pair) -> None:
    result = pair.run(small())
    assert result.truth is not None
    ends = counts(result.outcomes)
    assert set(ends) == {"finish", "abort"}, "some clients go away, nothing fails"
    assert ends.total() == 64
    assert ends["finish"] > 20
    assert not result.truth.hit
    assert not any(result.truth.bad_at.values())
    assert result.stats["decode"]["left"] == result.stats["prefill"]["left"] == []


@pytest.mark.parametrize("format_", ["bf16", "fp4"])
def test_other_formats_are_served_rightly(pair: Pair, format_: str) -> None:
    result = pair.run(small(format=format_, requests=16, concurrency=16, seed=2))
    assert result.truth is not None
    assert len(result.truth.rooms) > 4
    assert not result.truth.hit


def test_the_capture_tells_the_whole_life_of_every_request(pair: Pair, tmp_path: Path) -> None:
    config = small(seed=1, triton_pages=1)
    result = pair.run(config, tmp_path, OPTIONS)
    found = journals(tmp_path)
    assert set(found) == {"prefill", "decode"}
    for role, events in found.items():
        assert not of(events, Loss)
        (process,) = of(events, Process)
        assert process.transport == {"nixl": "nixl/UCX", "tcp": "tcp"}[pair.transport]
        assert (process.role, process.engine) == (role, "lab")
        assert len(of(events, Buffer)) == config.layers
        allocated = [int(page) for event in of(events, Alloc) for page in event.pages]
        freed = [int(page) for event in of(events, Free) for page in event.pages]
        assert Counter(allocated) == Counter(freed), "everything is given back"
        assert 0 not in allocated
        assert max(Counter(allocated).values()) > 1, "pages are used again"
    prefill, decode = found["prefill"], found["decode"]
    sends = of(prefill, Send)
    states = Counter(state.state for state in of(prefill, TransferState))
    assert states["posted"] == states["done"] == len(sends)
    assert {(send.written, send.awaited) for send in sends} == {(1, 1)}
    phases = Counter(event.phase for event in of(decode, Request))
    ends = counts(result.outcomes)
    assert phases["start"] == 64
    assert phases["finish"] == ends["finish"]
    assert phases["abort"] == ends["abort"]
    assert result.truth is not None
    read = {event.room for event in of(decode, Read)}
    assert read == set(result.truth.rooms)
    stages = Counter((event.stage, event.moment) for event in of(prefill + decode, Snapshot))
    layers = config.layers
    assert stages["SE", "before"] == stages["SE", "after"] == len(sends)
    assert stages["RC", ""] == phases["arrived"] * layers
    assert stages["RC", "before"] == len(of(decode, Receive)) * layers
    assert stages["RD", "before"] == stages["RD", "after"] == len(read) * layers
    assert 0 < stages["LT", ""] <= stages["RC", ""]
    reads = of(decode, Read)
    assert all(np.array_equal(event.table, event.table_after) for event in reads)
    sampled = [event for event in reads if len(event.logits)]
    assert {event.room for event in sampled} == read
    assert all(len(event.logits) == event.rows for event in sampled)
    assert "triton" in {event.kernel for event in reads}
    stored = of(prefill, Store)
    assert all(np.array_equal(event.positions, 4 * event.logical_rows) for event in stored)
    assert {event.room % 8 == 0 for event in stored if len(event.keys)} == {True}


def test_aborts_wait_for_their_acknowledgement(pair: Pair, tmp_path: Path) -> None:
    config, given_up = with_aborts(small(seed=3, impatient=1.0, patience_ms=(5.0, 200.0)), tmp_path / "flags")
    result = pair.run(config, tmp_path / "capture", OPTIONS)
    assert result.stats["timeouts"] == []
    decode = journals(tmp_path / "capture")["decode"]
    waiting: set[int] = set()
    told: set[int] = set()
    checked: set[int] = set()
    for event in decode:
        if isinstance(event, TransferState) and event.state == "aborted":
            waiting.add(event.room)
            told.add(event.room)
        elif isinstance(event, TransferState) and event.state == "acknowledged":
            waiting.discard(event.room)
        elif isinstance(event, Free) and event.reason == "abort":
            assert event.room not in waiting
            checked.add(event.room)
    assert given_up <= told & checked


def test_order_edges_of_the_protocol_meet(pair: Pair, tmp_path: Path) -> None:
    config, _ = with_aborts(small(seed=4), tmp_path / "flags")
    pair.run(config, tmp_path / "capture", OPTIONS)
    found = journals(tmp_path / "capture")
    order = of(found["prefill"] + found["decode"], Order)
    for what in ("announce", "status", "abort", "ack", "queue", "sync"):
        tails = Counter(event.key for event in order if (event.what, event.end) == (what, "tail"))
        heads = {event.key for event in order if (event.what, event.end) == (what, "head")}
        assert set(tails.values()) == {1}, f"each {what} key is used once"
        assert heads
        assert heads <= set(tails), f"nobody sees a {what} that was not made"
    announced = {e.key for e in order if e.what == "announce" and e.end == "tail"}
    assert announced == {e.key for e in order if e.what == "announce" and e.end == "head"}


def test_nothing_in_the_journals_says_which_fault_is_on(pair: Pair, tmp_path: Path) -> None:
    pair.run(small(fault="wrong-store-bytes", requests=4, concurrency=4), tmp_path, OPTIONS)
    for events in journals(tmp_path).values():
        (process,) = of(events, Process)
        text = " ".join(map(repr, [process, *of(events, Hook), *of(events, Loss)]))
        assert not any(word in text for word in ("fault", "wrong", "wrong-store-bytes", "policy"))


def _owned() -> dict[tuple[type[Any], str], Any]:
    owners = (
        PrefillEngine, DecodeEngine, Sender, PagedPool, PageAllocator, Stream, Event, Transport, TcpTransport,
    )  # fmt: skip
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_off_means_that_every_function_is_the_original_object(
    role: str, transport: str, tmp_path: Path
) -> None:
    before = _owned()
    assert capture.attach(role, transport, {}) is None, "without the variable nothing starts"
    assert all(value is before[key] for key, value in _owned().items())
    attached = capture.attach(role, transport, {"KV_REPLAY_CAPTURE": str(tmp_path), **OPTIONS})
    assert attached is not None
    changed = {key for key, value in _owned().items() if value is not before[key]}
    assert len(changed) > 12
    attached.detach()
    assert _owned() == before
    assert all(value is before[key] for key, value in _owned().items())


def test_without_the_variable_a_process_does_not_even_load_the_hooks() -> None:
    code = """
import sys
import replay.lab.process, replay.lab.prefill, replay.lab.decode, replay.lab.tcp_transport
loaded = [name for name in sys.modules if name.startswith(("capture_hooks.adapters", "capture_hooks.recorder"))]
loaded += [name for name in sys.modules if name.startswith("replay.lab.capture")]
sys.exit(", ".join(loaded) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_nixl_names_its_hooks_for_what_they_cover() -> None:
    assert {"send", "completion"} <= set(nixl.COVERS.values())


@pytest.mark.parametrize(
    "options",
    [{"KV_REPLAY_MODE": "digest"}, {"KV_REPLAY_MODE": "full"}, {"KV_REPLAY_TAPS": "read"}],
    ids=lambda options: "-".join(options.values()),
)
def test_in_every_mode_the_pair_serves_rightly_and_nobody_is_accused(
    pair: Pair, tmp_path: Path, options: dict[str, str]
) -> None:
    result = pair.run(small(requests=24, concurrency=24, seed=6), tmp_path, {**OPTIONS, **options})
    assert result.truth is not None
    assert not result.truth.hit
    with open_trace(tmp_path) as trace:
        verdict = judge(trace)
    assert verdict.findings == ()
    if "KV_REPLAY_MODE" in options:
        assert verdict.verdict == "clean", verdict.not_judged


HOSTILE = """
import capture_hooks.recorder as recorder
original = recorder.Recorder.emit
def emit(self, event, *args, **keywords):
    if type(event).__name__ in ("Alloc", "Store", "Receive", "Read"):
        raise RuntimeError("a hook that raises")
    return original(self, event, *args, **keywords)
recorder.Recorder.emit = emit
"""


def test_hooks_that_raise_are_counted_and_detached_and_the_pair_runs_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOSTILE)
    folder = tmp_path / "capture"
    with Pair(
        {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "KV_REPLAY_CAPTURE": str(folder), **OPTIONS},
        TRANSPORTS[0],
    ) as pair:
        result = pair.run(small(requests=24, concurrency=24))
    assert result.truth is not None
    assert not result.truth.hit
    assert counts(result.outcomes)["finish"] > 8
    for events in journals(folder).values():
        lost = [loss for loss in of(events, Loss) if loss.stage == "hook"]
        assert sum(loss.count for loss in lost) >= 5
        assert any("RuntimeError" in loss.reason for loss in lost)
        hooks = {hook.name: hook for hook in of(events, Hook)}
        assert hooks["lab.PageAllocator.alloc"].state == "detached"
        assert hooks["lab.PageAllocator.free"].state == "attached"


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"KV_REPLAY_QUEUE": "20"}, "queue"),
        ({"KV_REPLAY_HOST_LIMIT": "400kB"}, "queue"),
        ({"KV_REPLAY_DISK_LIMIT": "300kB"}, "disk"),
    ],
)
def test_what_does_not_fit_is_counted_and_the_pair_runs_on(
    pair: Pair, tmp_path: Path, options: dict[str, str], stage: str
) -> None:
    result = pair.run(small(requests=32, concurrency=32), tmp_path, {**OPTIONS, **options})
    assert result.truth is not None
    assert not result.truth.hit
    assert counts(result.outcomes)["finish"] > 10
    lost = [loss for events in journals(tmp_path).values() for loss in of(events, Loss)]
    assert sum(loss.count for loss in lost if loss.stage == stage) > 0


def test_a_round_that_does_not_end_tells_every_thread_and_the_next_round_runs(tmp_path: Path) -> None:
    """The scheduler of decode waits for a flag that nobody raises."""
    (tmp_path / "flags").mkdir()
    stuck = small(
        requests=2, impatient=0.0, timeout_s=3.0,
        flags=str(tmp_path / "flags"), rules={"decode.arrived:7000": "never"},
    )  # fmt: skip
    with Pair() as pair:
        with pytest.raises(LabError, match=r"rooms \[7000.*did not end within 3 s") as caught:
            pair.run(stuck)
        told = str(caught.value)
        assert "--- prefill, alive ---" in told
        assert "--- decode, alive ---" in told
        assert re.search(r'barriers\.py", line \d+ in wait', told), "the thread that waits, and where"

        result = pair.run(small(requests=4))
    assert result.truth is not None
    assert not result.truth.hit


def test_a_process_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.orig_argv[-2:] == ['replay.lab.process', 'decode']:\n"
        "    sys.exit('the decode process cannot start today')\n"
    )
    with (
        pytest.raises(LabError, match="the decode process cannot start today"),
        Pair({"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}),
    ):
        pass
