"""Keys of the order edges between the two sides and between threads.

Both ends make the same key from what each knows.
"""

from __future__ import annotations

from typing import Any

import xxhash

from capture_hooks.adapters.sglang.requests import Held


def peer(name: object) -> str:
    """A short digest of a peer's name or address: traces hold neither."""
    return xxhash.xxh3_64_hexdigest(str(name).encode())[:10]


def agent(manager: Any) -> str:
    """Name by which the other side knows a manager: its NIXL agent's, or its Mooncake session's."""
    found = getattr(getattr(manager, "agent", None), "name", None)
    if found is None:
        engine = getattr(manager, "engine", None)
        found = engine.get_session_id() if engine is not None else ""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)


def announce(held: Held, agent: object) -> str:
    """Destination pages of a request were told by one decode rank (the name of its agent)."""
    return f"{held.key}/{peer(agent)}"


def status(held: Held, address: str, port: int, prefill_rank: int) -> str:
    """One prefill rank told one decode rank, at its address, that a request is complete."""
    return f"{held.key}/{peer(f'{address}:{port}')}.{prefill_rank}"


def abort(held: Held, address: str, port: int) -> str:
    """One decode rank, at its address, gave a request up."""
    return f"{held.key}/{peer(f'{address}:{port}')}"


def acknowledge(held: Held, address: str, port: int, prefill_rank: int) -> str:
    """One prefill rank told one decode rank, at its address, that no write of a request is in flight."""
    return status(held, address, port, prefill_rank)


def queued(held: Held, chunk: int) -> str:
    """A chunk went from the scheduler to a transfer worker."""
    return f"prefill.chunk.{held.key}.{chunk}"


def sent(held: Held) -> str:
    """The last transfer of a request is over: from its worker to the scheduler."""
    return f"prefill.sent.{held.key}"


def told(held: Held, prefill_rank: int) -> str:
    """A status was taken in: from the listener to the scheduler."""
    return f"decode.told.{held.key}.{prefill_rank}"


def later(held: Held, what: str) -> str:
    """A later look was asked for."""
    return f"later.{what}.{held.key}"
