"""Hangs the hooks on passes, stores and reads into a fake engine."""

from __future__ import annotations

from typing import Any

from capture_hooks.adapters.sglang.read import KERNELS, ReadHooks
from capture_hooks.adapters.sglang.steps import Steps
from capture_hooks.adapters.sglang.store import StoreHooks
from capture_hooks.recorder import Recorder
from capture_hooks.taps.pages import device_tap
from tests.sglang.fake_engine import FakeEngine

COVERED = ("store", "alloc", "read")


def bind(function: Any, body: Any) -> Any:
    """The function with ``body`` around it, as ``Patches.wrap`` does it."""
    return lambda *args, **keywords: body(function, *args, **keywords)


def hook(engine: FakeEngine, kernel: str = "read_deep_gemm") -> Steps:
    """Hang the hooks into a fake engine as ``install`` hangs them into SGLang."""
    recorder, session = engine.session.recorder, engine.session
    steps = session.steps = Steps(session)
    stores = StoreHooks(session, steps)
    reads = session.reads = ReadHooks(session, steps)
    engine.kernel_store = bind(engine.kernel_store, stores.store)
    engine.layer_store = bind(engine.layer_store, stores.layer)
    engine.kernel_logits = bind(engine.kernel_logits, reads.kernel(kernel, KERNELS[kernel][1]))
    engine.layer_read = bind(engine.layer_read, reads.layer)
    forward = bind(engine.forward, steps.forward)
    batch_of = type("FakeBatch", (), {})

    def run(runner: Any, batch: Any) -> Any:
        scheduled = batch_of()
        scheduled.reqs = engine.reqs
        return steps.run_batch(lambda _, __: forward(runner, batch), None, scheduled)

    engine.forward = run
    for what in COVERED:
        recorder.hook(f"fake.{what}", what)
        recorder.fired(f"fake.{what}")
    return steps


def drain(recorder: Recorder) -> None:
    """Wait until all that passes have put by has arrived on the host and is recorded; nothing more is taken then."""
    tap = device_tap(recorder)
    assert tap is not None
    assert tap.flush(30), "it did not arrive"
    tap.close()
