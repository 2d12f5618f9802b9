"""Stores inside a CUDA graph: what the graph copies out is recorded, and what it does not is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capture_hooks.events import Hook, Process, Request, Store
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder

torch = pytest.importorskip("torch")
from capture_hooks.adapters.sglang.steps import Steps  # noqa: E402
from capture_hooks.adapters.sglang.store import StoreHooks  # noqa: E402
from capture_hooks.taps.graphs import GraphPlaces  # noqa: E402
from replay.judge import judge  # noqa: E402
from replay.trace.reader import open_trace  # noqa: E402
from tests.sglang.fake_engine import FakeEngine  # noqa: E402
from tests.sglang.fake_graph import FakeGraph  # noqa: E402
from tests.sglang.fake_hooks import drain  # noqa: E402


class Server:
    """A fake engine whose decode passes replay a graph of four rows."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.recorder = Recorder(
            Options(capture=folder, mode="full", seal=False, **options), Process(role="server")
        )
        self.engine = FakeEngine(self.recorder, seed=3)
        session = self.engine.session
        steps = session.steps = Steps(session)
        stores = StoreHooks(session, steps)
        self.graph = FakeGraph(self.engine, 4, stores)
        kernel = self.engine.kernel_store
        self.engine.kernel_store = lambda *a, **k: stores.store(kernel, *a, **k)
        eager = self.engine.fake_forward

        def forward(runner: Any, batch: Any) -> Any:
            if not batch.forward_mode.is_decode():
                return eager(runner, batch)
            self.graph.replay()
            return SimpleNamespace(can_run_graph=True)

        def run(runner: Any, batch: Any) -> Any:
            scheduled = SimpleNamespace(reqs=self.engine.reqs)
            return steps.run_batch(lambda _, __: steps.forward(forward, runner, batch), None, scheduled)

        self.engine.forward = run
        for name, what in (("store", "store"), ("alloc", "alloc")):
            self.recorder.hook(f"sglang.{name}", what)
            self.recorder.fired(f"sglang.{name}")

    def serve(self, passes: int) -> None:
        """Two requests of different lengths, decoded together."""
        requests = [self.engine.start(16, 250, 3), self.engine.start(9, 90, 5)]
        for req in requests:
            self.recorder.emit(Request(req.bootstrap_room, 0, "start", rows=10**6))
            self.engine.step([req], [req.held.tokens])
        for _ in range(passes):
            self.engine.step(requests, None)
        drain(self.recorder)
        self.recorder.close()

    def store_hook(self) -> Hook:
        with JournalReader(self.recorder.path) as journal:
            return [e for _, e in journal if isinstance(e, Hook) and e.name == "sglang.store"][-1]


def test_stores_of_replayed_graphs_are_recorded_with_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    server.graph.warm_up()
    server.graph.capture(monkeypatch=monkeypatch)
    server.serve(12)
    assert server.store_hook().complete
    with open_trace(tmp_path) as trace:
        verdict = judge(trace)
        stores = trace.table("store")
        in_graph = [int(n) for n in stores["step"][stores["step"] > 2]]
    assert not verdict.findings
    # 12 passes end two or three groups of four tokens of each request, in each of two layers.
    assert len(in_graph) == 2 * (262 // 4 - 250 // 4 + 102 // 4 - 90 // 4)
    rows = verdict.scope["stores"]
    assert rows["rows"] == rows["rows_reproduced"] == 2 * (262 // 4 + 102 // 4)


def test_a_wrong_store_inside_a_graph_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    server.graph.warm_up()
    server.graph.capture(monkeypatch=monkeypatch)
    server.engine.wrong = {"store": True}
    server.serve(8)
    with open_trace(tmp_path) as trace:
        assert {finding.code for finding in judge(trace).findings} == {"F30"}


@pytest.mark.parametrize("gap", ["no warm-up", "a layer", "tap off", "captured before the plug-in"])
def test_a_graph_that_copies_nothing_out_closes_the_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: str
) -> None:
    server = Server(tmp_path, **({"taps": ("read",)} if gap == "tap off" else {}))
    if gap != "no warm-up":
        server.graph.warm_up()
    server.graph.capture(monkeypatch=monkeypatch, layers=1 if gap == "a layer" else None)
    if gap == "captured before the plug-in":
        server.graph.tape.nodes.clear()
    server.serve(6)
    hook = server.store_hook()
    assert not hook.complete
    assert "CUDA graph" in hook.note
    with JournalReader(server.recorder.path) as journal:
        assert all(event.step <= 2 for _, event in journal if isinstance(event, Store))


def test_places_keep_their_memory_once_a_graph_copies_into_them() -> None:
    places = GraphPlaces(torch.device("cpu"))
    small, large = torch.ones(2, 3), torch.full((5, 3), 2.0)
    assert not places.put("a", {"x": small}, "about"), "nothing was reserved"
    places.reserve("a", {"x": small})
    places.reserve("a", {"x": large})
    assert places.put("a", {"x": small}, "about")
    address = places.places["a"].parts["x"].data_ptr()
    places.reserve("a", {"x": torch.ones(9, 3)})
    assert places.places["a"].parts["x"].data_ptr() == address
    assert not places.put("a", {"x": torch.ones(9, 3)}, "about")
    assert places.counters().tolist() == [1]
    assert places.places["a"].parts["x"].tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 3
