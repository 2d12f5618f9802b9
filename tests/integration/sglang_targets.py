"""Runs with one version of SGLang on its path: which targets of the plug-in are there, and what patching them does.

Prints one JSON object: the layout that was probed, problems by target, the hook table and summary after patching
every role, who was patched where, and the same after functions have been renamed.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sglang_host  # beside this file


class Recorder:
    """What ``Patches`` asks of a recorder."""

    closed = False

    def __init__(self) -> None:
        self.hooks: dict[str, dict[str, Any]] = {}

    def hook(
        self, name: str, covers: str, state: str = "attached", complete: bool = True, note: str = ""
    ) -> None:
        self.hooks[name] = {"covers": covers, "state": state, "complete": complete, "note": note}

    def incomplete(self, name: str, why: str) -> None:
        self.hooks[name] |= {"complete": False, "note": why}

    def fired(self, name: str) -> None:
        pass

    def detached(self, name: str) -> bool:
        return False

    def guard(self, name: str) -> Any:
        import contextlib

        return contextlib.nullcontext()


def patch(version: str, role: str) -> dict[str, Any]:
    """Wrap every target of a role, look what was wrapped, and put everything back."""
    from capture_hooks.adapters.sglang import plugin, versions
    from capture_hooks.adapters.sglang.patch import Patches

    recorder = Recorder()
    targets = plugin.targets()
    patches = Patches(recorder, targets, version, role)  # type: ignore[arg-type]
    before = {}
    for target in targets:
        place = target.place(version)
        if place is not None:
            try:
                before[place] = id(versions.resolve(place).raw)  # holding it would be found
            except (ImportError, AttributeError):
                continue
    for target in targets:
        patches.wrap(target.name, before=lambda *_, **__: None)
    patches.verify()
    wrapped = sum(id(versions.resolve(place).raw) != raw for place, raw in before.items())
    summary = patches.summary()
    patches.restore()
    gc.collect()
    left = [place for place, raw in before.items() if id(versions.resolve(place).raw) != raw]
    return {"hooks": recorder.hooks, "summary": summary, "wrapped": wrapped, "left": left}


def unnoticed(version: str) -> list[str]:
    """Targets of which nothing is said when their function is not there any more (renamed, moved, deleted)."""
    from capture_hooks.adapters.sglang import plugin, versions

    silent = []
    for target in plugin.targets():
        place = target.place(version)
        if place is None or versions.problem(target, version):
            continue
        found = versions.resolve(place)
        delattr(found.owner, found.attribute)
        if not versions.problem(target, version):
            silent.append(target.name)
        setattr(found.owner, found.attribute, found.raw)
    return silent


def passed_by(version: str) -> dict[str, Any]:
    """What is told of a hook whose function somebody replaces while the server runs."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    from capture_hooks.adapters.sglang import plugin
    from capture_hooks.adapters.sglang.patch import Patches

    recorder = Recorder()
    patches = Patches(recorder, plugin.targets(), version, "prefill")  # type: ignore[arg-type]
    plain = NixlKVManager.send_kvcache
    for name in ("NixlKVManager.send_kvcache", "FastQueue.get"):
        patches.wrap(name, before=lambda *_, **__: None)
    del plain
    before = recorder.hooks["sglang.NixlKVManager.send_kvcache"]["complete"]
    NixlKVManager.send_kvcache = lambda *_, **__: None
    patches.look_again()
    patches.look_again()
    told = {name: [hook["complete"], hook["note"]] for name, hook in recorder.hooks.items()}
    wrapper = patches._patched[0].wrapper
    NixlKVManager.send_kvcache = wrapper
    del wrapper
    patches.restore()
    return {"before": before, "told": told}


