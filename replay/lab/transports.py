"""Which transport a round uses, and making it."""

from __future__ import annotations

import importlib.util

from capture_hooks.events import U8
from replay.lab.barriers import Barriers
from replay.lab.transport import Transport, TransportError, Wire


def nixl_missing() -> str:
    """Why NIXL cannot be used here; empty where it can."""
    try:
        found = importlib.util.find_spec("nixl")
    except (ImportError, ValueError):
        found = None
    return "" if found is not None else "the package 'nixl' is not installed"


def choose(wish: str) -> tuple[str, str]:
    """(transport, note) for the wish "auto", "nixl" or "tcp"; the note says why it is not the first choice."""
    if wish == "tcp":
        return "tcp", ""
    missing = nixl_missing()
    if not missing:
        return "nixl", ""
    if wish == "nixl":
        raise TransportError(f"NIXL was asked for, but {missing}")
    return "tcp", f"{missing}: pages go over a plain TCP connection instead"


def create(kind: str, role: str, memory: U8, metadata: U8, wire: Wire, barriers: Barriers) -> Transport:
    """The transport ``kind`` ("nixl" or "tcp") for one side."""
    if kind == "nixl":
        from replay.lab.nixl_transport import NixlTransport

        return NixlTransport(role, memory, metadata, wire, barriers)
    from replay.lab.tcp_transport import TcpTransport

    return TcpTransport(role, memory, metadata, wire, barriers)
