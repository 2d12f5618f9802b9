"""The kernels that the lab's engine calls: torch twins for the bulk, Triton on the interpreter for a sample.

:func:`read_tiled` is a second read, written the way a hand-optimised kernel is: it works in tiles.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

from capture_hooks.layouts import Layout
from replay.kernels import twins

#: Rows that one tile of the tiled read covers, and heads of one head tile.
TILE_ROWS = 32
TILE_HEADS = 3


def prepare() -> None:
    """Let Triton kernels run on the interpreter, for the lab's caches lie in host memory; call before triton is
    imported.
    """
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"


def load_triton() -> None:
    """Import the Triton kernels (about a second)."""
    import replay.kernels.read
    import replay.kernels.store  # noqa: F401


def store(
    layout: Layout,
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    rope: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    engine: str,
) -> None:
    """Store rows into ``cache``; see ``replay.kernels.twins.store_torch``. ``engine`` is "torch" or "triton"."""
    if engine == "triton":
        from replay.kernels import store as triton_store

        triton_store.store(layout, cache, slots, keys, rope, norm_weight, epsilon)
        return
    twins.store_torch(layout, cache, slots, keys, rope, norm_weight, epsilon)


def read(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
    engine: str,
    how: Literal["plain", "tiled", "other-format"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and top-k; see ``replay.kernels.twins.read_torch``."""
    if how == "tiled":
        return read_tiled(layout, cache, table, rows, query, weights, k)
    if how == "other-format":
        return read_other_format(layout, cache, table, rows, query, weights, k)
    if engine == "triton":
        from replay.kernels import read as triton_read

        found: tuple[torch.Tensor, torch.Tensor] = triton_read.read(
            layout, cache, table, rows, query, weights, k
        )
        return found
    return twins.read_torch(layout, cache, table, rows, query, weights, k)


def read_other_format(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The read as it was built for another machine: only the exponent of an fp32 scale counts, 16-bit numbers are fp16,
    and four-bit blocks have exponents that are one larger than what they mean.
    """
    longest = int(rows.max()) if len(rows) else 0
    logits = torch.full((len(rows), longest), -torch.inf, dtype=torch.float32)
    for i, length in enumerate(rows.tolist()):
        pages = cache[table[i, : -(-length // layout.rows)], : layout.page_bytes]
        if layout.scale_type == "none":
            keys = pages.contiguous().view(torch.float16).to(torch.float32)
        elif layout.scale_type == "fp32":
            words = pages[:, layout.scale_base :].contiguous().view(torch.int32)
            pages[:, layout.scale_base :] = (words & 0x7F800000).view(torch.uint8)
            keys = twins.decode_torch(layout, pages)
        else:
            keys = twins.decode_torch(layout, pages) / 2
        scores = torch.relu(query[i] @ keys.reshape(-1, layout.head_dim)[:length].T)
        logits[i, :length] = weights[i] @ scores
    return logits, twins.top_k_torch(logits, rows, k)


def select(logits: torch.Tensor, rows: torch.Tensor, k: int, *, whole: bool) -> torch.Tensor:
    """A selection that is quick: by the upper bits of the scores, or (not ``whole``) without its last slots."""
    if not whole:
        found = twins.top_k_torch(logits, rows, k)
        found[:, k - k // 8 :] = -1
        return found
    coarse = (logits.contiguous().view(torch.int32) >> 20).to(torch.float32)
    coarse[logits == -torch.inf] = -torch.inf
    longest = logits.shape[1]
    # Rows that are the same in their upper bits: the later one first.
    order = longest - 1 - torch.sort(coarse.flip(1), dim=1, descending=True, stable=True).indices[:, :k]
    found = torch.full((len(logits), k), -1, dtype=torch.int32)
    found[:, : order.shape[1]] = order.to(torch.int32)
    found[torch.arange(k) >= rows.clamp(max=k)[:, None]] = -1
    return found


def read_tiled(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The read in tiles, one request at a time.

    Its scale pointer is advanced once a tile where it has to be once a row, and without scales its head loop
    leaves out the last, incomplete tile of heads.
    """
    longest = int(rows.max()) if len(rows) else 0
    logits = torch.full((len(rows), longest), -torch.inf, dtype=torch.float32)
    for i, length in enumerate(rows.tolist()):
        pages = cache[table[i, : -(-length // layout.rows)], : layout.page_bytes]
        heads = query.shape[1]
        if layout.scale_bytes:
            scales = pages[:, layout.scale_base :].view(-1, layout.rows, layout.scale_bytes)
            for start in range(TILE_ROWS, layout.rows, TILE_ROWS):
                scales[:, start : start + TILE_ROWS] = scales[:, start : start + 1].clone()
        else:
            heads -= heads % TILE_HEADS
        keys = twins.decode_torch(layout, pages).view(-1, layout.head_dim)[:length]
        for h in range(0, heads, TILE_HEADS):
            part = slice(h, min(h + TILE_HEADS, heads))
            scores = torch.relu(query[i, part] @ keys.T)
            tile = weights[i, part] @ scores
            logits[i, :length] = tile if h == 0 else logits[i, :length] + tile
    return logits, twins.top_k_torch(logits, rows, k)
