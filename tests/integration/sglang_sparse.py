"""Runs in a forked endpoint: V3.2's pool (one row of index-K a token) in place of DeepSeek-V4's."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import sglang_host

from tests.gpu.stages.model import twin_gathered_logits, twin_logits

PAGE = 64
LAYERS = 3
SKIPPED = 1  #: this layer takes over the one before: it has no index-K (0.5.23)


class Sparse(sglang_host.Endpoint):
    """Commands beside those of ``Endpoint``: passes that store and read with SGLang's own functions."""

    layers = LAYERS

    def _pool(self, tokens: int, fp4: bool) -> Any:
        import inspect

        import torch
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        more = {}
        if "skip_topk_layers" in inspect.signature(DSATokenToKVPool.__init__).parameters:
            more["skip_topk_layers"] = [layer == SKIPPED for layer in range(LAYERS)]
        return DSATokenToKVPool(
            size=tokens // sglang_host.PAGE * PAGE, page_size=PAGE, kv_lora_rank=512, dtype=torch.bfloat16,
            qk_rope_head_dim=64, layer_num=LAYERS, device="cpu", index_head_dim=128, enable_memory_saver=False,
            kv_cache_dim=576, **more,
        )  # fmt: skip

    def _manager(self, port: int) -> Any:
        """With a DeepGEMM of twins, which SGLang has found before the plug-in looks, and a queue that gives a request
        its row of the table and nothing else.
        """
        import sys
        import types

        from sglang.srt.disaggregation.decode import DecodePreallocQueue
        from sglang.srt.layers.attention.dsa import utils

        DecodePreallocQueue._pre_alloc = lambda self, req: self.req_to_token_pool.alloc([req])

        sys.modules["deep_gemm"] = types.ModuleType("deep_gemm")
        sys.modules["deep_gemm"].fp8_paged_mqa_logits = twin_logits  # type: ignore[attr-defined]
        sys.modules["deep_gemm"].fp8_mqa_logits = twin_gathered_logits  # type: ignore[attr-defined]
        assert utils.resolve_fp8_mqa_logits_fn() is twin_gathered_logits
        assert utils.resolve_fp8_paged_mqa_logits_fn() is twin_logits
        return super()._manager(port)

    def _index(self) -> list[Any]:
        cache = getattr(self.pool, "index_key_cache", None)
        tensors = cache.buffer if cache is not None else self.pool.index_k_with_scale_buffer
        return [tensor for tensor in tensors if len(tensor)]

    def receive(self, room: int, pages: list[int]) -> None:
        import numpy as np

        while not self.manager.try_ensure_parallel_info(self.address):
            sglang_host.time.sleep(0.02)
        receiver = self.ends[room] = self.conn.NixlKVReceiver(self.manager, self.address, room)
        receiver.init(0)
        receiver.send_metadata(np.array(pages, np.int32), 0, [pages], 0)

    def send_all(self, room: int, pages: list[int], tokens: int, states: list[int] | None) -> None:
        """One chunk; ``states`` are all pages of the request, with the last one."""
        import numpy as np

        indices = None if states is None else [states]
        self.ends[room].send(np.array(pages, np.int32), indices, num_kv_tokens=tokens)

    # -- passes ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Put stand-ins where SGLang has its scheduler and runner; the hooks are hung around them as they are there."""
        from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from capture_hooks.adapters.sglang import plugin

        size: dict[str, Any] = {
            "size": 7, "max_context_len": 1024, "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        self.requests: Any = (
            ReqToTokenPool(**size)
            if self.role == "prefill"
            else DecodeReqToTokenPool(**size, pre_alloc_size=0)
        )
        self.table = self.requests.req_to_token
        self.runner = SimpleNamespace(
            is_draft_worker=False, req_to_token_pool=self.requests, server_args=None
        )
        self.session = plugin.session()
        self.reqs: dict[int, Any] = {}

    def start(self, room: int, row: int, pages: list[int], before: int = 0) -> None:
        """A request with its pages. It is given the table's ``row``, which others had ``before``, so many times."""
        import torch
        from sglang.srt.disaggregation.decode import DecodePreallocQueue
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        req = self.reqs[room] = SimpleNamespace(
            rid=f"r{room}", bootstrap_room=room, length=0, origin_input_ids=[0] * 150, finished_reason=None,
            kv=ReqKvInfo(),
        )  # fmt: skip
        self.requests.free_slots = [row]
        for _ in range(before):
            other = SimpleNamespace(kv=ReqKvInfo())
            self.requests.alloc([other])
            self.requests.free(other)
        if self.role == "decode":
            DecodePreallocQueue._pre_alloc(SimpleNamespace(req_to_token_pool=self.requests), req)
        else:
            self.requests.alloc([req])
        slots = [page * PAGE + i for page in pages for i in range(PAGE)]
        self.table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)

    def step_from(self, room: int, length: int) -> None:
        """So many tokens of the request have arrived."""
        self.reqs[room].length = length

    def step(self, room: int, tokens: int, way: str = "setter", read: bool = False) -> list[int]:
        """A pass of one request; returns the slots that it stores to. ``way``: how the store is called."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        req = self.reqs[room]
        before, req.length = req.length, req.length + tokens
        decode = tokens == 1
        slots = self.table[req.kv.req_pool_idx, before : req.length].long()
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND, rids=[req.rid],
            seq_lens_cpu=torch.tensor([req.length]), extend_prefix_lens_cpu=None if decode else [before],
            extend_seq_lens_cpu=None if decode else [tokens], req_pool_indices=torch.tensor([req.kv.req_pool_idx]),
            out_cache_loc=slots,
        )  # fmt: skip

        def forward(_: Any, forward_batch: Any) -> Any:
            for layer in range(LAYERS):
                if layer != SKIPPED or len(self._index()) == LAYERS:
                    self._store(forward_batch, layer, tokens, way)
                    if read and decode:
                        self._read(layer, req)
                    elif read:
                        self._read_gathered(forward_batch, layer, req, tokens)
            return SimpleNamespace(can_run_graph=False)

        steps = self.session.steps
        steps.run_batch(
            lambda _, __: steps.forward(forward, self.runner, batch), None, SimpleNamespace(reqs=[req])
        )
        return [int(slot) for slot in slots]

    def _store(self, batch: Any, layer: int, tokens: int, way: str) -> None:
        """By the indexer's own method down to the pool; this device has no fused kernel, so it takes the setter."""
        import torch
        from sglang.srt.layers.attention.dsa import dsa_indexer

        module = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
        module.get_token_to_kv_pool = lambda: self.pool
        key = torch.randn(tokens, 128)

        def quantise(keys: Any, *_: Any) -> Any:
            scale = keys.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
            return (keys / scale).to(torch.float8_e4m3fn), scale

        if way == "elsewhere":
            self.pool.set_index_k_scale_buffer = lambda **_: None
        indexer = SimpleNamespace(block_size=128, scale_fmt=None)
        dsa_indexer.Indexer._store_index_k_cache(indexer, batch, layer, key, act_quant=quantise)
        self.pool.__dict__.pop("set_index_k_scale_buffer", None)

    def _read(self, layer: int, req: Any) -> None:
        """By the indexer's own method down to the logits function (a stand-in for DeepGEMM's)."""
        import torch
        from sglang.srt.layers.attention.dsa import dsa_indexer

        rows = torch.tensor([req.length], dtype=torch.int32)
        pages = (self.table[req.kv.req_pool_idx : req.kv.req_pool_idx + 1, ::PAGE] // PAGE).contiguous()
        metadata = SimpleNamespace(
            get_page_table_64=lambda: pages, get_seqlens_int32=lambda: rows, get_dsa_extend_len_cpu=lambda: [1],
            topk_transform=lambda logits, k: logits.topk(min(k, logits.shape[1])).indices.int(),
        )  # fmt: skip
        decode = SimpleNamespace(
            is_target_verify=lambda: False, is_draft_extend_v2=lambda: False, is_decode_or_idle=lambda: True
        )
        indexer = SimpleNamespace(
            paged_mqa_logits_backend=SimpleNamespace(is_cutedsl=lambda: False, is_aiter=lambda: False),
            sm_count=132, n_heads=4, index_topk=32,
            _get_index_k_read_buffer=dsa_indexer.Indexer._get_index_k_read_buffer,
            _mask_init_and_local_tokens=lambda logits, _: logits,
        )  # fmt: skip
        query = torch.randn(1, 4, 128).to(torch.float8_e4m3fn)
        weights = torch.rand(1, 4, 1)
        dsa_indexer.Indexer._get_topk_paged(
            indexer, SimpleNamespace(forward_mode=decode), layer, query, weights, metadata
        )

    def _read_gathered(self, batch: Any, layer: int, req: Any, tokens: int) -> None:
        """By the indexer's own method down to the pool's gather and the logits function (a stand-in for DeepGEMM's)."""
        import torch
        from sglang.srt.layers.attention.dsa import dsa_indexer

        class Placed(torch.Tensor):
            """The indexer insists on a device with a number."""

            device = property(lambda _: torch.device("cpu", 0))  # type: ignore[assignment]

        pages = (self.table[req.kv.req_pool_idx : req.kv.req_pool_idx + 1, ::PAGE] // PAGE).contiguous()
        whole = torch.tensor([req.length], dtype=torch.int32)
        ends = torch.arange(req.length - tokens, req.length, dtype=torch.int32) + 1
        metadata = SimpleNamespace(
            get_logical_page_table=lambda: pages, get_indexer_kvcache_range=lambda: (torch.zeros_like(ends), ends),
            get_indexer_seq_len_cpu=lambda: whole, get_indexer_seq_len=lambda: whole,
            get_seqlens_expanded=lambda: ends, get_token_to_batch_idx=lambda: torch.zeros_like(ends),
            topk_transform=lambda logits, k, ks: logits[:, :k].int(),
        )  # fmt: skip
        indexer = SimpleNamespace(
            index_topk=32, _with_real_sm_count=contextlib.nullcontext, _mask_init_and_local_tokens=lambda *_: None,
            _pad_heads_for_deep_gemm=lambda q, w: (q.as_subclass(torch.Tensor), w, 4),
        )  # fmt: skip
        query = torch.randn(tokens, 4, 128).to(torch.float8_e4m3fn).as_subclass(Placed)
        dsa_indexer.Indexer._get_topk_ragged(
            indexer, False, batch, layer, query, torch.rand(tokens, 4, 1), metadata
        )

    def move(self) -> None:
        """The pool moves rows by itself."""
        import torch

        self.pool.move_kv_cache(torch.tensor([70]), torch.tensor([71]))

    def settle(self) -> None:
        """Wait for what is on its way from the device; the tap goes on."""
        from capture_hooks.taps.pages import device_tap

        tap = device_tap(self.session.recorder)
        assert tap is not None
        assert tap.flush(20.0)


class Prepared(Sparse):
    """The manager is told that its device is a GPU, the only one for which it prepares the lists of the states; the
    cache lies in host memory as before.
    """

    def _manager(self, port: int) -> Any:
        import torch
        from sglang.srt.disaggregation.nixl import conn

        conn.get_device = lambda: SimpleNamespace(device="cuda")
        torch.cuda.set_device = lambda *_: None
        return super()._manager(port)

    def plans(self) -> list[list[int]]:
        """Components of the states that were prepared, of each peer."""
        return [sorted(plan.components) for plan in self.manager._prepared_state_plans.values()]

    def cross(self, way: str) -> None:
        """The fault: blocks of the destination's list are chosen wrongly ("layers": the other layer's, "pages": the
        next page's).
        """
        import msgspec

        for plan in self.manager._prepared_state_plans.values():
            (number,) = plan.components
            component = plan.components[number]
            offsets = component.dst_offsets[::-1].copy() if way == "layers" else component.dst_offsets + 1
            plan.components[number] = msgspec.structs.replace(component, dst_offsets=offsets)
