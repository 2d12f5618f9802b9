"""Small traces and journals for the tests of the trace format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from capture_hooks.events import Buffer, Clock, Process, Snapshot, Store
from capture_hooks.journal import JournalWriter
from capture_hooks.layouts import LAYOUTS
from capture_hooks.options import Options
from capture_hooks.records import Event
from replay.trace.builder import TraceBuilder
from replay.trace.reader import Trace
from replay.trace.schema import STAMPS, TABLES

PAGE_BYTES = LAYOUTS["fp8"].page_bytes


def pages(count: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random fp8 pages; pages of different seeds differ."""
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), dtype=np.uint8)


def small_trace(path: Path, role: str = "prefill", seed: int = 0, run: str = "") -> Path:
    """A trace with every kind of column in it."""
    data = pages(3, seed)
    with TraceBuilder(path) as builder:
        process = builder.process(role=role, run=run, engine="test", environment={"numpy": "2"})
        process.hooks_complete("store", "read")
        process.buffer(buffer=0, pages=16, address=1 << 40)
        process.request(room=7, rid="abc", tokens=700, rows=175, req_pool_idx=3, generation=2)
        process.alloc(room=7, pages=[5, 6, 7])
        process.store_params(params=0, norm_weight=np.linspace(0, 1, 128), epsilon=1e-5)
        process.store(
            room=7,
            buffer=0,
            slots=[320, 321],
            positions=[0, 4],
            keys=np.ones((2, 128)),
            rope=np.zeros((2, 64)),
        )
        process.snapshot(
            stage="ST", room=7, buffer=0, logical=[0, 1, 2], pages=[5, 6, 7], rows=175, data=data
        )
        process.snapshot(
            stage="SE", moment="before", room=7, buffer=0, logical=[0, 1], pages=[5, 6], data=data[:2]
        )
        process.send(transfer=1, room=7, source=[[1 << 40, 4], [1 << 41, 8]], destination=[[1, 4], [2, 8]])
        process.read(room=7, buffer=0, rows=175, table=[5, 6, 7], logits=np.arange(175), top_k=[3, 2, 1])
        process.loss(stage="ring", what="content", count=3, reason="the ring was full")
        process.order(what="queue", key="a", end="tail")
    return path


def journal(
    path: Path, role: str = "prefill", events: list[Event] | None = None, end: bool = True, seed: int = 0
) -> Path:
    """A journal with a buffer, ``events``, and a snapshot of two pages."""
    run = path.stem.rpartition("-")[2]
    writer = JournalWriter(path, Process(role=role, run=run), Options())
    writer.write(Buffer(buffer=0, pages=16))
    data = pages(2, seed)
    found = digest_pages(LAYOUTS["fp8"], data)
    for event in events or []:
        writer.write(event)
    writer.write(
        Snapshot(
            stage="ST",
            room=7,
            buffer=0,
            logical=np.arange(2),
            pages=np.array([5, 6]),
            digests=found.digests,
            row_values=found.row_values,
            row_scales=found.row_scales,
            data=data,
        )
    )
    writer.write(Store(room=7, buffer=0, slots=np.arange(128)))
    if end:
        writer.close()
    else:
        writer.flush()
        writer.abandon()
    return path


def everything(trace: Trace) -> dict[str, object]:
    """All that a trace says, as plain comparable values; contents by what they are, not by their index."""
    out: dict[str, object] = {"processes": [repr(process) for process in trace.processes]}
    contents = trace.contents
    known = []
    for index in range(len(contents)):
        rows = contents.row_values([index]).tobytes() + contents.row_scales([index]).tobytes()
        data = contents.data([index]).tobytes() if contents.has_data[index] else None
        known.append((contents.digests[index].tobytes(), int(contents.rows[index]), rows, data))
    for name, columns in TABLES.items():
        table = trace.table(name)
        for stamp, _ in STAMPS:
            out[f"{name}.{stamp}"] = table[stamp].tolist()
        for column in columns:
            key = f"{name}.{column.name}"
            if column.kind == "bulk":
                out[key] = [table.bulk(column.name, row).tolist() for row in range(len(table))]
            elif column.kind == "ragged":
                out[key] = [part.tolist() for part in table.ragged(column.name)]
            elif column.kind == "content":
                ragged = table.ragged(column.name)
                out[key] = [[known[index] if index >= 0 else None for index in part] for part in ragged]
            else:
                out[key] = table[column.name].tolist()
    return out


__all__ = ["PAGE_BYTES", "Clock", "everything", "journal", "pages", "small_trace"]
