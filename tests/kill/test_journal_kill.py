"""SIGKILL while records are written: what was flushed is recovered, and nothing else is claimed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.digest import digest_pages
from capture_hooks.events import Alloc, Clock, Loss, Snapshot
from capture_hooks.journal import JournalReader
from capture_hooks.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
FLUSH_NS = 200 * 10**6
TELL = struct.Struct("<qq")

CHILD = """
import os, struct, sys, time
import numpy as np
import capture_hooks
from capture_hooks.events import Alloc, Buffer, Process
from capture_hooks.taps.host import snapshot
recorder = capture_hooks.start(Process("decode"))
view = np.random.default_rng(4).integers(0, 256, (8, 8448), dtype=np.uint8)
recorder.inventory.add(Buffer(0, pages=8, pitch=8448), view)
room = 0
while True:
    for _ in range(10):
        recorder.emit(Alloc(room, pages=np.array([room, room + 1])))
        room += 1
    snapshot(recorder, "ST", "", 0, [room % 8], [room], room=room)
    os.write(1, struct.pack("<qq", room, time.monotonic_ns()))
    time.sleep(0.0005)
"""


@pytest.mark.parametrize("trial", range(20))
def test_every_record_older_than_the_flush_bound_survives_a_kill(tmp_path: Path, trial: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "KV_REPLAY_CAPTURE": str(tmp_path), "KV_REPLAY_SEAL": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    told = bytearray(child.stdout.read(TELL.size))  # it runs
    duration = random.Random(trial).uniform(0.0, 0.9)
    end = time.monotonic() + duration
    os.set_blocking(child.stdout.fileno(), False)
    while time.monotonic() < end:
        told += child.stdout.read() or b""
        time.sleep(0.005)
    killed_ns = time.monotonic_ns()
    child.send_signal(signal.SIGKILL)
    child.wait()
    told += child.stdout.read() or b""
    child.stdout.close()
    times = [TELL.unpack_from(told, at) for at in range(0, len(told) - TELL.size + 1, TELL.size)]

    (path,) = tmp_path.glob("*.journal")
    with JournalReader(path) as reader:
        records = list(reader)
        assert not reader.ended
        # At most the frame that was being written is torn, and it is the end of the file.
        size = path.stat().st_size
        assert [cut.what for cut in reader.cuts] in ([], ["an unfinished frame"])
        assert all(cut.offset + cut.size == size for cut in reader.cuts)
        assert reader.process is not None
    allocs = [event for _, event in records if isinstance(event, Alloc)]
    assert [event.room for event in allocs] == list(range(len(allocs))), "no hole before the newest record"
    assert all(event.pages.tolist() == [event.room, event.room + 1] for event in allocs)
    assert not [event for _, event in records if isinstance(event, Loss)]
    view = np.random.default_rng(4).integers(0, 256, (8, 8448), dtype=np.uint8)
    digests = digest_pages(LAYOUTS["fp8"], view).digests
    snapshots = [event for _, event in records if isinstance(event, Snapshot)]
    assert len(snapshots) >= len(allocs) // 10 - 1
    assert all(np.array_equal(event.digests, digests[event.pages]) for event in snapshots)

    # The bound counts from when a record was made; if the machine did not let the child run, add that time.
    starved = max((later - earlier for (_, earlier), (_, later) in itertools.pairwise(times)), default=0)
    due = [room for room, at in times if at < killed_ns - FLUSH_NS - starved]
    assert len(allocs) >= max(due, default=0)
    alive = [event.monotonic_ns for _, event in records if isinstance(event, Clock)]
    if due:
        assert killed_ns - alive[-1] < FLUSH_NS + starved, "the newest proof of life is as young"
