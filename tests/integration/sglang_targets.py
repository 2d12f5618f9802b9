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


def main() -> None:
    sglang_host.preload()
    from capture_hooks.adapters.sglang import plugin, versions

    targets = plugin.targets()
    layout = versions.probe(targets)
    unknown = versions.probe(targets, "9.9.9")
    found: dict[str, Any] = {
        "layout": [layout.installed, layout.version, layout.note],
        "unknown": [unknown.version, unknown.note],
        "targets": {t.name: t.place(layout.version) for t in targets},
        "optional": [t.name for t in targets if t.optional],
        "problems": [p for t in targets if (p := versions.problem(t, layout.version))],
        "roles": {role: patch(layout.version, role) for role in versions.ROLES},
    }

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
