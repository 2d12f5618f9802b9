"""Both sides of the simulated pair and who has which pages: allocation, prefixes, the cache and the host tier."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.host import HostTier
from benchmarks.accuracy.model import TOKENS_PER_ROW, Model
from benchmarks.accuracy.request import ROWS, Job, Shape
from benchmarks.accuracy.side import Recording, Side, Unit
from capture_hooks.layouts import layout
from replay.trace.builder import TraceBuilder

if TYPE_CHECKING:
    from benchmarks.accuracy.deed import Deed


class Pages:
    """One decode process with its prefill processes, and their pages."""

    deed: Deed

    def __init__(
        self,
        builder: TraceBuilder,
        seed: int,
        shape: Shape,
        recording: Recording,
        deed: Deed,
        *,
        rank: int = 0,
        clock: list[int] | None = None,
    ) -> None:
        self.rng = random.Random(f"{seed}.{rank}")
        self.shape, self.deed, self.recording = shape, deed, recording
        self.model = Model(seed, layout(shape.format), powers=shape.powers)
        self.clock = clock if clock is not None else [self.rng.randrange(10**9)]
        mode = "pages" if recording.bytes else "digest"
        told: dict[str, Any] = {"engine": "sim", "mode": mode, "transport": "sim", "host": "5a0c"}
        every = list(range(shape.layers))
        per = -(-shape.layers // shape.stages)

        def side(role: str, number: int, layers: Sequence[int], **how: Any) -> Side:
            units: tuple[Unit, ...] = tuple((name, layer) for name in shape.components for layer in layers)
            base = (0x7000 if role == "prefill" else 0x7400) + 16 * number
            return Side(
                role=role,
                rank=number,
                process=builder.process(role=role, rank=number, run=f"{role[0]}{number}", **told),
                units=units,
                format=shape.format,
                base=(base << 32) + self.rng.randrange(1 << 12) * 4096,
                first_buffer=100 * (role == "decode"),
                rng=random.Random(f"{seed}.{rank}.{role}.{number}"),
                recording=recording,
                lifo=shape.lifo,
                clock=self.clock,
                **how,
            )

        self.prefills = [
            side(
                "prefill",
                (rank * shape.stages + n) * shape.ranks + r,
                [
                    *every[n * per : (n + 1) * per],
                    *([90 + i for i in range(shape.prefill_only)] if n == 0 else []),
                ],
                pages=shape.prefill_pages,
            )
            for n in range(shape.stages)
            for r in range(shape.ranks)
        ]
        self.decode = side(
            "decode",
            rank,
            [*every, *(80 + i for i in range(shape.decode_only))],
            pages=shape.decode_pages,
            pitch=shape.pitch,
        )
        self.sides = (*self.prefills, self.decode)
        self.jobs: list[Job] = []
        self.cache: list[Job] = []
        self.host = HostTier(self)
        self.slots = list(range(1, 40))
        self.active: list[Iterator[None]] = []
        self.waiting: list[Job] = []
        self._transfer = 0
        self._step = 0
        self._mapping = 0
        self.wire = 1 if recording.threads else 0
        self._params()

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def _params(self) -> None:
        if self.keeps_inputs:
            for side in self.sides:
                side.emit("store_params", params=0, norm_weight=self.model.norm_weight)

    @property
    def keeps_inputs(self) -> bool:
        """Store inputs are recorded; scales that are rounded to powers of two have no reference to compare with."""
        return self.recording.bytes and not (self.shape.powers and self.shape.format == "fp8")

    def owners(self, side: Side, page: int) -> list[Job]:
        """Requests that hold a page of a side now."""
        return [
            job
            for job in self.jobs
            if (side.agent not in job.over | job.gone or (side is not self.decode and job in self.cache))
            and page in job.pages.get(side.agent, ())
        ]

    def layer_key(self, unit: Unit) -> int:
        return unit[1] + 1000 * self.shape.components.index(unit[0])

    def start(self, job: Job) -> bool:
        """Both sides learn of the request and give it pages; False where they have too few."""
        self.deed.starting(self, job)
        if job.again and job.parent is None:
            self._continue(job)
        parent = job.parent
        count = -(-job.rows // ROWS)
        if parent is not None and not (parent.stored and parent.rows >= ROWS):
            parent = job.parent = None
            job.prefix_rows = 0
        if parent is not None:
            job.prefix_rows = min(job.prefix_rows, parent.rows // ROWS * ROWS, (job.rows - 1) // ROWS * ROWS)
        whole = job.prefix_rows // ROWS
        plan: list[tuple[Side, list[int], int]] = []
        for side in self.sides:
            shared: list[int] = []
            if parent is not None and whole and self.deed.shareable(self, side, job, parent):
                shared = parent.pages[side.agent][:whole]
            side.hold(shared)
            own = side.take(count - len(shared))
            if own is None:
                side.drop(shared)
                for other, taken, _ in plan:
                    other.drop(taken)
                return False
            plan.append((side, shared + own, len(shared)))
        for side, pages, shared_count in plan:
            job.pages[side.agent], job.shared[side.agent] = list(pages), shared_count
        if parent is not None and whole and not self._all_shared(job) and not self._on_host(job, whole):
            job.parent, job.prefix_rows = None, 0
            self._unshare(job)
        for side in self.sides:
            told = {"tokens": job.rows * TOKENS_PER_ROW, "rows": job.rows, "mark": job.mark}
            side.emit("request", phase="start", rid=f"{job.room:016x}", **job.who, **told)
            split = job.shared[side.agent]
            pages = job.pages[side.agent]
            if split:
                side.emit("alloc", pages=pages[:split], shared=True, **job.who)
            if pages[split:]:
                side.emit("alloc", logical=split, pages=pages[split:], **job.who)
            count = job.loaded.get(side.agent, 0)
            if count and job.parent is not None:
                self.host.load_back(side, job, job.parent.key, count)
                pages = job.pages[side.agent][:count]
                side.look("ST", "copied", logical=range(count), pages=pages, rows=job.prefix_rows, **job.who)
        self._translate(job)
        return True

    def _continue(self, job: Job) -> None:
        """Let a request go on from a text whose pages are still there, on the device or in the host tier."""
        kept = self.host.texts()
        known = [
            other
            for other in self.jobs
            if other.stored
            and ROWS <= other.rows <= 6 * ROWS
            and (other in self.cache or other.key in kept or not other.over)
        ]
        if known:
            job.parent = self.rng.choice(known[-12:])
            job.prefix_rows = job.parent.rows // ROWS * ROWS
            job.rows = job.prefix_rows + job.again

    def _all_shared(self, job: Job) -> bool:
        return all(job.shared[side.agent] for side in self.prefills)

    def _unshare(self, job: Job) -> None:
        """The prefix is on no prefill side whole: the request computes everything itself, in pages of its own."""
        for side in self.sides:
            split = job.shared[side.agent]
            if split:
                fresh = side.take(split)
                assert fresh is not None, "the pool is sized for it"
                side.drop(job.pages[side.agent][:split])
                job.pages[side.agent][:split] = fresh
                job.shared[side.agent] = 0

    def shareable(self, side: Side, parent: Job) -> bool:
        """Whether the parent's pages are still there, whole and its own."""
        if side is self.decode:
            return self.shape.shares and parent.arrived and side.agent not in parent.over | parent.gone
        return side.agent not in parent.over or parent in self.cache

    def _on_host(self, job: Job, whole: int) -> bool:
        parent = job.parent
        if parent is None or not self.shape.host_tier:
            return False
        for side in self.prefills:
            if job.shared[side.agent]:
                continue
            if not self.host.has(side, parent.key, whole):
                return False
            job.loaded[side.agent] = whole
        return True

    def _translate(self, job: Job) -> None:
        """The decode side makes its slot translation for the request."""
        if self.shape.mapping:
            self._mapping += 1
            job.mapping = self._mapping
            self.decode.emit("mapping", version=job.mapping, pages=job.pages[self.decode.agent], **job.who)

    def evict(self) -> bool:
        """The oldest cached pages go; False where nothing is cached."""
        if not self.cache:
            return False
        job = self.cache.pop(0)
        for side in self.prefills:
            if self.shape.host_tier:
                self.host.offload(side, job, job.rows // ROWS)
            back = side.drop(job.pages[side.agent])
            side.emit("free", pages=back, reason="evict", **job.who)
        return True

    def edge(self, before: Side, after: Side | Sequence[Side], what: str, key: str) -> None:
        """An edge of the protocol; the wire has threads of its own where the engine has."""
        heads = [after] if isinstance(after, Side) else list(after)
        if before.role == "decode":
            before.hand(0, self.wire)
        before.emit("order", what=what, key=key, end="tail", thread=self.wire)
        for side in heads:
            side.emit("order", what=what, key=key, end="head", thread=self.wire)
            side.hand(self.wire, 0)
