"""The store: which rows the fused kernel wrote, and for some requests what it was given.

On NVIDIA one kernel normalises, rotates, transforms, quantises and scatters the keys: the hook is on the
function that launches it. It is used for the latent cache too (rows of 512), which is left alone. Which rows
it writes stands in a plan on the device (``plans.py``): plan and slots are taken once a pass, inputs only
where they are kept, and all of it is worked out when it has arrived on the host.

Every other way into the buffers is a tripwire: a pool setter, a gather into host memory and back, a release
of the memory. A call of one closes the rung: the hook on the store is not complete from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.plans import Span, written_rows
from capture_hooks.adapters.sglang.steps import Row, Step, Steps
from capture_hooks.adapters.sglang.versions import Target, at
from capture_hooks.events import Store, StoreParams

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session

_COMPRESSOR = "layers.attention.dsv4.compressor_v2"
_POOL = "mem_cache.deepseek_v4_memory_pool"
_SETTERS = ("set_index_k_fused", "set_index_k_fp4", "set_index_k_scale_buffer")

HOOKS: tuple[Target, ...] = (
    Target("store", "store", at(_COMPRESSOR, "compress_norm_rope_store"), takes=("kv", "plan")),
    Target(
        "store_layer",
        "store",
        at(_COMPRESSOR, "CompressorBackendMixin.forward_indexer_compressor"),
        takes=("forward_batch", "layer_id"),
    ),
    *(
        Target(f"setter_{name}", "other writers", at(_POOL, f"DeepSeekV4TokenToKVPool.{name}"))
        for name in _SETTERS
    ),
)

#: Arguments of a server that bring writers which are not hooked.
_OTHERS = {
    "enable_hierarchical_cache": "pages loaded back from the host",
    "enable_memory_saver": "memory that is released and resumed",
    "enable_hisparse": "pages swapped in from the host",
}
#: Elements of a row of index-K; rows of the latent cache have more.
_HEAD_DIM = 128
_ROPE_DIM = 64


def install(session: Session) -> None:
    """Hook the store and the tripwires."""
    hooks = StoreHooks(session, session.steps)
    session.patches.wrap("store", around=hooks.store)
    session.patches.wrap("store_layer", around=hooks.layer)
    for name in _SETTERS:
        session.patches.wrap(f"setter_{name}", before=hooks.tripwire(name))


class StoreHooks:
    """Hooks on the store of one process."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.recorder = session.recorder
        self._params: set[int] = set()  # buffers whose constants were told
        self._whole = True
        steps.on_unseen.append(self.incomplete)
        steps.on_runner.append(self.look_for_others)

    def incomplete(self, why: str) -> None:
        """The hooks do not see every store any more."""
        if self._whole:
            self._whole = False
            self.recorder.hook("sglang.store", "store", "attached", False, why)

    def look_for_others(self, runner: Any) -> None:
        """Writers that no hook sees and that this server may use, by its arguments."""
        arguments = getattr(runner, "server_args", None)
        for name, what in _OTHERS.items():
            if getattr(arguments, name, False):
                self.incomplete(f"{what} may write past the hook on the store ({name})")

    def tripwire(self, name: str) -> Callable[..., None]:
        """The body of a hook on another way into the buffers."""

        def tripped(*_: Any, **__: Any) -> None:
            self.incomplete(f"{name} was called: it writes past the hook on the store")

        return tripped

    def layer(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Around the compressor of one layer: it must come to the hooked store."""
        step = self.steps.now
        before = len(step.stores) if step is not None else 0
        found = original(*args, **keywords)
        if step is not None:
            with self.recorder.guard("sglang.store_layer"):
                # One function serves the indexer and the latent cache, under several names.
                compressor = keywords.get("compressor", args[-1] if args else None)
                if getattr(compressor, "is_in_indexer", False) and len(step.stores) == before:
                    self.incomplete("a layer was stored by a function that is not hooked")
        return found

    def store(self, original: Callable[..., Any], kv: Any, plan: Any, *args: Any, **keywords: Any) -> Any:
        """Around the launch of the fused store."""
        mark = self.recorder.mark()
        found = original(kv, plan, *args, **keywords)
        step = self.steps.now
        if step is not None:
            with self.recorder.guard("sglang.store"):
                if kv.shape[-1] == _HEAD_DIM:
                    self._stored(step, kv, plan, keywords, mark)
        return found

    def _stored(self, step: Step, kv: Any, plan: Any, given: dict[str, Any], mark: Any) -> None:
        buffer = self.session.buffers.of_address(int(given["kvcache"].data_ptr()))
        if buffer is None or not buffer.judged:
            self.incomplete("a store into a buffer that is not in the inventory")
            return
        step.stores.add(buffer.number)
        ratio, decode = int(plan.compress_ratio), bool(plan.is_decode)
        at_plan = step.take_once("plan", plan[1])
        at_slots = step.take_once("slots", given["out_loc"])
        kept = [row for row in step.rows if self._kept(row)]
        at_keys = at_rope = at_weight = -1
        if kept and len(kv):
            at_keys = step.job.take(kv.float())
            at_rope = self._rope(step, plan, given["freq_cis"], ratio)
            if buffer.number not in self._params:
                self._params.add(buffer.number)
                at_weight = step.job.take(given["norm_weight"].float())
        epsilon = float(given["norm_eps"])
        stamp = self.recorder.stamp(mark, step.line)

        def finish(step: Step, arrays: list[npt.NDArray[Any]]) -> None:
            if at_weight >= 0:
                weight = np.array(arrays[at_weight], np.float32)
                self.recorder.emit_at(StoreParams(buffer.number, weight, epsilon, _ROPE_DIM), stamp)
            written = _rows(step, arrays, at_plan, at_slots, decode, ratio)
            for row in step.rows:
                mine = written.of(row.index)
                if not len(mine.row):
                    continue
                inputs: dict[str, Any] = {}
                # The angles were taken at the position that the plan names: they are the right ones only
                # where it is right.
                if at_keys >= 0 and self._kept(row) and np.array_equal(mine.position, mine.row * ratio):
                    inputs = {"keys": arrays[at_keys][mine.plan], "rope": arrays[at_rope][mine.plan]}
                self.recorder.emit_at(
                    Store(
                        row.held.room, row.held.attempt, buffer.number, step.number, buffer.number, mine.slot,
                        mine.position, mine.row, **inputs,
                    ),
                    stamp,
                )  # fmt: skip

        step.parts.append(finish)

    def _rope(self, step: Step, plan: Any, freq_cis: Any, ratio: int) -> int:
        """(cos, sin) of each pair at the position of each row of the plan: float32[n, 64]; taken once a
        pass.
        """
        key = ("rope", int(plan[1].data_ptr()), int(freq_cis.data_ptr()))
        if key not in step.once:
            import torch

            table = torch.view_as_real(freq_cis).flatten(-2)
            words = plan[1].view(torch.int32)
            position = (words[:, 0].long() - ratio).clamp(0, table.shape[0] - 1)
            step.once[key] = step.job.take(table.index_select(0, position).float())
        return step.once[key]

    def _kept(self, row: Row) -> bool:
        """Whether the inputs of this request's stores are kept."""
        options = self.recorder.options
        if not options.tap("store"):
            return False
        return options.mode == "full" or (
            options.mode == "pages" and row.held.room % options.store_every == 0
        )


def _rows(
    step: Step, arrays: list[npt.NDArray[Any]], at_plan: int, at_slots: int, decode: bool, ratio: int
) -> Any:
    """Rows written by a plan, worked out once for all layers that share it."""
    key = ("rows", at_plan, at_slots)
    if key not in step.extra:
        spans = [Span(row.index, row.start, row.before, row.length) for row in step.rows]
        step.extra[key] = written_rows(
            arrays[at_plan],
            np.array(arrays[at_slots], np.int64).reshape(-1),
            spans,
            decode=decode,
            ratio=ratio,
        )
    return step.extra[key]
