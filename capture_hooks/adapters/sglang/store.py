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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.adapters.sglang.patch import hook_name
from capture_hooks.adapters.sglang.plans import Span, Written, written_rows
from capture_hooks.adapters.sglang.step import Row, Step
from capture_hooks.adapters.sglang.steps import Steps
from capture_hooks.adapters.sglang.versions import REPLACED, Target, at
from capture_hooks.codec import StampTuple
from capture_hooks.events import Store, StoreParams

if TYPE_CHECKING:
    from capture_hooks.adapters.sglang.session import Session
    from capture_hooks.taps.graphs import GraphPlaces

_COMPRESSOR = "layers.attention.dsv4.compressor_v2"
_POOL = "mem_cache.deepseek_v4_memory_pool"
_SETTERS = ("set_index_k_fused", "set_index_k_fp4", "set_index_k_scale_buffer")
#: Kernels that write keys of the low compress ratios (fp4), each in its module.
_PACKERS = {"index_k_norm_rope_pack_store": "fp4_indexer_rope", "index_k_rope_pack": "fp4_indexer"}

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
    *(
        Target(
            f"setter_{name}",
            "other writers",
            {"0.5.23": f"sglang.kernels.ops.attention.dsv4.{module}:{name}"},
            takes=("cache",),
        )
        for name, module in _PACKERS.items()
    ),
)

#: Arguments of a server that bring writers which are not hooked.
OTHERS = {
    "enable_hierarchical_cache": "pages loaded back from the host",
    "enable_memory_saver": "memory that is released and resumed",
    "enable_hisparse": "pages swapped in from the host",
    "enable_lmcache": "pages loaded by LMCache",
    "enable_unified_cache_external_linker": "pages loaded from another store",
    "disaggregation_decode_enable_offload_kvcache": "pages loaded back from where decode put them",
    REPLACED: "another plug-in's kernels",
}
_UNCOPIED = "a CUDA graph was replayed whose stores are not copied out of it"
_CACHE_PLACE = 6  #: place of ``cache`` among what ``index_k_norm_rope_pack_store`` is given
#: Elements of a row of index-K; rows of the latent cache have more.
_HEAD_DIM = 128
_ROPE_DIM = 64


def install(session: Session) -> None:
    """Hook the store and the tripwires."""
    hooks = session.stores = StoreHooks(session, session.steps)
    session.patches.wrap("store", around=hooks.store)
    session.patches.wrap("store_layer", around=hooks.layer)
    for name in _SETTERS:
        session.patches.wrap(f"setter_{name}", before=hooks.tripwire(name))
    for name in _PACKERS:
        session.patches.wrap(f"setter_{name}", before=hooks.packs(name))


