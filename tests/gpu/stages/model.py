"""A model without weights around the real parts of SGLang that this project looks at: store, transfer and read.

What is SGLang's own: the pool, the fused store (``compress_norm_rope_store``), DeepGEMM's ``fp8_paged_mqa_logits``,
the gather of a long prompt's keys and DeepGEMM's ``fp8_mqa_logits`` of them, the managers, senders and receivers. What
stands in for SGLang: the functions that call them (a batch, a pass, a layer's compressor and indexer), which make up
keys and queries at random, build plans and tables as SGLang does and take the top-k with torch. The stand-ins are put
where SGLang has its own before the plug-in looks, so its hooks are hung around them and around the real kernels as they
are in a server.

On a machine without CUDA the kernels are the torch twins of ``replay.kernels``: the way through the script is the
same, the proof is not.
"""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

RATIO, PAGE = 4, 256
WIDTH = 2048  #: tokens a row of the request table
HEADS = 64
TOP_K = 32  #: less than the rows of a request: of fewer rows every one is taken, whatever the logits
WRONG_LAYER = 1  #: the faults of kernels are in this one of the layers with an indexer


class Model:
    """The stand-ins of one process. ``wrong`` names the fault that the passes have from now on ("" is none)."""

    def __init__(self, pool: Any, device: str) -> None:
        self.pool, self.device, self.wrong = pool, torch.device(device), ""
        self.heads, self.top_k = HEADS, TOP_K
        self.gathered = False  #: whether a prefill reads gathered keys, as SGLang does for long prompts
        self.layer = -1  # whose keys are read now
        self.layers = [
            number for number, item in enumerate(pool.layer_mapping) if item.compress_ratio == RATIO
        ]
        self.buffers = list(pool.c4_indexer_kv_pool.index_k_with_scale_buffer)
        self.random = torch.Generator(device=self.device).manual_seed(11)
        self.norm = [torch.rand(128, generator=self.random, device=self.device) + 0.5 for _ in self.layers]
        angles = torch.outer(torch.arange(WIDTH), 0.5 ** torch.arange(1, 33).float())
        self.freq_cis = torch.polar(torch.ones_like(angles), angles).to(self.device)
        table = torch.zeros((32, WIDTH), dtype=torch.int32, device=self.device)
        self.runner = SimpleNamespace(
            is_draft_worker=False,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            server_args=SimpleNamespace(),
        )
        self.graph: Any = None
        self.reqs: dict[int, Any] = {}
        self._replace()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    # -- instead of SGLang's own ---------------------------------------------------------------------------------

    def _replace(self) -> None:
        model = self
        compressor = importlib.import_module("sglang.srt.layers.attention.dsv4.compressor_v2")
        indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
        self.compressor, self.indexer = compressor, indexer
        if self.cuda:
            deep_gemm = importlib.import_module("deep_gemm")
        else:
            deep_gemm = types.ModuleType("deep_gemm")
            deep_gemm.fp8_paged_mqa_logits = twin_logits  # type: ignore[attr-defined]
            deep_gemm.fp8_mqa_logits = twin_gathered_logits  # type: ignore[attr-defined]
            sys.modules["deep_gemm"] = deep_gemm
            compressor.compress_norm_rope_store = _twin_store
        self.deep_gemm = deep_gemm
        real_store, real_logits = compressor.compress_norm_rope_store, deep_gemm.fp8_paged_mqa_logits
        real_gathered_logits = deep_gemm.fp8_mqa_logits

        def store(kv: Any, plan: Any, **given: Any) -> None:
            if (
                model.wrong == "store"
                and given["kvcache"].data_ptr() == model.buffers[WRONG_LAYER].data_ptr()
            ):
                kv = kv.clone()
                kv[:, 5] += 0.5
            real_store(kv, plan, **given)

        def logits(query: Any, cache: Any, *args: Any) -> Any:
            found = real_logits(query, cache, *args)
            if model.wrong == "read-kernel" and cache.data_ptr() == model.buffers[WRONG_LAYER].data_ptr():
                found = found * 1.1  # of 64 heads, one in a hundred is within the bound of rounding
            return found

        def gathered_logits(*args: Any, **keywords: Any) -> Any:
            found = real_gathered_logits(*args, **keywords)
            return found * 1.1 if model.wrong == "read-kernel" and model.layer == WRONG_LAYER else found

        def compress(self: Any, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> None:
            model.store(forward_batch, layer_id)

        def index(self: Any, x: Any, q_lora: Any, c4_indexer: Any, forward_batch: Any) -> None:
            model.index(self, c4_indexer, forward_batch)

        def forward(self: Any, forward_batch: Any) -> Any:
            return model.forward(forward_batch)

        def run_batch(self: Any, batch: Any) -> Any:
            return model.runner_class.forward(model.runner, batch.forward_batch)

        self.unhooked = lambda kv, plan, **given: store(kv, plan, **given)
        compressor.compress_norm_rope_store = store
        deep_gemm.fp8_paged_mqa_logits = logits
        deep_gemm.fp8_mqa_logits = gathered_logits
        self.backend_class = indexer.C4IndexerBackendMixin
        self.compressor_class = compressor.CompressorBackendMixin
        self.compressor_class.forward_indexer_compressor = compress
        self.backend_class.forward_c4_indexer = index
        self.runner_class = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
        self.runner_class.forward = forward
        self.scheduler_class = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
        self.scheduler_class.run_batch = run_batch
        queue = importlib.import_module("sglang.srt.disaggregation.decode").DecodeTransferQueue
        queue._commit_transfer_to_req = lambda self, decode_req: True

    # -- requests ------------------------------------------------------------------------------------------------

    def start(self, room: int, row: int, pages: list[int], tokens: int, have: int) -> Any:
        """A request with its pages, of whose ``tokens`` prompt tokens ``have`` were computed before."""
        req = self.reqs[room] = SimpleNamespace(
            rid=f"r{room}", bootstrap_room=room, origin_input_ids=[0] * tokens, length=have, finished_reason=None,
            kv=SimpleNamespace(req_pool_idx=row),
        )  # fmt: skip
        slots = [page * PAGE + i for page in pages for i in range(PAGE)]
        table = self.runner.req_to_token_pool.req_to_token
        table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32, device=self.device)
        return req

    # -- passes --------------------------------------------------------------------------------------------------

    def extend(self, room: int, tokens: int) -> None:
        """A prefill pass of one chunk of a request."""
        req = self.reqs[room]
        before, req.length = req.length, req.length + tokens
        lengths = np.arange(before, req.length) + 1
        self._pass([req], [before], [tokens], np.zeros(tokens, np.int64), lengths, decode=False)

    def decode(self, rooms: list[int], graph: bool) -> None:
        """A decode pass of some requests."""
        reqs = [self.reqs[room] for room in rooms]
        for req in reqs:
            req.length += 1
        lengths = np.array([req.length for req in reqs])
        self._pass(reqs, [], [], np.arange(len(reqs)), lengths, decode=True, graph=graph)

    def _pass(
        self, reqs: list[Any], before: list[int], added: list[int], owner: Any, lengths: Any, *, decode: bool,
        graph: bool = False,
    ) -> None:  # fmt: skip
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        rows = [req.kv.req_pool_idx for req in reqs]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            rids=[req.rid for req in reqs],
            seq_lens_cpu=torch.tensor([req.length for req in reqs]),
            extend_prefix_lens_cpu=None if decode else before,
            extend_seq_lens_cpu=None if decode else added,
            req_pool_indices=torch.tensor(rows, device=self.device),
            graph=graph,
        )
        batch.given = self.given(torch.tensor(rows, device=self.device)[torch.from_numpy(owner).to(self.device)],
                                 lengths, decode)  # fmt: skip
        self.scheduler_class.run_batch(SimpleNamespace(), SimpleNamespace(reqs=reqs, forward_batch=batch))

    def given(self, rows: Any, lengths: Any, decode: bool) -> Any:
        """What the kernels of a pass are given, as SGLang builds it: plan, slots, lengths, page table."""
        table = self.runner.req_to_token_pool.req_to_token
        length = torch.from_numpy(np.asarray(lengths, np.int64)).to(self.device)
        place = table[rows.long(), length - 1].long() // RATIO
        ends = length % RATIO == 0
        if decode:
            words = torch.zeros((len(length), 4), dtype=torch.int32, device=self.device)
            words[:, 0] = length.int()
        else:
            token = ends.nonzero()[:, 0]
            words = torch.zeros((len(token), 4), dtype=torch.int32, device=self.device)
            words[:, 0], words[:, 1] = length[token].int(), token.int()
        columns = WIDTH // PAGE
        return SimpleNamespace(
            plan=self.plan(words.view(torch.uint8), decode),
            slots=torch.where(ends, place, torch.zeros_like(place)),
            lengths=(length // RATIO).int()[:, None].contiguous(),
            table=(table[rows.long(), ::PAGE] // PAGE)[:, :columns].contiguous(),
            kv=[self._normal(len(words), 128) for _ in self.layers],
            query=[
                self._normal(len(length), 1, self.heads, 128).to(torch.float8_e4m3fn) for _ in self.layers
            ],
            weights=torch.rand((len(length), self.heads), generator=self.random, device=self.device),
        )

    def plan(self, rows: Any, decode: bool) -> Any:
        """SGLang's own plan object around 16 bytes a row."""
        module = importlib.import_module("sglang.kernels.ops.attention.dsv4.compress")
        if decode:
            return module.CompressorDecodePlan(RATIO, rows)
        return module.CompressorPrefillPlan(RATIO, rows, rows[:, :8].contiguous())

    def _normal(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self.random, device=self.device)

    def forward(self, batch: Any) -> Any:
        """The body of ``ModelRunner.forward``."""
        if batch.graph:
            self.replay(batch.given)
        else:
            self._layers(batch)
        return SimpleNamespace(can_run_graph=batch.graph)

    def _layers(self, batch: Any) -> None:
        backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(core_metadata=SimpleNamespace(c4_sparse_page_indices=None)),
            forward_indexer_compressor=types.MethodType(
                lambda _, **given: self.compressor_class.forward_indexer_compressor(None, **given), object()
            ),
        )
        for layer in self.layers:
            indexer = SimpleNamespace(layer_id=layer, index_topk=self.top_k)
            self.backend_class.forward_c4_indexer(
                backend, x=None, q_lora=None, c4_indexer=indexer, forward_batch=batch
            )

    # -- one layer -----------------------------------------------------------------------------------------------

    def store(self, batch: Any, layer: int, kernel: Any = None) -> None:
        """The body of ``forward_indexer_compressor``: the compressed keys go to the fused store."""
        number, given = self.layers.index(layer), batch.given
        (kernel or self.compressor.compress_norm_rope_store)(
            given.kv[number], given.plan, norm_weight=self.norm[number], norm_eps=1e-6, freq_cis=self.freq_cis,
            out_loc=given.slots, kvcache=self.buffers[number], page_size=64,
        )  # fmt: skip

    def index(self, backend: Any, c4_indexer: Any, batch: Any) -> None:
        """The body of ``forward_c4_indexer``: store, logits, top-k."""
        layer, given = c4_indexer.layer_id, batch.given
        backend.forward_indexer_compressor(
            x=None, forward_batch=batch, layer_id=layer, compressor=SimpleNamespace(is_in_indexer=True)
        )
        number = self.layers.index(layer)
        wrong = self.wrong if number == WRONG_LAYER else ""
        table = given.table
        if wrong == "table":
            table = table.clone()
            table[:, 1] = table[:, 0]
        if self.gathered and batch.forward_mode.is_extend():
            logits = self._gathered_logits(number, c4_indexer, batch, table)
        else:
            logits = self._logits(number, given, table)
        most = min(table.shape[1] * 64, logits.shape[1])
        inside = torch.arange(most, device=self.device)[None, :] < given.lengths
        scored = torch.where(inside, logits[:, :most], torch.full_like(logits[:, :most], -torch.inf))
        if wrong == "top-k":
            scored = torch.where(inside, -scored, scored)
        best = scored.topk(min(self.top_k, most), dim=1).indices
        slots = table.gather(1, best // 64) * 64 + (best % 64).int()
        kept = torch.arange(best.shape[1], device=self.device)[None, :] < given.lengths
        backend.forward_metadata.core_metadata.c4_sparse_page_indices = torch.where(
            kept, slots, torch.full_like(slots, -1)
        )

    def _logits(self, number: int, given: Any, table: Any) -> Any:
        cache = self.buffers[number].view(-1, 64, 1, 132)
        most, schedule = table.shape[1] * 64, None
        if self.cuda:
            schedule = self.deep_gemm.get_paged_mqa_logits_metadata(
                given.lengths, 64, self.deep_gemm.get_num_sms()
            )
        return self.deep_gemm.fp8_paged_mqa_logits(
            given.query[number], cache, given.weights, given.lengths, table, schedule, most, False
        )

    def _gathered_logits(self, number: int, c4_indexer: Any, batch: Any, table: Any) -> Any:
        """By SGLang's own functions for one long prompt (``forward_c4_indexer`` calls them from 8,192 tokens on)."""
        from sglang.srt.layers.attention.dsv4.metadata import NonPagedIndexerPlan

        given, rows = batch.given, int(batch.seq_lens_cpu[0]) // RATIO
        stops = given.lengths.reshape(-1)
        plan = NonPagedIndexerPlan(
            page_table=table[:1].contiguous(), gather_seq_lens=stops[-1:], ks=torch.zeros_like(stops),
            ke=torch.where(stops > self.top_k, stops, torch.zeros_like(stops)), seq_len_sum=rows, max_seq_len=rows,
            max_seqlen_k=-(-rows // 64) * 64, query_rows=len(stops),
        )  # fmt: skip
        kv = self.backend_class._gather_nonpaged_index_k(
            c4_indexer=c4_indexer, token_to_kv_pool=self.pool, plan=plan
        )
        self.layer = number
        return self.backend_class._nonpaged_mqa_logits(
            q_indexer=given.query[number].squeeze(1), weights=given.weights, kv=kv, plan=plan,
            rows=slice(0, len(stops)),
        )  # fmt: skip

    # -- a CUDA graph --------------------------------------------------------------------------------------------

    def capture(self, size: int) -> None:
        """Capture the decode pass of ``size`` rows, after two warm-up runs, as SGLang does."""
        rows = torch.zeros(size, dtype=torch.int64, device=self.device)
        batch = SimpleNamespace(given=self.given(rows, np.ones(size, np.int64), decode=True))
        if not self.cuda:
            self.graph = (_Unreal(self, batch), batch.given)
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._layers(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What threads of the transfer library and of the plug-in ask the device meanwhile is no matter of the graph.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._layers(batch)
        self.graph = (graph, batch.given)

    def replay(self, new: Any) -> None:
        """Fill the static inputs and replay; rows beyond the batch are padding."""
        graph, given = self.graph
        count = len(new.lengths)
        given.plan[1].view(torch.int32)[:, 0] = 1
        given.slots.zero_()
        given.lengths.zero_()
        for name in ("slots", "lengths", "table", "weights"):
            getattr(given, name)[:count] = getattr(new, name)
        given.plan[1][:count] = new.plan[1]
        for number in range(len(self.layers)):
            given.kv[number][:count] = new.kv[number]
            given.query[number][:count] = new.query[number]
        graph.replay()


class _Unreal:
    """On a CPU in place of a graph: what the plug-in has it copy is copied after the kernels, at each replay."""

    def __init__(self, model: Model, batch: Any) -> None:
        from capture_hooks.taps.graphs import GraphPlaces

        self.model, self.batch, self.wrong = model, batch, model.wrong
        self.nodes: list[Any] = []
        model._layers(batch)
        plain = GraphPlaces.capturing, GraphPlaces.put

        def put(places: Any, *args: Any) -> bool:
            self.nodes.append(lambda: plain[1](places, *args))
            return plain[1](places, *args)

        GraphPlaces.capturing, GraphPlaces.put = (lambda _: True), put  # type: ignore[method-assign]
        try:
            model._layers(batch)
        finally:
            GraphPlaces.capturing, GraphPlaces.put = plain  # type: ignore[method-assign]

    def replay(self) -> None:
        now, self.model.wrong = self.model.wrong, self.wrong
        for layer in self.model.layers:
            self.model.store(self.batch, layer, self.model.unhooked)
        for node in self.nodes:
            node()
        self.model.wrong = now


def _twin_store(kv: Any, plan: Any, *, norm_weight: Any, norm_eps: float, freq_cis: Any, out_loc: Any, kvcache: Any,
                page_size: int) -> None:  # fmt: skip
    from capture_hooks.layouts import LAYOUTS
    from replay.kernels.twins import store_torch

    words = plan[1].view(torch.int32)
    length = words[:, 0].long()
    chosen = (length % RATIO == 0).nonzero()[:, 0]
    place = chosen if plan.is_decode else words[chosen, 1].long()
    if len(chosen):
        rope = torch.view_as_real(freq_cis).flatten(-2)[length[chosen] - RATIO]
        store_torch(LAYOUTS["fp8"], kvcache, out_loc[place], kv[chosen], rope, norm_weight, norm_eps)


def twin_logits(
    query: Any,
    cache: Any,
    weights: Any,
    lengths: Any,
    table: Any,
    schedule: Any,
    most: int,
    clean_logits: bool = False,
) -> Any:
    from capture_hooks.layouts import LAYOUTS
    from replay.kernels.twins import read_torch

    rows, heads = weights.shape
    found, _ = read_torch(
        LAYOUTS["fp8"], cache.view(cache.shape[0], -1), table.long(), lengths.reshape(-1).long(),
        query.reshape(rows, heads, 128).float(), weights, 1,
    )  # fmt: skip
    return torch.nn.functional.pad(found, (0, most - found.shape[1]))


def twin_gathered_logits(
    q: Any, kv: Any, weights: Any, ks: Any, ke: Any, clean_logits: bool = False, max_seqlen_k: int = 0
) -> Any:
    """Logits of a copy of keys: with ``max_seqlen_k`` from each row's own first key on, else one a key of the copy."""
    keys, scale = kv[0].float(), kv[1].reshape(-1)
    found = torch.zeros(len(q), len(keys), device=q.device)
    for head in range(q.shape[1]):
        found += (q[:, head].float() @ keys.T).relu() * weights[:, head : head + 1].float()
    found = found * scale
    if not max_seqlen_k:
        return found
    own = ks[:, None].long() + torch.arange(max_seqlen_k, device=q.device)
    return found.gather(1, own.clamp(max=len(keys) - 1))
