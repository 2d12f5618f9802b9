"""Names under which failures of hooks are counted, and that one which fails too often stops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import capture_hooks
from capture_hooks.adapters import nixl
from capture_hooks.adapters.sglang import plugin
from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.events import Hook, Loss, Process
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder

ADAPTERS = Path(capture_hooks.__file__).parent / "adapters"

#: Work of the adapters themselves: nothing of an engine is wrapped by it, so the table of hooks has no line for it.
OWN = {
    "nixl.install",
    "nixl.before_post",
    "mooncake.before_post",
    "sglang.install",
    "sglang.later",
    "sglang.passed",
    "sglang.pool",
    "sglang.step",
    "sglang.tell",
}


def literals(path: Path) -> Iterator[str]:
    """Names that calls of ``guard`` are given as text; of text with parts, what stands before the first."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "guard":
            (name,) = node.args
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            if isinstance(name, ast.Constant):
                yield str(name.value).strip()


def test_every_name_that_failures_are_counted_under_is_a_hook_or_own_work() -> None:
    hooks = {hook_name(target.name) for target in plugin.targets()} | {f"nixl.{name}" for name in nixl.COVERS}
    used = {(path.name, name) for path in ADAPTERS.rglob("*.py") for name in literals(path)}
    assert len(used) > 20
    assert not {(file, name) for file, name in used if name not in hooks | OWN}


@pytest.mark.parametrize("target", ["read_deep_gemm", "read_tilelang"])
def test_a_read_hook_that_always_fails_is_detached_under_its_own_name(tmp_path: Path, target: str) -> None:
    pytest.importorskip("torch")
    from capture_hooks.adapters.sglang.patch import Patches
    from capture_hooks.adapters.sglang.read import KERNELS, ReadHooks
    from capture_hooks.adapters.sglang.sampled import Layer
    from capture_hooks.taps.methods import wrapped

    recorder = Recorder(Options(capture=tmp_path, seal=False, hook_errors=3), Process("decode"))
    recorder.hook(hook_name(target), "read")
    steps: Any = SimpleNamespace(on_unseen=[], on_runner=[], on_graph=[], now=SimpleNamespace(line=0))
    session: Any = SimpleNamespace(
        recorder=recorder, buffers=None, patches=Patches(recorder, (), "0.5.23", "decode")
    )
    reads = ReadHooks(session, steps)
    reads.now = Layer()
    calls: list[tuple[Any, ...]] = []
    body = reads.kernel(target, KERNELS[target][1])
    kernel = wrapped(recorder, hook_name(target), lambda *args: calls.append(args), around=body)
    for _ in range(5):
        kernel(*range(8))
    assert calls == [tuple(range(8))] * 5
    recorder.close()
    with JournalReader(recorder.path) as journal:
        events = [event for _, event in journal]
    last = {event.name: event.state for event in events if isinstance(event, Hook)}
    assert last == {hook_name(target): "detached"}
    losses = [event for event in events if isinstance(event, Loss)]
    assert {(loss.reason, loss.count) for loss in losses} == {(f"{hook_name(target)}: AttributeError", 3)}
