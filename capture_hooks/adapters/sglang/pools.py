"""The inventory: every buffer of every pool, what it holds and what the transfer is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Buffer
from capture_hooks.layouts import LAYOUTS, OPAQUE
from capture_hooks.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PoolBuffer:
    """One buffer of a pool: ``number`` is its id in records; ``tensor`` is ``[pages, ...]``.

    ``judged`` buffers hold index-K in a page format that is known; ``on_host`` says whether the host can read them.
    """

    number: int
    name: str
    layer: int
    format: str
    tensor: Any
    address: int
    pages: int
    pitch: int
    item_length: int
    tokens_per_row: int
    judged: bool
    on_host: bool

    @property
    def rows(self) -> int:
        """Rows a page of a judged buffer, 0 for others."""
        return LAYOUTS[self.format].rows if self.judged else 0


class Buffers:
    """The buffers of the pools of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.all: list[PoolBuffer] = []
        self.judged: list[PoolBuffer] = []
        self.sparse = False  #: V3.2: one index-K row a token
        self.pooled = False  #: V3.2 with the keys of several tokens in one row
        self.page_tokens = 0  #: tokens a page of the allocator, 0 while unknown
        self._by_address: dict[int, PoolBuffer] = {}

    def add(self, pool: Any) -> None:
        """Make every buffer of ``pool`` known. Unknown kinds of pool are passed over and counted as a failure."""
        self.page_tokens = self.page_tokens or int(getattr(pool, "page_size", 0) or 0)
        if _rows_of_tokens(pool) is not None:
            self.sparse = True
            self.pooled |= int(getattr(pool, "index_kpool", 1)) > 1
        for name, layer, format_, tensor, item_length, tokens_per_row in describe(pool):
            address = int(tensor.data_ptr())
            if address in self._by_address or not tensor.numel():
                continue
            pages = int(tensor.shape[0])
            pitch = int(tensor.nbytes) // pages
            on_host = tensor.device.type == "cpu"
            judged = format_ in LAYOUTS
            found = PoolBuffer(
                len(self.all), name, layer, format_, tensor, address, pages, pitch, item_length or pitch,
                tokens_per_row, judged, on_host,
            )  # fmt: skip
            self.all.append(found)
            self._by_address[address] = found
            event = Buffer(
                found.number, name, layer, format_, address, pages, pitch, found.item_length, tokens_per_row,
                "DRAM" if on_host else "VRAM",
            )  # fmt: skip
            if judged:
                self._recorder.inventory.add(
                    event, bytes_of(tensor) if on_host else None, None if on_host else flat_bytes(tensor)
                )
                self.judged.append(found)
            else:
                self._recorder.emit(event)

    def of_address(self, address: int) -> PoolBuffer | None:
        """The buffer that begins at ``address``."""
        return self._by_address.get(address)


def bytes_of(tensor: Any) -> npt.NDArray[np.uint8]:
    """Live memory of a contiguous CPU tensor as ``uint8[pages, pitch]``."""
    found: npt.NDArray[np.uint8] = flat_bytes(tensor).numpy()
    return found


def flat_bytes(tensor: Any) -> Any:
    """The same memory as a tensor ``uint8[pages, pitch]``."""
    import torch

    flat = tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
    return flat.view(tensor.shape[0], -1)


Description = tuple[str, int, str, Any, int, int]


def describe(pool: Any) -> Iterator[Description]:
    """(name, global layer, format, tensor ``[pages, ...]``, item length (0 = the pitch), tokens per
    row) of each buffer.
    """
    tensors = _rows_of_tokens(pool)
    if tensors is not None:
        yield from _sparse_attention(pool, tensors)
    elif hasattr(pool, "layer_mapping"):
        yield from _deepseek_v4(pool)


