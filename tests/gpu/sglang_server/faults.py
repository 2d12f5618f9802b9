"""Faults for a running pair, by the room of a request: a plug-in for this test only. It knows nothing of kv-replay.

``BASE + 1000 * kind + n`` is a room with a fault:

1  decode: bytes of an arrived page are flipped between the commit and the first read
2  prefill: the last page is dropped from the list of a chunk
3  prefill: 8,192 bytes of each index-K page are sent instead of 8,448, page by page
4  prefill: another page is copied over a source page just before its chunk is posted
5  prefill: a chunk is held back for ten seconds before it is posted (its client gives up meanwhile)
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

BASE = 50_000_000
FLIPPED, SHORT, LENGTH, OVERWRITTEN, HELD = 1, 2, 3, 4, 5
_HELD_SECONDS = 10.0
_pools: list[Any] = []


def kind(room: Any) -> int:
    """Fault of a room, 0 for none."""
    if room is None or not BASE <= int(room) < BASE + 10_000:
        return 0
    return (int(room) - BASE) // 1000


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.__init__", _pool),
        ("disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req", _commit),
        ("disaggregation.nixl.conn.NixlKVManager.send_kvcache", _send),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)


def _pool(original: Any, pool: Any, *args: Any, **keywords: Any) -> Any:
    found = original(pool, *args, **keywords)
    _pools.append(pool)
    return found


def _index_buffers() -> list[Any]:
    return list(_pools[0].c4_indexer_kv_pool.index_k_with_scale_buffer)


def _commit(original: Any, queue: Any, decode_req: Any, *args: Any, **keywords: Any) -> Any:
    found = original(queue, decode_req, *args, **keywords)
    req = decode_req.req
    if kind(req.bootstrap_room) == FLIPPED:
        table = queue.scheduler.req_to_token_pool.req_to_token
        page = int(table[req.req_pool_idx, 0]) // 256
        buffer = _index_buffers()[1]
        buffer[page, 1000:1064] = ~buffer[page, 1000:1064]
    return found


def _send(
    original: Any,
    manager: Any,
    peer: str,
    pages: Any,
    pointers: Any,
    there: Any,
    gpu: Any,
    notif: str,
    **keywords: Any,
) -> Any:
    fault = kind(notif.split("_")[0])
    if fault == SHORT:
        pages, there = pages[:-1], there[:-1]
    elif fault == LENGTH:
        return _send_short_pages(manager, peer, pages, pointers, there, gpu, notif)
    elif fault == OVERWRITTEN:
        import torch

        buffer = _index_buffers()[0]
        victim = int(pages[0])
        buffer[victim] = buffer[int(pages[-1])]
        torch.cuda.synchronize()
    elif fault == HELD:
        time.sleep(_HELD_SECONDS)
    return original(manager, peer, pages, pointers, there, gpu, notif, **keywords)


def _send_short_pages(
    manager: Any, peer: str, pages: Any, pointers: Any, there: Any, gpu: Any, notif: str
) -> Any:
    """Every page of every buffer with its own descriptor; those of index-K lack their last 256 bytes."""
    index = {int(buffer.data_ptr()) for buffer in _index_buffers()}
    source, target = [], []
    for here, other, length in zip(
        manager.kv_args.kv_data_ptrs, pointers, manager.kv_args.kv_item_lens, strict=True
    ):
        size = length - 256 if here in index else length
        for page, remote in zip(pages.tolist(), there.tolist(), strict=True):
            source.append((here + page * length, size, manager.kv_args.gpu_id))
            target.append((other + remote * length, size, gpu))
    agent = manager.agent
    handle = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs(np.array(source, np.uint64), "VRAM"),
        agent.get_xfer_descs(np.array(target, np.uint64), "VRAM"),
        peer,
        notif.encode("ascii"),
    )
    if agent.transfer(handle) == "ERR":
        raise RuntimeError("the transfer could not be posted")
    return handle
