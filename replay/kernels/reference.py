"""Store and read in float64, written from the page layout: what any fp32 kernel is judged by.

The parts and the derivation of their bounds are in ``pages.py``, ``store_reference.py`` and ``read_reference.py``.
None imports torch.
"""

from __future__ import annotations

from replay.kernels.pages import decode_pages, decode_rows
from replay.kernels.read_reference import (
    TopKViolations,
    logits_of_keys,
    logits_reference,
    top_k_violations,
    wrong_logits,
)
from replay.kernels.store_reference import (
    StoreCheck,
    StoreInputs,
    StoreReference,
    check_store,
    rope_rows,
    store_reference,
    unrotated,
)

__all__ = [
    "StoreCheck",
    "StoreInputs",
    "StoreReference",
    "TopKViolations",
    "check_store",
    "decode_pages",
    "decode_rows",
    "logits_of_keys",
    "logits_reference",
    "rope_rows",
    "store_reference",
    "top_k_violations",
    "unrotated",
    "wrong_logits",
]
