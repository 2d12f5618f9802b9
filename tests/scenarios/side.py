"""One process of a scene: its buffers as plain arrays, and the records it writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import layout
from tests.scenarios import pattern

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Keep = Literal["bytes", "digests"]

COVERS = ("store", "alloc", "send", "receive", "completion", "read", "top-k", "copy", "metadata")
SEEN_BY = {
    "store": "store",
    "alloc": "alloc",
    "free": "alloc",
    "send": "send",
    "receive": "receive",
    "transfer_state": "completion",
    "read": "read",
    "copy": "copy",
    "metadata": "metadata",
}
HEADS = 4
#: Bytes from the address of a layer's buffer to the next one's.
GAP = 1 << 33


@dataclass(slots=True)
class Job:
    """A request: the content of its rows is the pattern of ``q`` (of ``prefix_q`` below ``prefix_rows``)."""

    room: int
    q: int
    rows: int
    prefill: list[int]
    decode: list[int]
    attempt: int = 0
    prefix_q: int = -1
    prefix_rows: int = 0
    appended: int = 0

    @property
    def length(self) -> int:
        """Rows that exist on the decode side."""
        return self.rows + self.appended

    @property
    def key(self) -> str:
        return f"{self.room}.{self.attempt}"

    def logical(self, rows: int | None = None) -> list[int]:
        """The logical pages that ``rows`` rows (those of the prompt) take."""
        return list(range(-(-(self.rows if rows is None else rows) // pattern.ROWS)))


@dataclass(slots=True)
class Transfer:
    """A posted transfer: its pieces are (source layer, source byte, destination layer, destination byte, length)."""

    transfer: int
    job: Job
    logical: list[int]
    pieces: list[tuple[int, int, int, int, int]]
    begin_seq: int


@dataclass(slots=True)
class Side:
    """One process with its buffers; ``memory[layer]`` is ``uint8[pages, pitch]``."""

    role: str
    agent: str
    process: Any
    format: str
    layers: tuple[int, ...]
    pages: int
    base: int
    first_buffer: int
    keep: Keep
    drop: frozenset[str]
    item_length: int
    skew_ns: int = 0
    slab: int = 0
    memory: dict[int, U8] = field(default_factory=dict)
    clock: list[int] = field(default_factory=lambda: [0])
    seq: int = -1

    def __post_init__(self) -> None:
        page_bytes = layout(self.format).page_bytes
        for layer in self.layers:
            self.memory[layer] = np.zeros((self.pages, page_bytes), np.uint8)

    @property
    def pitch(self) -> int:
        """Bytes from a page to the next in the address space; ``memory`` holds the pages alone, without gaps."""
        return self.slab or layout(self.format).page_bytes

    def buffer(self, layer: int) -> int:
        return self.first_buffer + self.layers.index(layer)

    def address(self, layer: int) -> int:
        """Base address of a layer's buffer; the gaps between buffers belong to nobody."""
        return self.base + self.layers.index(layer) * GAP

    def find(self, address: int) -> tuple[int, int]:
        """Layer and byte offset in its memory of an address."""
        index, offset = divmod(address - self.base, GAP)
        page, inside = divmod(offset, self.pitch)
        return self.layers[index], page * layout(self.format).page_bytes + inside

    def emit(self, kind: str, *, tag: str = "", **fields: Any) -> int:
        """Write one record unless it is dropped; returns the sequence number of the last one written."""
        tag = tag or kind
        if self.drop & {tag, kind, f"{self.role}:{tag}"}:
            return self.seq
        self.clock[0] += 1000
        now = self.clock[0] + self.skew_ns
        stamp = {"begin_ns": now, "end_ns": now} | fields
        self.seq = int(getattr(self.process, kind)(**stamp))
        return self.seq

    def introduce(self, hooks: bool) -> None:
        """Registrations, buffers and hooks."""
        spec = layout(self.format)
        for layer in self.layers:
            self.emit(
                "registration",
                agent=self.agent,
                address=self.address(layer),
                length=self.pages * self.pitch,
            )
            self.emit(
                "buffer",
                buffer=self.buffer(layer),
                name="index_k",
                layer=layer,
                format=self.format,
                address=self.address(layer),
                pages=self.pages,
                pitch=self.pitch,
                item_length=self.item_length or spec.page_bytes,
                tokens_per_row=1,
            )
        missing = {SEEN_BY[name.rpartition(":")[2]] for name in self.drop if self._unseen(name)}
        if not hooks:
            return
        if not missing:
            self.process.hooks_complete()
            return
        for cover in COVERS:
            seen = cover not in missing
            self.emit(
                "hook",
                name=f"pair.{cover}",
                covers=cover,
                state="attached" if seen else "missing",
                complete=seen,
                fired=int(seen),
            )

    def _unseen(self, name: str) -> bool:
        role, _, kind = name.rpartition(":")
        return kind in SEEN_BY and role in ("", self.role)

    def write_rows(self, layer: int, slots: I64, values: U8, scales: U8) -> None:
        """Put rows into the memory of a layer."""
        spec = layout(self.format)
        page, row = np.divmod(slots, spec.rows)
        spec.values(self.memory[layer])[page, row] = values
        if spec.scale_bytes:
            spec.scales(self.memory[layer])[page, row] = scales

    def snapshot(
        self,
        stage: str,
        moment: str,
        job: Job,
        logical: Sequence[int],
        pages: Sequence[int],
        *,
        rows: int,
        layers: Iterable[int] | None = None,
        **fields: Any,
    ) -> None:
        """One snapshot record a layer, of the memory as it is now."""
        for layer in self.layers if layers is None else layers:
            data = self.memory[layer][list(pages)][:, : layout(self.format).page_bytes]
            seen: dict[str, Any] = {"data": data}
            if self.keep == "digests":
                found = digest_pages(layout(self.format), data)
                seen = {
                    "digests": found.digests,
                    "row_values": found.row_values,
                    "row_scales": found.row_scales,
                }
            self.emit(
                "snapshot",
                tag=f"{stage}.{moment}" if moment else stage,
                stage=stage,
                moment=moment,
                room=job.room,
                attempt=job.attempt,
                buffer=self.buffer(layer),
                logical=list(logical),
                pages=list(pages),
                rows=rows,
                **seen,
                **fields,
            )


def kernel(side: Side, layer: int, table: Sequence[int], rows: int, k: int = 512) -> dict[str, Any]:
    """What a right read kernel computes from the pages of ``table``: fields of a Read record."""
    from replay.kernels.reference import logits_reference

    spec = layout(side.format)
    dimensions = np.arange(HEADS * spec.head_dim, dtype=np.float32).reshape(HEADS, spec.head_dim)
    query = np.cos(dimensions * np.float32(0.37)).astype(np.float32)
    weights = np.linspace(0.5, 1.0, HEADS, dtype=np.float32)
    pages = side.memory[layer][list(table)]
    exact, _ = logits_reference(spec, pages, rows, query, weights)
    logits = exact.astype(np.float32)
    best = np.argsort(-logits, kind="stable")[:k]
    top_k = np.full(k, -1, np.int32)
    top_k[: len(best)] = best
    return {
        "k": k,
        "kernel": "reference",
        "query": query.ravel(),
        "weights": weights,
        "logits": logits,
        "top_k": top_k,
    }
