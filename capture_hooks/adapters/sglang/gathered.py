"""The read of gathered keys: a prefill copies the keys of its requests out of their pages and scores the copy.

V4 does so for one long prompt alone (``SGLANG_OPT_DSV4_NONPAGED_INDEXER``), V3.2 for every prefill, several requests
in one copy. The pages are read when they are gathered: the looks before and after belong there, and what becomes of the
pages afterwards is no part of this read. Gather and logits function together are the kernel: of a row that is recorded
the table is the one that was gathered by, its length is ``ke - ks``, and its logits are those of the columns of its own
keys in the copy.

That the logits function was given the copy of the gather that was seen is told by its address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.read import ROUNDING, ReadHooks
from capture_hooks.adapters.sglang.sampled import Gathered, Layer, Taken, page_count, query_row, tell
from capture_hooks.adapters.sglang.step import Step
from capture_hooks.adapters.sglang.versions import EVERYWHERE, Target
from capture_hooks.layouts import LAYOUTS
from capture_hooks.recorder import Mark

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

#: Logits functions of gathered keys: hook -> name of the kernel in traces.
KERNELS = {"read_gathered": "deep_gemm.fp8_mqa_logits", "read_gathered_torch": "torch"}

HOOKS: tuple[Target, ...] = (
    # Below the methods of the pools: it is given the memory that it copies from, which need not be the pool's own.
    Target(
        "gather",
        "read of gathered keys",
        {
            "0.5.23": "sglang.kernels.ops.kvcache.dsa_index_k_cache:GetKAndS.triton",
            "0.5.16": "sglang.kernels.ops.attention.dsa.index_buf_accessor:GetKAndS.triton",
        },
        takes=("buf", "page_indices", "seq_len_tensor"),
    ),
    Target("read_gathered", "read", {EVERYWHERE: "deep_gemm:fp8_mqa_logits"}, optional=True),
    Target(
        "read_gathered_torch",
        "read",
        {"0.5.23": "sglang.srt.layers.attention.dsa.utils:_fp8_mqa_logits_torch"},
        takes=("q_fp8", "kv", "weights", "ks", "ke"),
        optional=True,
    ),
)


def install(session: Session) -> None:
    """Hook the gather and the logits functions of what it copies."""
    hooks = GatheredHooks(session, session.reads)
    session.patches.wrap("gather", around=hooks.gather)
    for name, kernel in KERNELS.items():
        session.patches.wrap(name, around=hooks.kernel(name, kernel))


class GatheredHooks:
    """Hooks on reads of gathered keys in one process."""

    def __init__(self, session: Session, reads: ReadHooks) -> None:
        self.session, self.reads, self.steps = session, reads, session.steps
        self.recorder = session.recorder

    # -- the gather ------------------------------------------------------------------------------------------

    def gather(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Around ``GetKAndS.triton``: the pages of sampled requests, before and after."""
        step, layer = self.steps.now, self.reads.now
        if step is None:
            return original(*args, **keywords)
        taken: list[Taken] | None = None
        with self.recorder.guard("sglang.gather"):
            taken = self._before(step, layer, *args, **keywords)
        mark = self.recorder.mark()
        keys = original(*args, **keywords)
        with self.recorder.guard("sglang.gather"):
            if layer is not None and taken is not None:
                self._after(step, taken, mark, *args, **keywords)
                layer.gathered = Gathered(int(keys[0].data_ptr()), taken)
        return keys

    def _before(
        self,
        step: Step,
        layer: Layer | None,
        owner: Any,
        pool: Any,
        buf: Any,
        page_indices: Any,
        seq_len_tensor: Any,
        *_: Any,
        **__: Any,
    ) -> list[Taken] | None:
        """Sampled rows with the looks at their pages; None where the read is not followed, which is told."""
        from capture_hooks.taps.device import gather

        buffer = self.session.buffers.of_address(int(buf.data_ptr()))
        if layer is None:
            self.reads.incomplete("keys were gathered by a layer that is not hooked")
            return None
        if layer.left:
            self.reads.incomplete("keys were gathered twice before they were read")
            return None
        if buffer is None or not buffer.judged:
            self.reads.incomplete("keys were gathered from memory that is not in the inventory")
            return None
        if not step.extend or page_indices.dim() != 2 or int(page_indices.shape[0]) != self.steps.requests:
            self.reads.incomplete("keys of a part of a batch were gathered: whose they are is not known")
            return None
        found = []
        for row in self.reads.sampled(step):
            pages = page_count(row.length // buffer.tokens_per_row, LAYOUTS[buffer.format].rows)
            pages = min(pages, int(page_indices.shape[1]))
            taken = Taken(buffer, "", [row], [(0, logical) for logical in range(pages)])
            table = page_indices[row.index, : pages + 1].clone()
            mark = self.recorder.mark()
            taken.before = step.job.take(
                gather(buffer.tensor, table[:pages].long(), LAYOUTS[buffer.format].page_bytes)
            )
            taken.looked = self.recorder.stamp(mark, step.line)
            taken.table = step.job.take(table[None])
            taken.gathered = step.job.take(seq_len_tensor.reshape(-1)[row.index : row.index + 1].clone())
            found.append(taken)
        return found

    def _after(
        self,
        step: Step,
        found: list[Taken],
        mark: Mark,
        owner: Any,
        pool: Any,
        buf: Any,
        page_indices: Any,
        seq_len_tensor: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        from capture_hooks.taps.device import gather

        over = self.recorder.stamp(mark, step.line)
        for taken in found:
            taken.stamp, pages = over, len(taken.pages)
            table = page_indices[taken.rows[0].index, : pages + 1].clone()
            looking = self.recorder.mark()
            taken.after = step.job.take(
                gather(taken.buffer.tensor, table[:pages].long(), LAYOUTS[taken.buffer.format].page_bytes)
            )
            taken.last = self.recorder.stamp(looking, step.line)
            taken.table_after = step.job.take(table[None])

    # -- the logits ------------------------------------------------------------------------------------------

    def kernel(self, target: str, name: str) -> Callable[..., Any]:
        """The body of the hook on one logits function: ``target`` of :data:`KERNELS`, ``name`` in traces."""
        guard = self.recorder.guard(hook_name(target))

        def around(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            step, layer = self.steps.now, self.reads.now
            if step is None or (layer is not None and layer.busy):
                return original(*args, **keywords)
            logits = original(*args, **keywords)
            with guard:
                self._scored(step, layer, name, logits, *args, **keywords)
            return logits

        return around

    def _scored(
        self,
        step: Step,
        layer: Layer | None,
        kernel: str,
        logits: Any,
        query: Any,
        kv: Any,
        weights: Any,
        ks: Any,
        ke: Any,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
        **_: Any,
    ) -> None:
        """Put by what the sampled rows of one call were given, and what became of it."""
        import torch

        gathered = layer.gathered if layer is not None else None
        if layer is None or gathered is None or gathered.keys != int(kv[0].data_ptr()):
            self.reads.incomplete("logits were made of gathered keys whose gather was not seen")
            return
        first, count = layer.rows, int(weights.shape[0])
        layer.rows += count
        gathered.read = True
        for taken in list(gathered.waiting):
            place = query_row(step, taken.rows[0]) - first
            if not 0 <= place < count:
                continue
            gathered.waiting.remove(taken)
            taken.kernel = kernel
            # Copies: a view would keep what the whole pass was given in memory until it has arrived.
            taken.query = step.job.take(query[place].reshape(1, -1).view(torch.uint8).clone())
            taken.weights = step.job.take(weights[place : place + 1].float().clone())
            taken.lengths = step.job.take(ke[place : place + 1] - ks[place : place + 1])
            if kernel not in ROUNDING and logits.dtype == torch.float32:
                # With ``max_seqlen_k`` the first column is the first key of each row, without it that of the copy.
                start = None if max_seqlen_k else ks[place]
                taken.logits = step.job.take(_columns(logits[place], start, _longest(taken))[None])
            layer.reads.append(taken)
            layer.parts.append(partial(self._tell, taken))

    def _tell(self, taken: Taken, step: Step, arrays: list[npt.NDArray[Any]]) -> None:
        if int(arrays[taken.lengths][0]) <= 0:
            # As many rows as the top-k asks for, or fewer: all are taken, and the kernel was given none to score.
            taken.lengths, taken.logits, taken.top_k = taken.gathered, -1, -1
        tell(self.recorder, step, taken, arrays)


def _longest(taken: Taken) -> int:
    """Rows that the request has by the host's count."""
    return taken.rows[0].length // taken.buffer.tokens_per_row


def _columns(logits: Any, start: Any, count: int) -> Any:
    """``count`` logits of a row from column ``start`` (on the device; None is 0) on."""
    import torch

    columns = torch.arange(count, device=logits.device)
    if start is not None:
        columns = columns + start
    return logits.index_select(0, columns.clamp(0, logits.shape[0] - 1))
