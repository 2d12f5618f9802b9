"""A client's request id never reaches a journal: only this hash of it does."""

from __future__ import annotations

import hashlib


def rid_hash(rid: str) -> str:
    """One-way hash of request id ``rid``, the same in the server and in ``replay trigger``: 32 hex digits."""
    return hashlib.sha256(b"kv-replay rid " + rid.encode("utf-8", "surrogateescape")).hexdigest()[:32]
