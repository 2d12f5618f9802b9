"""When a session starts: the triggers that are set in every process, and the modules that a session installs.

Triggers are set when SGLang itself imports their module, so a process that owns no cache pays for one look into
``sys.modules``. Three functions are triggers:

* the constructors of the pools: the pool is remembered, nothing else happens;
* ``ModelRunner._init_post_memory_pool_components``: pools exist, graphs are not captured, transfers not set up. In a
  server the session starts here;
* ``CommonKVManager.__init__``: transfers are about to be set up. Where the manager is used without a model runner,
  the session starts here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from capture_hooks.adapters.sglang.imports import when_imported
from capture_hooks.adapters.sglang.tell import say

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.adapters.sglang.versions import Target

_log = logging.getLogger("kv_replay")

#: Modules of hooks below this package, in the order in which they are installed.
MODULES: tuple[str, ...] = (
    "wire",
    "table_rows",
    "scheduler",
    "steps",
    "store",
    "read",
    "gathered",
    "sparse",
    "worker",
    "prefill",
    "decode",
    "alarms",
)

#: Classes whose constructors are watched: module -> class names.
POOLS = {
    "sglang.srt.mem_cache.deepseek_v4_memory_pool": ("DeepSeekV4TokenToKVPool",),
    "sglang.srt.mem_cache.memory_pool": ("DSATokenToKVPool",),
}
_RUNNER = ("sglang.srt.model_executor.model_runner", "ModelRunner", "_init_post_memory_pool_components")
_MANAGER = ("sglang.srt.disaggregation.common.conn", "CommonKVManager", "__init__")

_lock = threading.RLock()
_session: Session | None = None
_refused = False
_pools: list[Any] = []


def arm() -> None:
    """Set the triggers of this process. Never raises."""
    try:
        for module, classes in POOLS.items():
            for name in classes:
                when_imported(
                    module, functools.partial(_wrap, class_name=name, method="__init__", after=_pool_made)
                )
        module, class_name, method = _RUNNER
        when_imported(
            module, functools.partial(_wrap, class_name=class_name, method=method, before=_runner_ready)
        )
        module, class_name, method = _MANAGER
        when_imported(
            module, functools.partial(_wrap, class_name=class_name, method=method, before=_manager_made)
        )
    except Exception as error:
        _log.warning("kv-replay: SGLang is not watched: %s", error)


def session() -> Session | None:
    """The session of this process, ``None`` while there is none."""
    return _session


def targets() -> tuple[Target, ...]:
    """Every declared target of every module of hooks."""
    found: list[Target] = []
    for name in MODULES:
        found += getattr(_module(name), "HOOKS", ())
    return tuple(found)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"capture_hooks.adapters.sglang.{name}")


def _wrap(
    module: ModuleType,
    *,
    class_name: str,
    method: str,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> None:
    """A trigger: unlike hooks it is told nowhere, for there is no recorder yet."""
    owner = getattr(module, class_name, None)
    original = vars(owner).get(method) if isinstance(owner, type) else None
    if not callable(original):
        _log.warning(
            "kv-replay: %s.%s.%s is not there; capture may not start", module.__name__, class_name, method
        )
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if before is not None:
            _quietly(before, *args, **keywords)
        result = original(*args, **keywords)
        if after is not None:
            _quietly(after, *args, **keywords)
        return result

    setattr(owner, method, wrapper)


def _quietly(body: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    try:
        body(*args, **keywords)
    except Exception as error:
        _log.warning("kv-replay: a trigger failed; the error is ignored", exc_info=error)


def _pool_made(pool: Any, *_: Any, **__: Any) -> None:
    with _lock:
        if not any(known is pool for known in _pools):
            _pools.append(pool)
        if _session is not None:
            _session.pool(pool)


def _runner_ready(runner: Any, *_: Any, **__: Any) -> None:
    if getattr(runner, "is_draft_worker", False):
        return
    arguments = runner.server_args
    mode = str(getattr(arguments, "disaggregation_mode", "null") or "null")
    role = mode if mode in ("prefill", "decode") else "server"
    found = _start(role, _rank(arguments, runner), arguments)
    if found is not None:
        found.runner = runner


def _manager_made(
    manager: Any, args: Any, disaggregation_mode: Any, server_args: Any, *_: Any, **__: Any
) -> None:
    role = str(getattr(disaggregation_mode, "value", disaggregation_mode))
    if role in ("prefill", "decode"):
        _start(role, _rank(server_args), server_args)


def _rank(arguments: Any, runner: Any = None) -> int:
    """Number of this process among those of its role: tensor ranks first, then pipeline, then data ranks.

    The data rank of 0.5.16 is known to its model runner alone.
    """
    try:
        from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found,unused-ignore]

        parallel = get_parallel()
        tp, pp, dp = (int(getattr(parallel, f"{axis}_rank", 0) or 0) for axis in ("tp", "pp", "dp"))
        dp = dp or int(getattr(getattr(runner, "ps", None), "dp_rank", 0) or 0)
    except Exception:
        return 0
    tp_size, pp_size = (int(getattr(arguments, f"{axis}_size", 1) or 1) for axis in ("tp", "pp"))
    return (dp * pp_size + pp) * tp_size + tp


def _start(role: str, rank: int, arguments: Any) -> Session | None:
    """Start the session of this process, once."""
    global _session, _refused
    with _lock:
        if _session is not None or _refused:
            return _session
        from capture_hooks.adapters.sglang.session import Session
        from capture_hooks.adapters.sglang.versions import probe

        declared = targets()
        layout = probe(declared)
        if layout.note:
            say(layout.note)
        if not layout.version:
            _refused = True
            return None
        transport = (
            str(getattr(arguments, "disaggregation_transfer_backend", "") or "") if role != "server" else ""
        )
        _session = Session.start(role, rank, layout, declared, transport)
        if _session is None:
            _refused = True
            return None
        for pool in _pools:
            _session.pool(pool)
        for name in MODULES:
            install = getattr(_module(name), "install", None)
            if install is not None:
                with _session.recorder.guard(f"sglang.install {name}"):
                    install(_session)
        _session.patches.verify()
        say(f"{role} rank {rank}: {_session.patches.summary()}")
        return _session


def _forget() -> None:
    """In a forked child: the session was the parent's."""
    global _session, _refused
    _session, _refused = None, False


os.register_at_fork(after_in_child=_forget)
