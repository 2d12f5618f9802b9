"""V3.2's sparse attention: one row of index-K a token, in pages of 64 tokens.

A store is one of two fused kernels, or a setter of the pool where there is no such kernel; each is given the slots of
the pass's tokens, so its rows are known without a plan. What it is given is no raw key as in V4 (norm, rotation and
transform may lie before it), so its inputs are not kept: pages are compared, stores are not done again.

The read is V4's, called by another layer: by pages in a decode pass, of gathered keys in a prefill
(``gathered.py``). The top-k is left alone: what the layer returns depends on the attention backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.step import Step
from capture_hooks.adapters.sglang.versions import Target, at
from capture_hooks.events import Store

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.pools import PoolBuffer
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.adapters.sglang.store import StoreHooks

_INDEXER = "layers.attention.dsa.dsa_indexer"
_POOL = "mem_cache.memory_pool"
_UTILS = "sglang.srt.layers.attention.dsa.utils"
_RESOLVERS = ("resolve_fp8_paged_mqa_logits_fn", "resolve_fp8_mqa_logits_fn")

HOOKS: tuple[Target, ...] = (
    # Where they are defined: the indexer imports them from there, on CUDA only.
    Target(
        "sparse_store",
        "store",
        {
            "0.5.23": "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache:fused_store_index_k_cache",
            "0.5.16": "sglang.jit_kernel.fused_store_index_cache:fused_store_index_k_cache",
        },
        takes=("key", "index_k_with_scale", "out_cache_loc"),
    ),
    Target(
        "sparse_norm_store",
        "store",
        {
            "0.5.23": "sglang.kernels.ops.attention.dsa.indexer_k:fused_k_indexer_norm_rope_store",
            "0.5.16": "sglang.jit_kernel.dsv32.elementwise:fused_k_indexer_norm_rope_store",
        },
        takes=("cache", "out_cache_loc"),
    ),
    Target(
        "sparse_setter",
        "store",
        at(_POOL, "DSATokenToKVPool.set_index_k_scale_buffer"),
        takes=("layer_id", "loc"),
    ),
    Target("sparse_layer", "step", at(_INDEXER, "Indexer._store_index_k_cache"), takes=("layer_id",)),
    Target(
        "sparse_norm_layer", "step", at(_INDEXER, "Indexer._fused_k_prepare_and_store"), takes=("layer_id",)
    ),
    Target("sparse_read", "step", at(_INDEXER, "Indexer._get_topk_paged"), takes=("layer_id",)),
    Target("sparse_ragged", "step", at(_INDEXER, "Indexer._get_topk_ragged"), takes=("layer_id",)),
    Target("sparse_move", "other writers", at(_POOL, "DSATokenToKVPool.move_kv_cache")),
    Target("sparse_load", "other writers", at(_POOL, "DSATokenToKVPool.load_cpu_copy")),
)


def install(session: Session) -> None:
    """Hook stores and reads of V3.2, where a pool of that kind is known."""
    if not session.buffers.sparse:
        return
    hooks = SparseHooks(session, session.stores)
    wrap = session.patches.wrap
    wrap("sparse_layer", around=hooks.layer)
    wrap("sparse_norm_layer", around=hooks.layer)
    wrap("sparse_store", after=hooks.stored)
    wrap("sparse_norm_store", after=hooks.stored)
    wrap("sparse_setter", after=hooks.set)
    wrap("sparse_read", around=session.reads.plain_layer)
    wrap("sparse_ragged", around=session.reads.plain_layer)
    for name, what in (("sparse_move", "move_kv_cache"), ("sparse_load", "load_cpu_copy")):
        wrap(name, before=session.stores.tripwire(what))
    with session.recorder.guard("sglang.sparse_read"):
        utils = importlib.import_module(_UTILS)
        for found in filter(None, (getattr(utils, name, None) for name in _RESOLVERS)):
            found.cache_clear()  # it keeps the logits function that it found first: from now on the hooked one


class SparseHooks:
    """Hooks on the stores of V3.2 in one process."""

    def __init__(self, session: Session, stores: StoreHooks) -> None:
        self.session, self.steps, self.stores = session, session.steps, stores
        self.recorder = session.recorder
        self._calls = 0  # stores seen so far
        if session.buffers.pooled:
            stores.incomplete(
                "keys of several tokens are pooled into a row, by functions that are not hooked"
            )

    def layer(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Around the store of one layer: it must come to a hooked one."""
        before = self._calls
        found = original(*args, **keywords)
        if self.steps.now is not None and self._calls == before:
            with self.recorder.guard("sglang.sparse_layer"):
                self.stores.incomplete("a layer was stored by a function that is not hooked")
        return found

    def stored(self, _: None, key: Any, cache: Any, slots: Any, *__: Any, **___: Any) -> None:
        """After a fused kernel: the pages begin at ``cache``, token i of the pass goes to ``slots[i]``."""
        self._seen(self.session.buffers.of_address(int(cache.data_ptr())), slots)

    def set(self, _: None, pool: Any, layer_id: int, loc: Any, *__: Any, **___: Any) -> None:
        """After the pool's setter."""
        judged = self.session.buffers.judged
        self._seen(next((b for b in judged if b.layer == int(layer_id)), None), loc)

    def _seen(self, buffer: PoolBuffer | None, slots: Any) -> None:
        self._calls += 1
        step: Step | None = self.steps.now
        if step is None:
            return
        if buffer is None or not buffer.judged:
            self.stores.incomplete("a store into a buffer that is not in the inventory")
            return
        number, at_slots = buffer.number, step.take_once("slots", slots)
        step.stores.add(number)
        stamp = self.recorder.stamp(None, step.line)

        def finish(step: Step, arrays: list[npt.NDArray[Any]]) -> None:
            given = np.array(arrays[at_slots], np.int64).reshape(-1)
            parts = [(row, row.start if step.extend else row.index) for row in step.rows]
            if any(first + row.length - row.before > len(given) for row, first in parts):
                # As of a pool that ranks share page by page: each is given the slots of its own rows alone.
                self.stores.incomplete(
                    "a store was given fewer slots than tokens: whose they are is not known"
                )
                return
            for row, first in parts:
                mine = given[first : first + row.length - row.before]
                rows = np.arange(row.before, row.before + len(mine), dtype=np.int64)
                self.recorder.emit_at(
                    Store(row.held.room, row.held.attempt, number, step.number, -1, mine, rows, rows), stamp
                )

        step.parts.append(finish)
