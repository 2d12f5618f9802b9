"""How long `replay` takes for a trace that keeps its page bytes, beside reading these bytes once.

    python benchmarks/stream_trace.py --gigabytes 1 --work build/stream
    python benchmarks/stream_trace.py --gigabytes 10 --work /var/tmp/stream

Builds the trace (kept in the work folder), then in turn and in fresh processes: ``replay TRACE --json``, our reader
decoding every blob of page bytes once, and ``cat TRACE > /dev/null``. Prints times, ratios with their spread, and the
peak resident memory of the verdict. ``--cold`` asks the kernel to drop the file from its cache before each run.

Exit code 1: the verdict is not what was built into the trace, it took more memory than ``BAR_BYTES``, or one of the
others failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from fresh_process import timed  # beside this script

BAR_BYTES = 2_000_000_000
REPLAY = "from replay.cli import main; main()"

PAGES, LAYERS, ROWS = 12, 8, 64
PAGE_BYTES = 8448
#: Pages of one request in all layers, in bytes.
REQUEST_BYTES = PAGES * LAYERS * PAGE_BYTES
#: One request in so many has store inputs in one layer, and queries and logits in all.
SAMPLED = 64
#: Requests on whose pages a later one lives: each physical page is used again and again.
SLOTS = 60
FIRST_ROOM = 10_000


def build(path: Path, gigabytes: float) -> dict[str, Any]:
    """Write the trace: honest requests one after the other, and one whose page 3 of layer 2 arrives late."""
    import numpy as np
    import torch

    from capture_hooks.digest import digest_pages
    from capture_hooks.layouts import layout
    from replay.kernels.reference import logits_reference, rope_rows
    from replay.kernels.twins import store_torch
    from replay.trace.builder import TraceBuilder

    spec = layout("fp8")
    rng = np.random.default_rng(5)
    requests = max(4, round(gigabytes * 1e9 / REQUEST_BYTES))
    codes = _normal_codes(np)
    weight = np.ones(128, np.float32)
    heads = 16
    query = rng.standard_normal(heads * 128).astype(np.float32)
    weights = np.linspace(0.5, 1.0, heads, dtype=np.float32)
    pool = SLOTS * PAGES
    odd = requests // 2
    with TraceBuilder(path, replace=True) as builder:
        prefill = builder.process(role="prefill", run="p", host="h", engine="bench", mode="pages")
        decode = builder.process(role="decode", run="d", host="h", engine="bench", mode="pages")
        for number, side in enumerate((prefill, decode)):
            side.registration(agent=f"agent-{number}", address=(number + 1) << 40, length=1 << 39)
            for layer in range(LAYERS):
                address = ((number + 1) << 40) + (layer << 36)
                side.buffer(buffer=layer, layer=layer, pages=pool, address=address)
            side.hooks_complete()
        prefill.store_params(params=1, norm_weight=weight, epsilon=1e-6)
        old: list[Any] = [None] * SLOTS
        for number in range(requests):
            room, slot = FIRST_ROOM + number, number % SLOTS
            key = f"{room}.0"
            pages = np.arange(slot * PAGES, (slot + 1) * PAGES)
            logical = np.arange(PAGES)
            rows = PAGES * ROWS - number % ROWS
            sampled = number % SAMPLED == 0
            data = codes[rng.integers(0, 256, (LAYERS * PAGES, PAGE_BYTES), np.uint8)]
            scales = spec.scales(data)
            scales[:] = (
                rng.uniform(0.5, 2.0, (len(data), ROWS)).astype("<f4").view(np.uint8).reshape(scales.shape)
            )
            data = data.reshape(LAYERS, PAGES, PAGE_BYTES)
            inputs: dict[str, Any] = {}
            if sampled:
                keys = rng.standard_normal((rows, 128)).astype(np.float32)
                rope = rope_rows(np.arange(rows))
                arrays = (np.arange(rows), keys, rope, weight)
                store_torch(spec, torch.from_numpy(data[0]), *map(torch.from_numpy, arrays), 1e-6)
                inputs = {"keys": keys, "rope": rope, "params": 1}
            found = digest_pages(spec, data.reshape(-1, PAGE_BYTES))

            def seen(layer: int, of: Any = found) -> dict[str, Any]:
                part = slice(layer * PAGES, (layer + 1) * PAGES)
                return {
                    "digests": of.digests[part], "row_values": of.row_values[part], "row_scales": of.row_scales[part],
                }  # fmt: skip

            common = {"room": room, "logical": logical, "pages": pages}
            for side in (prefill, decode):
                side.request(room=room, phase="start", tokens=rows, rows=rows)
                side.alloc(room=room, pages=pages)
            for layer in range(LAYERS):
                before = (
                    {"digests": np.zeros((PAGES, 2), np.uint64)}
                    if old[slot] is None
                    else seen(layer, old[slot])
                )
                decode.snapshot(stage="RC", moment="before", buffer=layer, rows=rows, **common, **before)
            decode.receive(room=room, pages=pages, buffers=range(LAYERS), item_lengths=[PAGE_BYTES] * LAYERS)
            builder.edge(decode, prefill, what="announce", key=key)
            for layer in range(LAYERS):
                more = inputs if layer == 0 else {}
                slots = np.arange(rows) + slot * PAGES * ROWS
                prefill.store(
                    room=room, buffer=layer, step=number, slots=slots, logical_rows=np.arange(rows), **more
                )
                prefill.snapshot(stage="ST", buffer=layer, step=number, rows=rows, data=data[layer], **common)
            for layer in range(LAYERS):
                prefill.snapshot(
                    stage="SE",
                    moment="before",
                    buffer=layer,
                    transfer=number,
                    rows=rows,
                    **common,
                    **seen(layer),
                )
            addresses = [
                (((side + 1) << 40) + (np.arange(LAYERS)[:, None] << 36) + pages * PAGE_BYTES).reshape(-1)
                for side in (0, 1)
            ]
            source, destination = (
                np.stack([a, np.full(len(a), PAGE_BYTES)], 1).astype(np.uint64) for a in addresses
            )
            prefill.send(
                transfer=number, room=room, last=True, agent="agent-0", peer="agent-1", written=1, awaited=1,
                logical=0, pages=pages, destination_pages=pages, item_lengths=[PAGE_BYTES] * LAYERS,
                source=source, destination=destination,
            )  # fmt: skip
            prefill.transfer_state(state="posted", transfer=number, room=room)
            torn: dict[int, Any] = {}
            if (
                number == odd
            ):  # completion is told while half of one page is still old, and the page is read so
                builder.edge(prefill, decode, what="status", key=key)
                torn[2] = data[2].copy()
                torn[2][3, PAGE_BYTES // 2 :] = 7
                _arrive(decode, room, rows, common, seen, torn)
            prefill.transfer_state(state="done", transfer=number, room=room)
            for layer in range(LAYERS):
                prefill.snapshot(
                    stage="SE",
                    moment="after",
                    buffer=layer,
                    transfer=number,
                    rows=rows,
                    **common,
                    **seen(layer),
                )
            if number != odd:
                builder.edge(prefill, decode, what="status", key=key)
                _arrive(decode, room, rows, common, seen, torn)
            for layer in range(LAYERS):
                read: dict[str, Any] = {}
                if sampled:
                    logits, _ = logits_reference(spec, data[layer], rows, query.reshape(heads, 128), weights)
                    logits = logits.astype(np.float32)
                    top = np.argsort(-logits, kind="stable")[:512].astype(np.int32)
                    read = {"k": 512, "query": query, "weights": weights, "logits": logits, "top_k": top}
                step = {"room": room, "buffer": layer, "step": number, "rows": rows}
                look = {"data": torn[layer]} if layer in torn else seen(layer)
                decode.snapshot(stage="RD", moment="before", logical=logical, pages=pages, **step, **look)
                decode.read(table=pages, table_after=pages, **step, **read)
            for layer in range(LAYERS):
                decode.snapshot(stage="LT", buffer=layer, rows=rows, **common, **seen(layer))
            for side in (prefill, decode):
                side.request(room=room, phase="finish")
                side.free(room=room, pages=pages, reason="finish")
            old[slot] = found
    return {"requests": requests, "room": FIRST_ROOM + odd, "layer": 2, "page": 3}


def _arrive(decode: Any, room: int, rows: int, common: Any, seen: Any, torn: dict[int, Any]) -> None:
    """Completion is told and the pages are looked at; ``torn`` layers are not complete yet."""
    decode.transfer_state(state="arrived", room=room)
    for layer in range(LAYERS):
        look = {"data": torn[layer]} if layer in torn else seen(layer)
        decode.snapshot(stage="RC", buffer=layer, rows=rows, **common, **look)
    decode.request(room=room, phase="arrived", tokens=rows, rows=rows)


def _normal_codes(np: Any) -> Any:
    """256 e4m3 codes that lie as those of normally distributed keys do."""
    from statistics import NormalDist

    values = np.array([NormalDist().inv_cdf((i + 0.5) / 256) * 100 for i in range(256)])
    exponent = np.clip(np.floor(np.log2(np.abs(values))), -6, 8)
    mantissa = np.clip(np.round(np.abs(values) / 2**exponent * 8 - 8), 0, 7)
    code = ((exponent + 7) * 8 + mantissa).astype(np.uint8)
    return np.where(values < 0, code | 0x80, code).astype(np.uint8)


def read_blobs(trace: Path) -> int:
    """Decode every kept page once, in the order of the file."""
    from replay.trace.file import TraceFile

    file, total = TraceFile(trace), 0
    store = file.blobs("contents.data")
    assert store is not None
    for number in range(len(store)):
        total += len(store.get(number))
    file.close()
    return total


def drop(path: Path) -> None:
    """Ask the kernel to forget the file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wrong(verdict: dict[str, Any], made: dict[str, Any]) -> str:
    """What is not as it was built; empty if all is."""
    named = [
        (f["code"], f["request"]["room"], f["layer"], [page["logical"] for page in f["pages"]])
        for f in verdict["findings"]
    ]
    meant = [("F09", made["room"], made["layer"], [made["page"]])]
    return "" if named == meant and verdict["verdict"] == "divergent" else f"named {named[:4]}, not {meant}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="page bytes that the trace keeps")
    parser.add_argument("--work", type=Path, default=Path("build/stream"), help="folder for the trace")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the file from the cache before each run")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(read_blobs(options.read))
        return 0
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    trace, answer = work / f"stream-{options.gigabytes:g}.h5", work / f"stream-{options.gigabytes:g}.json"
    if not (trace.exists() and answer.exists()):
        begin = time.perf_counter()
        answer.write_text(json.dumps(build(trace, options.gigabytes)), encoding="utf-8")
        print(f"built in {time.perf_counter() - begin:.0f} s", flush=True)
    made = json.loads(answer.read_text(encoding="utf-8"))
    looks = made["requests"] * LAYERS * PAGES * 7
    print(f"{trace.stat().st_size / 1e9:.2f} GB, {made['requests']:,} requests, {looks:,} looks at pages")
    print(f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    commands = {
        "replay": [sys.executable, "-c", REPLAY, str(trace), "--json"],
        "reader": [sys.executable, __file__, "--read", str(trace)],
        "cat": ["cat", str(trace)],
    }
    walls: dict[str, list[float]] = {name: [] for name in commands}
    peak, problem = 0, ""
    for run in range(options.runs):
        for name, command in commands.items():
            if options.cold:
                drop(trace)
            out = Path(os.devnull) if name == "cat" else work / f"{name}.out"
            wall, memory, code = timed(command, out)
            if name != "replay" and code:
                problem = f"{name} ended with code {code}: its time says nothing"
            walls[name].append(wall)
            if name == "replay":
                peak = max(peak, memory)
        told = ", ".join(f"{name} {times[-1]:.1f} s" for name, times in walls.items())
        print(f"run {run + 1}: {told}; replay's peak {peak / 1e6:.0f} MB", flush=True)
    problem = problem or wrong(json.loads((work / "replay.out").read_text(encoding="utf-8")), made)
    for name in ("reader", "cat"):
        ratios = [a / b for a, b in zip(walls["replay"], walls[name], strict=True)]
        print(
            f"replay {statistics.median(walls['replay']):.1f} s, {name} {statistics.median(walls[name]):.1f} s, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    if peak > BAR_BYTES:
        problem = problem or f"it took {peak / 1e9:.1f} GB of memory"
    if problem:
        print(f"WRONG: {problem}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
