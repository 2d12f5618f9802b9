"""A fake of reads of gathered keys, around a fake engine: the copy, and logits made of it.

Everything here is a fake by name. ``compressed`` is V4's way (logits from each row's own first key on, rows that take
every key are given none to score), without it they have a column for each key of the copy, as in V3.2.
"""

from __future__ import annotations

from typing import Any

import torch

from capture_hooks.adapters.sglang.gathered import KERNELS, GatheredHooks
from tests.sglang.fake_engine import FP8, HEADS, TOP_K, FakeEngine


class FakeGather:
    """Puts itself in the place of the engine's logits in extend passes. ``wrong`` names a fault."""

    def __init__(self, engine: FakeEngine, *, compressed: bool, rows_per_call: int = 0) -> None:
        self.engine, self.compressed, self.rows_per_call = engine, compressed, rows_per_call
        self.wrong = ""
        self.gather: Any = self.fake_gather
        self.score: Any = self.fake_score
        self.between: Any = lambda buffer, table: None  #: run between the copy and its logits
        self.paged, engine.kernel_logits = engine.kernel_logits, self.logits

    def hook(self, reads: Any, kernel: str = "read_gathered") -> None:
        hooks = GatheredHooks(self.engine.session, reads)
        plain, scored, body = self.gather, self.score, hooks.kernel(kernel, KERNELS[kernel])
        self.gather = lambda *args, **keywords: hooks.gather(plain, *args, **keywords)
        self.score = lambda *args, **keywords: body(scored, *args, **keywords)

    def logits(self, query: Any, cache: Any, weights: Any, lengths: Any, table: Any, *args: Any) -> Any:
        """In the place of the paged function; what it returns has the columns of that one."""
        batch = self.engine.batch
        if batch.forward_mode.is_decode():
            return self.paged(query, cache, weights, lengths, table, *args)
        grown = torch.tensor(batch.extend_seq_lens_cpu)
        last = grown.cumsum(0) - 1
        owner = torch.repeat_interleave(torch.arange(len(grown)), grown)
        ends = lengths.reshape(-1)
        keys = self.engine.tensors[
            next(n for n, t in enumerate(self.engine.tensors) if t.data_ptr() == cache.data_ptr())
        ]
        rows = ends[last]
        pages = table[last].contiguous()
        kv = self.gather(
            None, None, keys, page_indices=pages, seq_len_tensor=rows, seq_len_sum=int(rows.sum()),
            max_seq_len=int(rows.max()),
        )  # fmt: skip
        self.between(keys, pages)
        starts = (rows.cumsum(0) - rows)[owner].int()
        if self.wrong == "start":
            starts = torch.where(starts > 0, starts - 3, starts)
        most = int(rows.max())
        stops = starts + ends
        if self.compressed:
            stops = torch.where(ends > TOP_K, stops, starts)
        step = self.rows_per_call or len(ends)
        parts = [
            self.score(
                query.squeeze(1)[at : at + step], kv, weights[at : at + step], starts[at : at + step],
                stops[at : at + step], clean_logits=False, **({"max_seqlen_k": most} if self.compressed else {}),
            )
            for at in range(0, len(ends), step)
        ]  # fmt: skip
        logits = torch.cat(parts)
        if self.compressed:
            return logits
        own = (starts[:, None].long() + torch.arange(most)).clamp(max=logits.shape[1] - 1)
        return logits.gather(1, own)

    def fake_gather(
        self, owner: Any, pool: Any, buf: Any, page_indices: Any, seq_len_tensor: Any, seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[Any, Any]:  # fmt: skip
        keys, scales = [], []
        for pages, rows in zip(page_indices.long(), seq_len_tensor.tolist(), strict=True):
            used = buf[pages[: -(-rows // FP8.rows)]]
            if self.wrong == "gather":
                used = used.flip(0)
            keys.append(used[:, :8192].reshape(-1, 128)[:rows])
            scales.append(used[:, 8192:].reshape(-1, 4)[:rows])
        return torch.cat(keys), torch.cat(scales)

    def fake_score(
        self,
        q: Any,
        kv: Any,
        weights: Any,
        ks: Any,
        ke: Any,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
    ) -> Any:
        keys = kv[0].view(torch.float8_e4m3fn).float()
        scale = kv[1].contiguous().view(torch.float32).reshape(-1)
        products = torch.einsum("rhd,kd->rhk", q.float().reshape(-1, HEADS, 128), keys).relu()
        logits = torch.einsum("rhk,rh->rk", products, weights.float()) * scale
        if self.wrong == "logits":
            logits = logits * 1.1
        if not max_seqlen_k:
            return logits
        own = ks[:, None].long() + torch.arange(max_seqlen_k)
        return torch.where(own < ke[:, None], logits.gather(1, own.clamp(max=len(keys) - 1)), 7e7)