def rows(version: str) -> dict[str, Any]:
    """Row and generation of requests that SGLang's own tables hand out, and how often the table itself says it was."""
    from types import SimpleNamespace

    from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from capture_hooks.adapters.sglang import plugin
    from capture_hooks.adapters.sglang.patch import Patches
    from capture_hooks.adapters.sglang.table_rows import TableRows

    kind = (
        schedule_batch.ReqKvInfo if version == "0.5.23" else None
    )  # 0.5.16 has the row on the request itself
    size: dict[str, Any] = {
        "size": 3, "max_context_len": 64, "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip

    def request() -> Any:
        if kind is not None:
            return SimpleNamespace(kv=kind())
        return SimpleNamespace(req_pool_idx=None, kv_committed_len=1, inflight_middle_chunks=0)

    found = {}
    for role in ("prefill", "decode"):
        recorder = Recorder()
        patches = Patches(recorder, plugin.targets(), version, role)  # type: ignore[arg-type]
        session: Any = SimpleNamespace(recorder=recorder, patches=patches)
        counted = TableRows(session)
        pool = ReqToTokenPool(**size) if role == "prefill" else DecodeReqToTokenPool(**size, pre_alloc_size=0)
        told = []

        def note(reqs: list[Any], told: list[Any] = told, pool: Any = pool, counted: Any = counted) -> None:
            for row, generation in map(counted.of, reqs):
                told.append([row, generation, int(pool.req_generation[row]) - 1 if row > 0 else -1])

        a, b, c, d = (request() for _ in range(4))
        pool.alloc([a, b, c])
        note([a, b, c])
        assert pool.alloc([d]) is None
        note([d])
        for again in (d, request()):
            pool.free(b)
            if kind is not None:
                a.kv.kv_allocated_len = 1
            pool.alloc([a, again])  # the first goes on in its own row
            note([a, again])
            b = again
        patches.restore()
        found[role] = {"told": told, "fired": sorted(h for h, count in patches.fired.items() if count)}
    return found


def off() -> dict[str, Any]:
    """What SGLang's own loading of its plug-ins does without ``KV_REPLAY_CAPTURE``."""
    import time
    from importlib.metadata import entry_points

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "kv_replay"]
    before, functions = set(sys.modules), {}
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for key, value in list(vars(module).items()):
                functions[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    functions |= {(name, key, method): id(held) for method, held in vars(value).items()}
    finders = list(map(id, sys.meta_path))
    begin = time.perf_counter()
    load_plugins()
    took = time.perf_counter() - begin
    changed = []
    for place, was in functions.items():
        holder = sys.modules[place[0]]
        held = vars(holder).get(place[1]) if len(place) == 2 else vars(vars(holder)[place[1]]).get(place[2])
        if id(held) != was and place[:2] != ("sglang.srt.plugins", "_plugins_loaded"):
            changed.append(".".join(place))
    return {
        "entries": [entry.value for entry in found],
        "changed": changed,
        "hooks": len(HookRegistry._hooks),
        "finders": list(map(id, sys.meta_path)) == finders,
        "modules": sorted(name for name in set(sys.modules) - before if name.startswith("capture_hooks")),
        "ms": took * 1e3,
    }


def main() -> None:
    sglang_host.preload()
    without = off()
    from capture_hooks.adapters.sglang import plugin, versions

    targets = plugin.targets()
    layout = versions.probe(targets)
    unknown = versions.probe(targets, "9.9.9")
    found: dict[str, Any] = {
        "off": without,
        "layout": [layout.installed, layout.version, layout.note],
        "unknown": [unknown.version, unknown.note],
        "targets": {t.name: t.place(layout.version) for t in targets},
        "optional": [t.name for t in targets if t.optional],
        "problems": [p for t in targets if (p := versions.problem(t, layout.version))],
        "roles": {role: patch(layout.version, role) for role in versions.ROLES},
    }

    from sglang.srt.server_args import ServerArgs

    from capture_hooks.adapters.sglang import store

    arguments = ServerArgs(model_path="dummy", device="cpu")
    found["arguments"] = [name for name in store.OTHERS if hasattr(arguments, name)]
    found["unnoticed"] = unnoticed(layout.version)
    found["passed_by"] = passed_by(layout.version)
    found["rows"] = rows(layout.version)
    held = {"send": importlib.import_module("sglang.srt.disaggregation.nixl.conn").NixlKVManager.send_kvcache}
    found["held"] = patch(layout.version, "prefill")["hooks"]["sglang.NixlKVManager.send_kvcache"]
    held.clear()

    conn = importlib.import_module("sglang.srt.disaggregation.nixl.conn")
    manager = conn.NixlKVManager
    manager.post_kvcache = manager.send_kvcache  # a later version may call it so
    del manager.send_kvcache
    found["renamed"] = {
        "problems": [p for t in targets if (p := versions.problem(t, layout.version))],
        "unknown": [*(lambda refused: (refused.version, refused.note))(versions.probe(targets, "9.9.9"))],
        "prefill": patch(layout.version, "prefill"),
    }
    print("JSON" + json.dumps(found))


if __name__ == "__main__":
    main()
