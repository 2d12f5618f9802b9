"""A fake of the parts of SGLang that run forward passes: batches, a request table, the fused store and the read.

Everything here is a fake by name: tensors lie on the CPU, the store and the logits are the twins of
``replay.kernels``, and the call structure is that of SGLang (batch -> runner -> layer -> compressor and indexer), so
that the hooks can be hung into it as they are hung into the real classes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from capture_hooks.adapters.sglang.owners import Owners
from capture_hooks.adapters.sglang.pools import Buffers
from capture_hooks.adapters.sglang.requests import Requests
from capture_hooks.adapters.sglang.scheduler import SchedulerHooks
from capture_hooks.adapters.sglang.table_rows import TableRows
from capture_hooks.layouts import LAYOUTS
from capture_hooks.recorder import Recorder
from replay.kernels.twins import read_torch, store_torch

FP8 = LAYOUTS["fp8"]
RATIO, PAGE_TOKENS, TOP_K, HEADS = 4, 256, 32, 4
WIDTH = 2048  #: tokens a row of the request table


class FakePlan(NamedTuple):
    compress_ratio: int
    rows: Any
    is_decode: bool


class FakeMode:
    """A forward mode."""

    def __init__(self, decode: bool) -> None:
        self._decode = decode

    def is_decode(self) -> bool:
        return self._decode

    def is_idle(self) -> bool:
        return False

    def is_target_verify(self) -> bool:
        return False

    def is_draft_extend_v2(self) -> bool:
        return False


class FakeEngine:
    """One process that prefills and decodes. ``hooks`` are installed by the test: store, read and the pass."""

    def __init__(self, recorder: Recorder, *, layers: int = 2, pages: int = 40, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.layers = layers
        tensors = [torch.zeros((pages, FP8.page_bytes), dtype=torch.uint8) for _ in range(layers)]
        items = [SimpleNamespace(compress_ratio=RATIO) for _ in range(layers)]
        index = SimpleNamespace(index_k_with_scale_buffer=tensors, page_size=64, use_fp4_indexer=False)
        self.pool = SimpleNamespace(
            layer_mapping=items,
            c4_indexer_kv_pool=index,
            c4_kv_pool=None,
            c128_kv_pool=None,
            page_size=PAGE_TOKENS,
        )
        self.tensors = tensors
        self.free = list(self.rng.permutation(np.arange(1, pages)))
        self.runner = SimpleNamespace(
            is_draft_worker=False,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((16, WIDTH), dtype=torch.int32)),
        )
        angles = torch.outer(torch.arange(WIDTH), 0.5 ** torch.arange(1, 33).float())
        self.freq_cis = torch.polar(torch.ones_like(angles), angles)
        self.norm = [torch.rand(128, generator=self.torch_rng) + 0.5 for _ in range(layers)]
        buffers, requests = Buffers(recorder), Requests()
        self.session = SimpleNamespace(
            recorder=recorder,
            role="server",
            rank=0,
            buffers=buffers,
            requests=requests,
            owners=Owners(recorder, requests, buffers, lambda: None),
            patches=SimpleNamespace(wrap=lambda *_, **__: False),
            request_over=lambda: None,
            steps=None,
        )
        self.session.table_rows = TableRows(self.session)
        self.session.scheduler = SchedulerHooks(self.session)
        self.session.buffers.add(self.pool)
        self.kernel_store: Any = self.fake_store
        self.kernel_logits: Any = self.fake_logits
        self.layer_store: Any = self.fake_layer_store
        self.layer_read: Any = self.fake_layer_read
        self.forward: Any = self.fake_forward
        self.graph = False
        self.wrong: dict[str, Any] = {}  # faults by name

    # -- requests --------------------------------------------------------------------------------------------------

    def start(self, room: int, tokens: int, row: int) -> SimpleNamespace:
        """A request with its pages."""
        held = self.session.requests.open(room)
        held.tokens, held.rows = tokens, tokens // RATIO
        req = SimpleNamespace(rid=f"r{room}", bootstrap_room=room, row=row, length=0, held=held, pages=[])
        return req

    def grow(self, req: Any, length: int) -> None:
        """Give pages for tokens up to ``length``."""
        while len(req.pages) * PAGE_TOKENS < length:
            page = int(self.free.pop())
            first = len(req.pages) * PAGE_TOKENS
            table = self.runner.req_to_token_pool.req_to_token
            table[req.row, first : first + PAGE_TOKENS] = page * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
            req.pages.append(page)

    # -- passes ----------------------------------------------------------------------------------------------------

    def step(self, reqs: list[Any], added: list[int] | None) -> None:
        """One pass: ``added`` tokens for each request of an extend pass, None for a decode pass."""
        decode = added is None
        grown = [1] * len(reqs) if added is None else added
        before = [req.length for req in reqs]
        for req, n in zip(reqs, grown, strict=True):
            self.grow(req, req.length + n)
            req.length += n
        batch = SimpleNamespace(
            forward_mode=FakeMode(decode),
            rids=[req.rid for req in reqs],
            seq_lens_cpu=torch.tensor([req.length for req in reqs]),
            extend_prefix_lens_cpu=None if decode else before,
            extend_seq_lens_cpu=None if decode else grown,
            req_pool_indices=torch.tensor([req.row for req in reqs]),
        )
        self.reqs, self.batch = reqs, batch
        self.metadata(reqs, before, grown, decode)
        self.forward(self.runner, batch)

    def metadata(self, reqs: list[Any], before: list[int], grown: list[int], decode: bool) -> None:
        table = self.runner.req_to_token_pool.req_to_token
        owner = np.repeat(np.arange(len(reqs)), grown)
        length = np.concatenate([np.arange(b, b + n) + 1 for b, n in zip(before, grown, strict=True)])
        rows = torch.tensor([reqs[i].row for i in owner])
        out = table[rows, torch.from_numpy(length - 1)].long() // RATIO
        ends = torch.from_numpy(length % RATIO == 0)
        self.out_loc = torch.where(ends, out, torch.zeros_like(out))
        words = np.zeros((len(length), 4), np.uint32)
        words[:, 0] = length
        if not decode:
            token = np.flatnonzero(length % RATIO == 0)
            words = np.zeros((len(token) + 1, 4), np.uint32)  # and one row of padding, in some order
            order = self.rng.permutation(len(token))
            words[:-1, 0], words[:-1, 1] = length[token][order], token[order] | (7 << 16)
            words[-1, 0] = 0xFFFFFFFF
        self.plan = FakePlan(RATIO, torch.from_numpy(words.view(np.uint8).reshape(-1, 16)), decode)
        longest = max(req.length for req in reqs)
        columns = -(-longest // PAGE_TOKENS) + 2
        self.page_table = table[rows, : columns * PAGE_TOKENS : PAGE_TOKENS].clone() // PAGE_TOKENS
        self.lengths = torch.from_numpy(length // RATIO).int()

    def fake_forward(self, runner: Any, batch: Any) -> SimpleNamespace:
        self.backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(
                core_metadata=SimpleNamespace(
                    c4_sparse_page_indices=torch.full((len(self.lengths), TOP_K), -1, dtype=torch.int32)
                )
            )
        )
        for layer in range(self.layers):
            indexer = SimpleNamespace(layer_id=layer, index_topk=TOP_K)
            self.layer_read(self.backend, c4_indexer=indexer, forward_batch=batch)
        return SimpleNamespace(can_run_graph=self.graph)

    def fake_layer_read(self, backend: Any, *, c4_indexer: Any, forward_batch: Any) -> None:
        layer = c4_indexer.layer_id
        self.layer_store(layer)
        count = len(self.lengths)
        query = torch.randn((count, 1, HEADS, 128), generator=self.torch_rng).to(torch.float8_e4m3fn)
        weights = torch.rand((count, HEADS), generator=self.torch_rng)
        cache = self.tensors[layer].view(-1, 64, 1, 132)
        logits = self.kernel_logits(
            query, cache, weights, self.lengths[:, None], self.page_table, None, 0, False
        )
        out = backend.forward_metadata.core_metadata.c4_sparse_page_indices
        for row in range(count):
            rows = int(self.lengths[row])
            best = torch.topk(logits[row, :rows], min(rows, TOP_K)).indices
            if self.wrong.get("top-k") and rows > TOP_K:
                best = torch.topk(-logits[row, :rows], min(rows, TOP_K)).indices
            out[row, : len(best)] = self.page_table[row].long()[best // 64].int() * 64 + (best % 64).int()

    def fake_layer_store(self, layer: int) -> None:
        kv = torch.randn((len(self.plan.rows), 128), generator=self.torch_rng)
        self.kernel_store(
            kv, self.plan, norm_weight=self.norm[layer], norm_eps=1e-6, freq_cis=self.freq_cis,
            out_loc=self.out_loc, kvcache=self.tensors[layer], page_size=64,
        )  # fmt: skip

    def fake_store(self, kv: Any, plan: Any, **given: Any) -> None:
        words = plan.rows.numpy().view(np.uint32)
        length = words[:, 0].astype(np.int64)
        if plan.is_decode:
            chosen = np.flatnonzero(length % RATIO == 0)
            place = chosen
        else:
            chosen = np.flatnonzero(length != 0xFFFFFFFF)
            place = (words[chosen, 1] & 0xFFFF).astype(np.int64)
        position = torch.from_numpy(length[chosen] - RATIO)
        rope = torch.view_as_real(given["freq_cis"]).flatten(-2)[position]
        keys = kv[torch.from_numpy(chosen)]
        if self.wrong.get("store"):
            keys = keys * 1.0
            keys[:, 5] += 0.5
        slots = given["out_loc"][torch.from_numpy(place)]
        if len(chosen):
            store_torch(FP8, given["kvcache"], slots, keys, rope, given["norm_weight"], given["norm_eps"])

    def fake_logits(self, query: Any, cache: Any, weights: Any, lengths: Any, table: Any, *_: Any) -> Any:
        flat = cache.view(cache.shape[0], -1)
        logits, _ = read_torch(
            FP8,
            flat,
            table.long(),
            lengths.reshape(-1).long(),
            query.reshape(-1, HEADS, 128).float(),
            weights,
            1,
        )
        if self.wrong.get("logits"):
            logits = logits * 1.01
        return logits
