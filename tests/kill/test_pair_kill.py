"""SIGKILL of either process of a running pair: what was flushed is read, what is missing is told, nobody is accused."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from replay.judge import judge
from replay.lab.run import Pair
from replay.trace.reader import open_trace
from tests.integration.lab_rounds import small

TRIALS = 20
#: A process that a busy machine leaves waiting flushes late by as much.
SLACK_NS = 1_000_000_000


class Pairs:
    """Starts the next pair while the last one is being looked at."""

    def __init__(self) -> None:
        self._next: Pair | None = None
        self._thread = threading.Thread()
        self._begin()

    def _begin(self) -> None:
        def start() -> None:
            pair = Pair()
            pair.start()
            self._next = pair

        self._next = None
        self._thread = threading.Thread(target=start)
        self._thread.start()

    def take(self, *, more: bool) -> Pair:
        self._thread.join()
        assert self._next is not None
        pair = self._next
        if more:
            self._begin()
        return pair


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    yield (found := Pairs())
    found._thread.join()
    if found._next is not None:
        found._next.close(graceful=False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_process_leaves_every_flushed_record(pairs: Pairs, trial: int, tmp_path: Path) -> None:
    draw = random.Random(f"kill {trial}")
    role = ("prefill", "decode")[trial % 2]
    pair = pairs.take(more=trial + 1 < TRIALS)
    try:
        config = small(seed=trial, concurrency=24, requests=400, new_tokens=(8, 30))
        options = {"KV_REPLAY_SEAL": "0"}
        result = pair.run(config, tmp_path, options, truth=False, kill=(role, draw.uniform(0.0, 1.2)))
        killed = time.monotonic_ns()
    finally:
        pair.close()
    assert result.died == role
    ends = {}
    for path in tmp_path.glob("*.journal"):
        reader = JournalReader(path)
        newest = max(stamp.end_ns for stamp, _ in reader)
        assert reader.process is not None
        ends[reader.process.role] = reader.ended
        # Whatever reached the file is read, up to one frame that was being written.
        assert len(reader.cuts) <= 1
        assert all(cut.offset + cut.size == path.stat().st_size for cut in reader.cuts)
        if reader.process.role == role:
            bound = Options().flush_ms * 1_000_000 + SLACK_NS
            assert killed - newest <= bound, "the newest record is at most the flush bound old"
    assert ends == {role: False, ({"prefill", "decode"} - {role}).pop(): True}
    with open_trace(tmp_path) as trace:
        told = {process.role: process.ended for process in trace.processes}
        assert told == ends
        verdict = judge(trace)
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"
    assert any(role in item.what for item in verdict.not_judged), "what was cut is told"