class StoreHooks:
    """Hooks on the store of one process."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.recorder = session.recorder
        self._params: set[int] = set()  # buffers whose constants were told
        self._whole = True
        self._graphs: GraphPlaces | None = None
        steps.on_unseen.append(self.incomplete)
        steps.on_begin.append(self.begins)
        steps.on_graph.append(self.replayed)
        steps.on_runner.append(self.look_for_others)

    def incomplete(self, why: str) -> None:
        """The hooks do not see every store any more."""
        if self._whole:
            self._whole = False
            self.recorder.incomplete(hook_name("store"), why)

    def look_for_others(self, runner: Any) -> None:
        """Writers that no hook sees and that this server may use, by its arguments."""
        arguments = getattr(runner, "server_args", None)
        for name, what in OTHERS.items():
            if getattr(arguments, name, False):
                self.incomplete(f"{what} may write past the hook on the store ({name})")

    def tripwire(self, name: str) -> Callable[..., None]:
        """The body of a hook on another way into the buffers."""

        def tripped(*_: Any, **__: Any) -> None:
            self.incomplete(f"{name} was called: it writes past the hook on the store")

        return tripped

    def packs(self, name: str) -> Callable[..., None]:
        """The body of a hook on a kernel of the low compress ratios, which writes where it is given a cache."""
        tripped = self.tripwire(name)

        def packing(*args: Any, cache: Any = None, **_: Any) -> None:
            if cache is not None or len(args) > _CACHE_PLACE:
                tripped()

        return packing

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
        with self.recorder.guard("sglang.store"):
            if kv.shape[-1] == _HEAD_DIM:
                step = self.steps.now
                if step is not None:
                    self._stored(step, kv, plan, keywords, self.recorder.stamp(mark, step.line))
                else:
                    self._unfollowed(kv, plan, keywords)
        return found

    # -- a pass that runs Python ---------------------------------------------------------------------------------

    def _stored(self, step: Step, kv: Any, plan: Any, given: dict[str, Any], stamp: StampTuple) -> None:
        buffer = self.session.buffers.of_address(int(given["kvcache"].data_ptr()))
        if buffer is None or not buffer.judged:
            self.incomplete("a store into a buffer that is not in the inventory")
            return
        about = _about(plan, given)
        at_plan = step.take_once("plan", plan[1])
        at_slots = step.take_once("slots", given["out_loc"])
        self._take(step, buffer.number, kv, plan[1], about, at_plan, at_slots, stamp)

    def _take(
        self, step: Step, number: int, kv: Any, rows: Any, about: _About, at_plan: int, at_slots: int, stamp: StampTuple
    ) -> None:  # fmt: skip
        """Put by what one store was given, where it is kept; the record is made when it has arrived."""
        step.stores.add(number)
        at_keys = at_rope = at_weight = -1
        if any(self._kept(row) for row in step.rows) and len(kv):
            at_keys = step.job.take(kv.float())
            at_rope = _rope(step, rows, about)
            if number not in self._params:
                self._params.add(number)
                at_weight = step.job.take(about.weight.float())

        def finish(step: Step, arrays: list[npt.NDArray[Any]]) -> None:
            if at_weight >= 0:
                weight = np.array(arrays[at_weight], np.float32)
                self.recorder.emit_at(StoreParams(number, weight, about.epsilon, _ROPE_DIM), stamp)
            written = _rows(step, arrays, at_plan, at_slots, about)
            for row in step.rows:
                mine = written.of(row.index)
                if not len(mine.row):
                    continue
                inputs: dict[str, Any] = {}
                # The angles were taken at the position that the plan names: they are the right ones only
                # where it is right.
                right = np.array_equal(mine.position, mine.row * about.ratio)
                if at_keys >= 0 and self._kept(row) and right:
                    inputs = {"keys": arrays[at_keys][mine.plan], "rope": arrays[at_rope][mine.plan]}
                self.recorder.emit_at(
                    Store(
                        row.held.room, row.held.attempt, number, step.number, number, mine.slot,
                        mine.position, mine.row, **inputs,
                    ),
                    stamp,
                )  # fmt: skip

        step.parts.append(finish)

    # -- a pass that replays a graph -----------------------------------------------------------------------------

    def _unfollowed(self, kv: Any, plan: Any, given: dict[str, Any]) -> None:
        """A warm-up makes room for what a graph of decode steps will be given; its capture has it copied there."""
        if not plan.is_decode or not self.recorder.options.tap("store"):
            return
        buffer = self.session.buffers.of_address(int(given["kvcache"].data_ptr()))
        if buffer is None or not buffer.judged:
            return
        if self._graphs is None:
            from capture_hooks.taps.graphs import GraphPlaces

            self._graphs = GraphPlaces(kv.device)
        parts = {"kv": kv, "plan": plan[1], "slots": given["out_loc"]}
        if not self._graphs.capturing():
            self._graphs.reserve(buffer.number, parts)
            return
        self._graphs.put(buffer.number, parts, _about(plan, given))

    def begins(self, step: Step) -> None:
        """A pass begins: the counters of graphs before it."""
        if self._graphs is not None and self._graphs.captured:
            step.extra["graphs before"] = step.job.take(self._graphs.counters())

    def replayed(self, step: Step) -> None:
        """The pass has replayed a graph: take what the graph has copied, behind it on its stream."""
        if self._graphs is None or "graphs before" not in step.extra:
            self.incomplete(_UNCOPIED)
            return
        places = {number: place for number, place in self._graphs.places.items() if place.about is not None}
        if set(places) < {buffer.number for buffer in self.session.buffers.judged}:
            self.incomplete(_UNCOPIED)
            return
        at_before, at_after = step.extra["graphs before"], step.job.take(self._graphs.counters())

        def check(step: Step, arrays: list[npt.NDArray[Any]]) -> None:
            if (arrays[at_after] - arrays[at_before] != 1).any():
                step.extra["graphs"] = "not copied"
                self.incomplete(_UNCOPIED)

        step.parts.append(check)
        count = 1 + max(row.index for row in step.rows)
        stamp = self.recorder.stamp(None, step.line)
        for number, place in places.items():
            kv, rows, slots = (place.parts[name][:count] for name in ("kv", "plan", "slots"))
            self._take(step, number, kv, rows, place.about, step.job.take(rows), step.job.take(slots), stamp)

    # -- what is kept --------------------------------------------------------------------------------------------

    def _kept(self, row: Row) -> bool:
        """Whether the inputs of this request's stores are kept."""
        options = self.recorder.options
        if not options.tap("store"):
            return False
        return options.mode == "full" or (
            options.mode == "pages" and row.held.room % options.store_every == 0
        )


@dataclass(frozen=True, slots=True)
class _About:
    """What a store is given beside its tensors of one pass: ``freq_cis`` and ``weight`` outlive it."""

    ratio: int
    decode: bool
    freq_cis: Any
    weight: Any
    epsilon: float


def _about(plan: Any, given: dict[str, Any]) -> _About:
    return _About(
        int(plan.compress_ratio), bool(plan.is_decode), given["freq_cis"], given["norm_weight"],
        float(given["norm_eps"]),
    )  # fmt: skip


def _rope(step: Step, rows: Any, about: _About) -> int:
    """(cos, sin) of each pair at the position of each row of the plan: float32[n, 64]; taken once a pass."""
    key = ("rope", int(rows.data_ptr()), int(about.freq_cis.data_ptr()))
    if key not in step.once:
        import torch

        table = torch.view_as_real(about.freq_cis).flatten(-2)
        position = (rows.view(torch.int32)[:, 0].long() - about.ratio).clamp(0, table.shape[0] - 1)
        step.once[key] = step.job.take(table.index_select(0, position).float())
    return step.once[key]


def _rows(step: Step, arrays: list[npt.NDArray[Any]], at_plan: int, at_slots: int, about: _About) -> Written:
    """Rows written by a plan, worked out once for all layers that share it."""
    if step.extra.get("graphs") == "not copied":
        return Written(*(np.zeros(0, np.int64) for _ in Written.__slots__))
    key = ("rows", at_plan, at_slots)
    if key not in step.extra:
        spans = [Span(row.index, row.start, row.before, row.length) for row in step.rows]
        step.extra[key] = written_rows(
            arrays[at_plan],
            np.array(arrays[at_slots], np.int64).reshape(-1),
            spans,
            decode=about.decode,
            ratio=about.ratio,
        )
    found: Written = step.extra[key]
    return found
