"""The transfer library below SGLang: its own adapter, installed before SGLang's hooks so that they
can listen to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture_hooks.adapters.sglang.versions import Target

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

HOOKS: tuple[Target, ...] = ()


def install(session: Session) -> None:
    """Install the adapter of the transfer library in use."""
    if session.role == "server":
        return
    if session.transport in ("", "nixl"):
        from capture_hooks.adapters import nixl

        session.wire = nixl.install(session.recorder)
