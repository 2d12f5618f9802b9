"""Checks of the arguments of a store or a read, made before anything is launched.

An address outside its buffer kills the process on the interpreter and may do so on a GPU. So every slot and
every page id that will be used is checked first, and the message names the entry.
"""

from __future__ import annotations

import torch

from capture_hooks.layouts import Layout
from replay.words import counted

ROPE_DIM = 64


def _fail(what: str, index: tuple[int, ...], value: int, limit: int, of: str) -> None:
    place = ", ".join(str(i) for i in index)
    raise ValueError(f"{what}[{place}] is {value}; {of} has {limit}, so it must lie in 0..{limit - 1}")


def check_cache(layout: Layout, cache: torch.Tensor) -> None:
    """``ValueError`` unless ``cache`` is a ``uint8[pages, pitch]`` whose pages hold ``layout``."""
    if cache.dtype != torch.uint8 or cache.ndim != 2:
        raise ValueError(f"cache must be uint8[pages, pitch], not {cache.dtype}{list(cache.shape)}")
    if cache.shape[1] < layout.page_bytes:
        raise ValueError(
            f"a {layout.name} page has {layout.page_bytes} bytes; the cache has {cache.shape[1]} a page"
        )
    if cache.shape[1] > 1 and cache.stride(1) != 1:
        raise ValueError("the bytes of a page must be adjacent (stride 1)")


def check_aligned(cache: torch.Tensor) -> None:
    """``ValueError`` unless every page starts on a multiple of 4 bytes, as the Triton kernels need."""
    pitch = cache.stride(0) if cache.shape[0] > 1 else 4
    if cache.data_ptr() % 4 or pitch % 4:
        raise ValueError(
            f"the Triton kernels need pages that start on a multiple of 4 bytes; address {cache.data_ptr():#x}, "
            f"pitch {pitch} (the torch twin takes any)"
        )


def _shape(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {dtype}{list(shape)}, not {tensor.dtype}{list(tensor.shape)}")


def check_store(
    layout: Layout,
    cache: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    rope: torch.Tensor,
    norm_weight: torch.Tensor,
) -> None:
    """Check a store's arguments; ``ValueError`` names the offending slot, shape or dtype."""
    check_cache(layout, cache)
    count = len(slots)
    _shape("slots", slots, torch.int64, (count,))
    _shape("keys", keys, torch.float32, (count, layout.head_dim))
    _shape("rope", rope, torch.float32, (count, ROPE_DIM))
    _shape("norm_weight", norm_weight, torch.float32, (layout.head_dim,))
    limit = cache.shape[0] * layout.rows
    if count:
        outside = (slots < 0) | (slots >= limit)
        if bool(outside.any()):
            index = int(outside.nonzero()[0])
            _fail(
                "slots", (index,), int(slots[index]), limit, f"a cache of {counted(cache.shape[0], 'page')}"
            )
        ordered, order = slots.sort(stable=True)
        same = ordered[1:] == ordered[:-1]
        if bool(same.any()):
            place = int(same.nonzero()[0])
            first, second = int(order[place]), int(order[place + 1])
            raise ValueError(
                f"slots[{second}] is {int(ordered[place])}, the slot of slots[{first}] too: "
                "two rows of one launch cannot share a slot"
            )


def check_read(
    layout: Layout,
    cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    weights: torch.Tensor,
    k: int,
) -> None:
    """Check a read's arguments; ``ValueError`` names the offending entry, shape or dtype.

    Only table entries that the lengths reach are checked; the others may hold anything.
    """
    check_cache(layout, cache)
    batch = len(rows)
    width = table.shape[1] if table.ndim == 2 else 0
    heads = query.shape[1] if query.ndim == 3 else 0
    _shape("rows", rows, torch.int64, (batch,))
    _shape("table", table, torch.int64, (batch, width))
    _shape("query", query, torch.float32, (batch, heads, layout.head_dim))
    _shape("weights", weights, torch.float32, (batch, heads))
    if k < 0:
        raise ValueError(f"k must not be negative, it is {k}")
    if batch == 0:
        return
    if heads == 0:
        raise ValueError("query has no heads")
    limit = width * layout.rows
    outside = (rows < 0) | (rows > limit)
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        raise ValueError(
            f"rows[{index}] is {int(rows[index])}; a table of {counted(width, 'page')} holds 0..{limit} rows "
            f"of {layout.name}"
        )
    if width == 0:
        return
    used = torch.arange(width, device=table.device) * layout.rows < rows[:, None].to(table.device)
    bad = used & ((table < 0) | (table >= cache.shape[0]))
    if bool(bad.any()):
        request, entry = (int(i) for i in bad.nonzero()[0])
        _fail("table", (request, entry), int(table[request, entry]), cache.shape[0], "the cache's page count")