def _deepseek_v4(pool: Any) -> Iterator[Description]:
    """``DeepSeekV4TokenToKVPool``: index-K and latent of each compress ratio, window cache, compress states.

    Rows of a ratio r pool are one for r tokens. Where one transfer item is several pages of a pool (ratios 1 and 2),
    the item is longer than the pitch.
    """
    layers: dict[int, list[int]] = {}
    for layer, item in enumerate(pool.layer_mapping):
        if item is not None:
            layers.setdefault(int(item.compress_ratio), []).append(layer)
    index_pools = getattr(pool, "index_pools", None)
    if index_pools is None:
        index_pools = {4: getattr(pool, "c4_indexer_kv_pool", None)}
    for ratio, index in index_pools.items():
        if index is None:
            continue
        tensors = getattr(index, "index_k_with_scale_buffer", None)
        if tensors is None:
            for number, tensor in enumerate(index.contiguous_page_row_buffers()):
                yield f"index_k_split_{number}", -1, OPAQUE, tensor, 0, ratio
            continue
        items = max(1, pool.page_size // ratio // index.page_size)
        format_ = _index_format(index, tensors)
        for layer, tensor in zip(layers.get(ratio, []), tensors, strict=False):
            yield "index_k", layer, format_, tensor, items * _pitch(tensor), ratio
    kv_pools = getattr(pool, "kv_pools", None)
    if kv_pools is None:
        kv_pools = {4: getattr(pool, "c4_kv_pool", None), 128: getattr(pool, "c128_kv_pool", None)}
    for ratio, latent in kv_pools.items():
        for layer, tensor in zip(
            layers.get(ratio, []), getattr(latent, "kv_buffer", None) or (), strict=False
        ):
            yield f"c{ratio}", layer, OPAQUE, tensor, 0, ratio
    window = getattr(pool, "swa_kv_pool", None)
    for layer, tensor in enumerate(getattr(window, "kv_buffer", None) or ()):
        yield "swa", layer, OPAQUE, tensor, 0, 1
    for name, attribute in (
        ("state", "compress_state_pools"),
        ("index_state", "indexer_compress_state_pools"),
    ):
        for layer, state in enumerate(getattr(pool, attribute, None) or ()):
            score = getattr(getattr(state, "kv_score_buffer", None), "kv_score", None)
            if score is not None:
                yield name, layer, OPAQUE, score, _pitch(score) * int(getattr(state, "ring_size", 1)), 1


def _rows_of_tokens(pool: Any) -> Any:
    """Index-K of ``DSATokenToKVPool``, a tensor a layer; None for another kind of pool. 0.5.16 has it in the pool
    itself.
    """
    cache = getattr(pool, "index_key_cache", None)
    if cache is not None:
        return cache.buffer
    return getattr(pool, "__dict__", {}).get("index_k_with_scale_buffer")


def _sparse_attention(pool: Any, tensors: Any) -> Iterator[Description]:
    """``DSATokenToKVPool`` (V3.2): one index-K row per token (or per few, pooled), pages of 64 rows; placeholders
    of skipped layers are empty. The latent cache has one entry a token, and an item of the transfer is a page of them.
    """
    first = int(getattr(pool, "start_layer", 0) or 0)
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            format_ = _format_of(_pitch(tensor), "fp8")
            yield "index_k", first + number, format_, tensor, 0, int(getattr(pool, "index_kpool", 1))
    for number, tensor in enumerate(getattr(pool, "kv_buffer", None) or ()):
        yield "kv", first + number, OPAQUE, tensor, int(pool.page_size) * _pitch(tensor), 1


def _index_format(index: Any, tensors: Any) -> str:
    if not len(tensors):
        return OPAQUE
    if getattr(index, "index_k_page8", False):
        return OPAQUE  # the same size in another order of bytes
    return _format_of(_pitch(tensors[0]), "fp4" if getattr(index, "use_fp4_indexer", False) else "fp8")


def _format_of(pitch: int, wanted: str) -> str:
    """The known format whose page is this long: the wanted one, or another that fits (a patched
    pool); else opaque.
    """
    if LAYOUTS[wanted].page_bytes == pitch:
        return wanted
    fits = [name for name, layout in LAYOUTS.items() if layout.page_bytes == pitch]
    return fits[0] if len(fits) == 1 else OPAQUE


def _pitch(tensor: Any) -> int:
    return int(tensor.nbytes) // int(tensor.shape[0])
