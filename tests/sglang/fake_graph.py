"""A fake of CUDA graphs on a CPU: what is launched while it captures is recorded, and done again at each replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sglang.fake_engine import RATIO, FakeEngine, FakePlan


class Tape(TorchDispatchMode):
    """Every operation that writes into a tensor given to it, with the tensors it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(("aten.copy_", "aten.add_")):
            self.nodes.append(lambda: function(*args, **(kwargs or {})))
            return args[0]  # nothing runs while a graph is captured
        return function(*args, **(kwargs or {}))


class FakeGraph:
    """Decode passes of a fake engine as one graph of ``size`` rows: inputs at fixed addresses, padding included."""

    def __init__(self, engine: FakeEngine, size: int, stores: Any) -> None:
        self.engine, self.size = engine, size
        self.kv = [torch.zeros(size, 128) for _ in range(engine.layers)]
        self.plan = FakePlan(RATIO, torch.zeros((size, 16), dtype=torch.uint8), True)
        self.slots = torch.zeros(size, dtype=torch.int64)
        self.tape = Tape()
        self._stores = stores

    def _launch(self, layer: int, kernel: Any) -> None:
        engine = self.engine
        self._stores.store(
            kernel, self.kv[layer], self.plan, norm_weight=engine.norm[layer], norm_eps=1e-6,
            freq_cis=engine.freq_cis, out_loc=self.slots, kvcache=engine.tensors[layer], page_size=64,
        )  # fmt: skip

    def _pad(self) -> None:
        self.plan.rows.zero_()
        self.plan.rows.view(torch.int32)[:, 0] = 1  # a length that writes nothing

    def warm_up(self) -> None:
        """A pass of padding, eagerly."""
        self._pad()
        for layer in range(self.engine.layers):
            self._launch(layer, self.engine.fake_store)

    def capture(self, *, layers: int | None = None, monkeypatch: Any) -> None:
        """Record what the hooks launch (the store itself is a node of the graph already)."""
        from capture_hooks.taps.graphs import GraphPlaces

        with monkeypatch.context() as patch:
            patch.setattr(GraphPlaces, "capturing", lambda _: True)
            with self.tape:
                for layer in range(self.engine.layers if layers is None else layers):
                    self._launch(layer, lambda *_, **__: None)

    def replay(self) -> None:
        """What a decode pass of the engine's present batch does when it replays the graph."""
        engine = self.engine
        count = len(engine.plan.rows)
        self._pad()
        self.plan.rows[:count] = engine.plan.rows
        self.slots.zero_()
        self.slots[:count] = engine.out_loc
        for layer in range(engine.layers):
            self.kv[layer].copy_(torch.from_numpy(engine.rng.standard_normal((self.size, 128), np.float32)))
            engine.fake_store(
                self.kv[layer], self.plan, norm_weight=engine.norm[layer], norm_eps=1e-6,
                freq_cis=engine.freq_cis, out_loc=self.slots, kvcache=engine.tensors[layer], page_size=64,
            )  # fmt: skip
        for node in self.tape.nodes:
            node()
