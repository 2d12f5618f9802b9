"""SGLang: which of its functions are hooked, and what their calls mean.

``register`` is the entry point of the group ``sglang.srt.plugins``. SGLang calls it once in every process that it
starts, most of which own no cache. So it imports nothing of SGLang and hooks nothing but a few triggers, which are
set when SGLang itself imports their modules; the first of them that fires in a process starts a
:class:`session.Session` there, and that installs the hooks.

How a module of hooks looks (``prefill``, ``decode``, ``pools``, ``store``, ``read``, ...; listed in
``plugin.MODULES``):

* ``HOOKS: tuple[Target, ...]`` declares the functions it hooks, as data (``versions.Target``): a name, what the hook
  covers (``events.Hook.covers``), where the function is in each version of SGLang, and the roles that have it;
* ``install(session)`` wraps them with ``session.patches.wrap(name, before=..., after=..., around=...)``.

It is imported when a session starts, never before, and may import SGLang inside functions only.
"""

from __future__ import annotations

import os


def register() -> None:
    """Entry point of ``sglang.srt.plugins``. Without ``KV_REPLAY_CAPTURE`` it returns at once. Never raises."""
    if not os.environ.get("KV_REPLAY_CAPTURE", "").strip():
        return
    from capture_hooks.adapters.sglang import plugin

    plugin.arm()
