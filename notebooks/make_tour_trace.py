"""Writes ``tour.h5``, the trace of ``tour.py``: a page is torn when decode is told that it is there.

    python notebooks/make_tour_trace.py

Made by hand with ``TraceBuilder`` from random bytes: no engine, no model and no prompt stand behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from replay.trace.builder import ProcessBuilder, TraceBuilder

PAGE, ROWS, LAYERS, POOL = 8448, 64, (0, 1), 64


def page_bytes(rng: np.random.Generator, count: int) -> np.ndarray:
    """fp8 pages: 64 rows of 128 value bytes, then 64 fp32 scales near 0.01."""
    pages = rng.integers(1, 120, (count, PAGE), np.uint8)
    scales = (0.01 * (1 + rng.random((count, ROWS)))).astype("<f4")
    pages[:, ROWS * 128 :] = scales.view(np.uint8)
    return pages


def serve(
    trace: TraceBuilder,
    sides: tuple[ProcessBuilder, ProcessBuilder],
    room: int,
    places: tuple[list[int], list[int]],
    rows: int,
    data: dict[int, np.ndarray],
    old: dict[int, np.ndarray] | None = None,
    torn: dict[int, np.ndarray] | None = None,
) -> None:
    """One request from start to end. ``old`` lay at the destination before; ``torn``: what lies there if told early."""
    (prefill, decode), (source, target) = sides, places
    logical = list(range(len(source)))
    for side, pages in zip(sides, places, strict=True):
        side.request(room=room, tokens=4 * rows, rows=rows)
        side.alloc(room=room, pages=pages)
    for layer in LAYERS:
        before = np.zeros_like(data[layer]) if old is None else old[layer]
        told = {"room": room, "logical": logical, "rows": rows, "pages": target, "data": before}
        decode.snapshot(stage="RC", moment="before", buffer=layer, **told)
    decode.receive(room=room, pages=target, buffers=LAYERS, item_lengths=[PAGE] * len(LAYERS))
    trace.edge(decode, prefill, "announce", f"{room}.0")
    slots = (np.array(source)[:, None] * ROWS + np.arange(ROWS)).reshape(-1)[:rows]
    told = {"room": room, "logical": logical, "rows": rows}
    for layer in LAYERS:
        first = room * 10 + layer
        base = (layer + 1) << 32
        prefill.store(
            room=room, buffer=layer, step=room, slots=slots, positions=range(rows), logical_rows=range(rows)
        )
        prefill.snapshot(stage="ST", buffer=layer, step=room, pages=source, data=data[layer], **told)
        sent = {"buffer": layer, "transfer": first, "pages": source, "data": data[layer], **told}
        prefill.snapshot(stage="SE", moment="before", **sent)
        prefill.send(
            transfer=first, room=room, last=True, logical=0, pages=source, destination_pages=target, written=1,
            item_lengths=[PAGE], source=[[base + page * PAGE, PAGE] for page in source],
            destination=[[base + page * PAGE, PAGE] for page in target],
        )  # fmt: skip
    at_completion = torn or data
    if not torn:
        finish(prefill, room, source, data, told)
    trace.edge(prefill, decode, "status", f"{room}.0")
    decode.transfer_state(state="arrived", room=room)
    decode.request(room=room, phase="arrived", rows=rows)
    for layer in LAYERS:
        decode.snapshot(stage="RC", buffer=layer, pages=target, data=at_completion[layer], **told)
    for layer in LAYERS:
        look = {"buffer": layer, "step": room, "pages": target, "data": at_completion[layer], **told}
        decode.snapshot(stage="RD", moment="before", **look)
        decode.read(room=room, buffer=layer, step=room, rows=rows, table=target, table_after=target)
        decode.snapshot(stage="RD", moment="after", **look)
    if torn:
        finish(prefill, room, source, data, told)
    for layer in LAYERS:
        decode.snapshot(stage="LT", buffer=layer, pages=target, data=data[layer], **told)
    for side, pages in zip(sides, places, strict=True):
        side.request(room=room, phase="finish")
        side.free(room=room, pages=pages, reason="finish")


def finish(
    prefill: ProcessBuilder, room: int, source: list[int], data: dict[int, np.ndarray], told: dict[str, Any]
) -> None:
    """The sender sees its transfers done and looks at the source once more."""
    for layer in LAYERS:
        transfer = room * 10 + layer
        prefill.transfer_state(state="done", transfer=transfer, room=room)
        prefill.snapshot(
            stage="SE",
            moment="after",
            buffer=layer,
            transfer=transfer,
            pages=source,
            data=data[layer],
            **told,
        )


def main(path: Path) -> None:
    """Write the trace to ``path``."""
    rng = np.random.default_rng(7)
    with TraceBuilder(path, replace=True) as trace:
        sides = (
            trace.process(role="prefill", engine="by hand"),
            trace.process(role="decode", engine="by hand"),
        )
        for side in sides:
            side.hooks_complete()
            for layer in LAYERS:
                side.buffer(buffer=layer, layer=layer, pages=POOL, address=(layer + 1) << 32)
        earlier = {layer: page_bytes(rng, 2) for layer in LAYERS}
        serve(trace, sides, 11, ([3, 4], [21, 22]), 128, earlier)
        data = {layer: page_bytes(rng, 2) for layer in LAYERS}
        torn = {layer: pages.copy() for layer, pages in data.items()}
        for layer in LAYERS:
            torn[layer][1, 4096:] = earlier[layer][1, 4096:]  # the second half still is the earlier request's
        serve(trace, sides, 12, ([7, 8], [21, 22]), 128, data, earlier, torn)
        more = {layer: page_bytes(rng, 1) for layer in LAYERS}
        serve(trace, sides, 13, ([5], [30]), 50, more)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("tour.h5")))
