"""Pages given to requests and taken from them, and the rows of the request table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture_hooks.adapters.sglang.versions import Target

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

HOOKS: tuple[Target, ...] = ()


def install(session: Session) -> None:
    """Hook the allocators."""
