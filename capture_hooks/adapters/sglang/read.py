"""The read: what the logits kernel was given and what it made of it, for sampled rows; the tables of all of
them.

The indexer imports its logits function where it calls it, so the attribute of the module that it comes from
is hooked; the call around it (``forward_c4_indexer``) tells the layer and leaves the top-k behind. Of a
request its first read and every ``read_every``-th pass after it are recorded whole: length, block table,
query, weights, logits, top-k, and the pages before and after the kernel. Of all other rows the table is
compared with the one that was recorded last, and recorded where it is another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.sampled import Layer, Taken, page_count, query_row, tell
from capture_hooks.adapters.sglang.step import Row, Step
from capture_hooks.adapters.sglang.steps import Steps
from capture_hooks.adapters.sglang.versions import EVERYWHERE, REPLACED, Target, at
from capture_hooks.codec import StampTuple
from capture_hooks.events import Read
from capture_hooks.layouts import LAYOUTS

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.pools import PoolBuffer
    from capture_hooks.adapters.sglang.session import Session


_INDEXER = "layers.attention.dsv4.indexer"

#: Logits functions: hook -> (place, name of the kernel in traces, the variable without which it is not used).
KERNELS: dict[str, tuple[str, str, str]] = {
    "read_deep_gemm": ("deep_gemm:fp8_paged_mqa_logits", "deep_gemm.fp8_paged_mqa_logits", ""),
    "read_deep_gemm_fp4": ("deep_gemm:fp8_fp4_paged_mqa_logits", "deep_gemm.fp8_fp4_paged_mqa_logits", ""),
    "read_tilelang": (
        "sglang.kernels.ops.attention.dsa.tilelang_kernel:tilelang_fp8_paged_mqa_logits",
        "tilelang",
        "SGLANG_OPT_USE_TILELANG_INDEXER",
    ),
    "read_torch": (f"sglang.srt.{_INDEXER}:fp8_paged_mqa_logits_torch", "torch", ""),
    "read_torch_sm120": (f"sglang.srt.{_INDEXER}:fp8_paged_mqa_logits_torch_sm120", "torch sm120", ""),
}

HOOKS: tuple[Target, ...] = (
    *(Target(name, "read", {EVERYWHERE: place}, optional=True) for name, (place, _, _) in KERNELS.items()),
    Target(
        "read_layer", "top-k", at(_INDEXER, "C4IndexerBackendMixin.forward_c4_indexer"), takes=("c4_indexer",)
    ),
)

#: Kernels that round on the way to 16 bits: the bound of logits is that of fp32, so theirs are not recorded.
ROUNDING = frozenset({"torch", "torch sm120"})
_BUDGET = 64 * 2**20  #: most bytes of pages that one pass may take at reads


def install(session: Session) -> None:
    """Hook the logits functions and the layer around them."""
    hooks = session.reads = ReadHooks(session, session.steps)
    for name, (_, kernel, variable) in KERNELS.items():
        if not variable or os.environ.get(variable, "").strip().lower() in ("1", "true", "yes"):
            session.patches.wrap(name, around=hooks.kernel(name, kernel))
    session.patches.wrap("read_layer", around=hooks.layer)


class ReadHooks:
    """Hooks on the read of one process."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.recorder = session.recorder
        self.now: Layer | None = None  #: the layer that runs
        self._whole = True
        steps.on_unseen.append(self.incomplete)
        steps.on_runner.append(self.look_for_others)
        steps.on_graph.append(
            lambda _: self.incomplete("this pass replayed a CUDA graph: no Python of the model ran")
        )

    def incomplete(self, why: str) -> None:
        """The hooks do not see every read any more."""
        if self._whole:
            self._whole = False
            for name in (*KERNELS, "read_layer"):
                self.recorder.incomplete(hook_name(name), why)

    def look_for_others(self, runner: Any) -> None:
        """Whether another plug-in runs the model instead, by the server's arguments."""
        if getattr(getattr(runner, "server_args", None), REPLACED, False):
            self.incomplete(f"another plug-in's kernels may read past the hooks on the read ({REPLACED})")

    # -- the layer around the kernel -------------------------------------------------------------------------

    def layer(self, original: Callable[..., Any], backend: Any, *args: Any, **keywords: Any) -> Any:
        """Around ``forward_c4_indexer``: kernels below it belong to this layer; the top-k is there when it
        returns.
        """
        step = self.steps.now
        if step is None:
            return original(backend, *args, **keywords)
        layer = self.now = Layer()
        with self.recorder.guard("sglang.read_layer"):
            layer.k = int(getattr(keywords.get("c4_indexer"), "index_topk", -1))
        try:
            found = original(backend, *args, **keywords)
        finally:
            self.now = None
        with self.recorder.guard("sglang.read_layer"):
            self._over(step, layer)
            if layer.reads:
                top_k = backend.forward_metadata.core_metadata.c4_sparse_page_indices
                for taken in layer.reads:
                    rows = self._query_rows(step, taken.rows)
                    inside = rows.clamp(0, top_k.shape[0] - 1)
                    taken.top_k = step.job.take(top_k.index_select(0, inside))
                    taken.k = layer.k
        return found

    def plain_layer(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Around a layer whose top-k is not taken: kernels below it belong to this call."""
        step = self.steps.now
        if step is None:
            return original(*args, **keywords)
        layer = self.now = Layer()
        try:
            found = original(*args, **keywords)
        finally:
            self.now = None
        with self.recorder.guard("sglang.sparse_read"):
            self._over(step, layer)
        return found

    def _over(self, step: Step, layer: Layer) -> None:
        """A layer is over: it must have read for all rows of the pass, and all that it gathered, by hooked functions.

        Where it had a part of the rows (two-batch overlap, context parallel) its first is not the first of the batch:
        what was put by of it may be another request's.
        """
        if step.extend and 0 < layer.rows < step.queries:
            self.incomplete("a layer read for a part of a pass: whose rows they are is not known")
            layer.reads.clear()
            layer.parts.clear()
        elif layer.left:
            self.incomplete("gathered keys were read by a function that is not hooked")
        step.parts += layer.parts

    # -- the kernel ------------------------------------------------------------------------------------------

    def kernel(self, target: str, name: str) -> Callable[..., Any]:
        """The body of the hook on one logits function: ``target`` of :data:`KERNELS`, ``name`` in traces."""
        guard = self.recorder.guard(hook_name(target))

        def around(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            step, layer = self.steps.now, self.now
            if step is None:
                return original(*args, **keywords)
            if layer is None or len(args) < 5:
                with guard:
                    self.incomplete("a read by a layer that is not hooked")
                return original(*args, **keywords)
            if layer.busy:
                return original(*args, **keywords)
            taken: Taken | None = None
            with guard:
                taken = self._before(step, layer, name, *args[:5])
            mark = self.recorder.mark()
            layer.busy = True
            try:
                logits = original(*args, **keywords)
            finally:
                layer.busy = False
            with guard:
                if taken is not None:
                    taken.stamp = self.recorder.stamp(mark, step.line)
                    self._after(step, layer, taken, logits, *args[:5])
            return logits

        return around

    def _before(
        self,
        step: Step,
        layer: Layer,
        kernel: str,
        query: Any,
        cache: Any,
        weights: Any,
        lengths: Any,
        table: Any,
    ) -> Taken | None:
        from capture_hooks.taps.device import gather

        buffer = self.session.buffers.of_address(int(cache.data_ptr()))
        count = int(weights.shape[0])
        first, layer.rows = layer.rows, layer.rows + count
        if buffer is None or not buffer.judged:
            self.incomplete("a read of a buffer that is not in the inventory")
            return None
        self._tables(step, buffer, table, lengths)
        here = [row for row in self.sampled(step) if first <= query_row(step, row) < first + count]
        if not here:
            return None
        rows_of_page = LAYOUTS[buffer.format].rows
        pages = [
            (place, logical)
            for place, row in enumerate(here)
            for logical in range(page_count(row.length // buffer.tokens_per_row, rows_of_page))
        ]
        taken = Taken(buffer, kernel, here, pages)
        ids = self._page_ids(step, taken, table, first)
        mark = self.recorder.mark()
        taken.before = step.job.take(gather(buffer.tensor, ids, LAYOUTS[buffer.format].page_bytes))
        taken.looked = self.recorder.stamp(mark, step.line)
        return taken

    def _after(
        self,
        step: Step,
        layer: Layer,
        taken: Taken,
        logits: Any,
        query: Any,
        cache: Any,
        weights: Any,
        lengths: Any,
        table: Any,
    ) -> None:
        from capture_hooks.taps.device import gather

        first = layer.rows - int(weights.shape[0])
        mark = self.recorder.mark()
        ids = self._page_ids(step, taken, table, first)
        taken.after = step.job.take(gather(taken.buffer.tensor, ids, LAYOUTS[taken.buffer.format].page_bytes))
        taken.last = self.recorder.stamp(mark, step.line)
        rows = self._query_rows(step, taken.rows) - first
        longest = max(row.length // taken.buffer.tokens_per_row for row in taken.rows)
        if not isinstance(query, tuple):  # fp4 queries come with scales and are not decoded
            taken.query = step.job.take(
                query.reshape(query.shape[0], -1).view(_bytes()).index_select(0, rows)
            )
            taken.weights = step.job.take(weights.index_select(0, rows).float())
            if taken.kernel not in ROUNDING:
                taken.logits = step.job.take(logits[:, :longest].index_select(0, rows))
        taken.lengths = step.job.take(lengths.reshape(-1).index_select(0, rows))
        taken.table = step.job.take(
            table[:, : self._width(taken.rows, taken.buffer, table)].index_select(0, rows)
        )
        layer.reads.append(taken)
        layer.parts.append(lambda step, arrays: tell(self.recorder, step, taken, arrays))

    def _width(self, rows: list[Row], buffer: PoolBuffer, table: Any) -> int:
        """Columns of a table that rows of these lengths use, and one more."""
        longest = max(row.length // buffer.tokens_per_row for row in rows)
        return min(int(table.shape[1]), page_count(longest, LAYOUTS[buffer.format].rows) + 1)

    def _query_rows(self, step: Step, rows: list[Row]) -> Any:
        """Query rows of ``rows`` on the device, uploaded once a pass."""
        key = ("query rows", tuple(row.index for row in rows))
        if key not in step.extra:
            step.extra[key] = self.steps.upload(np.array([query_row(step, row) for row in rows], np.int64))
        return step.extra[key]

    def _page_ids(self, step: Step, taken: Taken, table: Any, first: int) -> Any:
        """Physical pages of ``taken.pages`` as the kernel's table has them now."""
        key = ("pages", tuple(row.index for row in taken.rows))
        if key not in step.extra:
            pairs = np.array(taken.pages, np.int64).reshape(-1, 2)
            step.extra[key] = self.steps.upload(pairs)
        pairs = step.extra[key]
        rows = self._query_rows(step, taken.rows).index_select(0, pairs[:, 0]) - first
        flat = rows * table.stride(0) + pairs[:, 1].clamp(0, table.shape[1] - 1) * table.stride(1)
        whole = table.as_strided((_extent(table),), (1,))
        return whole.index_select(0, flat.clamp(0, whole.shape[0] - 1)).long()

    # -- which rows ------------------------------------------------------------------------------------------

    def sampled(self, step: Step) -> list[Row]:
        """Rows of a pass that are recorded whole; decided once, for all layers."""
        if "sampled" not in step.extra:
            step.extra["sampled"] = self._sample(step) if self.recorder.options.tap("read") else []
        rows: list[Row] = step.extra["sampled"]
        return rows

    def _sample(self, step: Step) -> list[Row]:
        options = self.recorder.options
        judged = self.session.buffers.judged
        page = sum(LAYOUTS[buffer.format].page_bytes for buffer in judged)
        left = min(_BUDGET, self.steps.free // 4)
        chosen = []
        for row in step.rows:
            rows = row.length // judged[0].tokens_per_row
            if not rows or (step.extend and row.held.room % options.store_every):
                continue  # of some requests only: a prefill reads with every token
            seen = self.steps.seen(row.held)
            seen.due |= seen.reads % options.read_every == 0
            seen.reads += 1
            if not seen.due:
                continue
            size = 2 * page * page_count(rows, LAYOUTS[judged[0].format].rows)
            if size > left:
                continue  # it stays due: a later pass may have room for it
            left -= size
            seen.due = False
            chosen.append(row)
        return chosen

    # -- tables of all rows ----------------------------------------------------------------------------------

    def _tables(self, step: Step, buffer: PoolBuffer, table: Any, lengths: Any) -> None:
        """Put the tables of a decode pass by, before its first read and once more when it is over."""
        if step.extend or "tables" in step.extra or not step.rows:
            return
        rows = max(row.index for row in step.rows) + 1
        width = self._width(step.rows, buffer, table)
        before = step.job.take(table[:rows, :width].clone())
        length = step.job.take(lengths.reshape(-1)[:rows].clone())
        step.extra["tables"] = places = {"before": before, "lengths": length}
        stamp = self.recorder.stamp(None, step.line)

        def close() -> None:
            places["after"] = step.job.take(table[:rows, :width].clone())

        step.closing.append(close)
        step.parts.append(lambda step, arrays: self._compare(step, buffer, places, stamp, arrays))

    def _compare(
        self,
        step: Step,
        buffer: PoolBuffer,
        places: dict[str, int],
        stamp: StampTuple,
        arrays: list[npt.NDArray[Any]],
    ) -> None:
        """Record tables that differ from the last one recorded of their request."""
        rows_of_page = LAYOUTS[buffer.format].rows
        whole = {row.index for row in self.sampled(step)}
        for row in step.rows:
            rows = int(arrays[places["lengths"]][row.index])
            used = page_count(rows, rows_of_page)
            before = np.array(arrays[places["before"]][row.index, :used], np.int64)
            after = np.array(arrays[places["after"]][row.index, :used], np.int64)
            seen = self.steps.seen(row.held)
            if row.index in whole:
                seen.table = before
                continue
            same = np.array_equal(before, seen.table) and np.array_equal(before, after)
            if same or not rows:
                continue
            seen.table = before
            self.recorder.emit_at(
                Read(row.held.room, row.held.attempt, buffer.number, step.number, rows, before, after), stamp
            )


def _extent(table: Any) -> int:
    """Elements from the first to the last of a two-dimensional tensor in memory."""
    rows, columns = (int(n) for n in table.shape)
    return (rows - 1) * int(table.stride(0)) + (columns - 1) * int(table.stride(1)) + 1


def _bytes() -> Any:
    import torch

    return torch.uint8
