"""Time the store and read kernels on a GPU, and the twins on its CPU. Prints one table and, with --json, one object.

    python benchmarks/kernels_gpu.py [--json]

Times are medians of triton's do_bench with the 20 % and 80 % quantiles; they exclude the checks of the arguments,
which wait for the device. Each figure is of one run on one machine: compare within a run only.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import triton
from triton.testing import do_bench

from capture_hooks.layouts import LAYOUTS
from replay.kernels import arguments, check, read, store, twins

QUANTILES = [0.5, 0.2, 0.8]


def spread(call: Any) -> list[float]:
    """Median, 20 % and 80 % quantile in microseconds."""
    return [1000.0 * x for x in do_bench(call, warmup=50, rep=300, quantiles=QUANTILES)]


def without_checks() -> None:
    for name in ("check_store", "check_read"):
        setattr(arguments, name, lambda *_: None)


def time_store(name: str, rows: int) -> dict[str, Any]:
    layout = LAYOUTS[name]
    inputs = check.keys_for(np.random.default_rng(1), rows)
    given = [torch.from_numpy(x) for x in (inputs.keys, inputs.rope, inputs.norm_weight)]
    began = time.perf_counter()
    twins.store_rows_torch(layout, *given, inputs.epsilon)
    cpu = rows / (time.perf_counter() - began)
    keys, rope, weight = (x.cuda() for x in given)
    pages = rows // layout.rows
    cache = torch.zeros((pages, layout.page_bytes), dtype=torch.uint8, device="cuda")
    slots = torch.randperm(rows, device="cuda")
    micro = spread(lambda: store.store(layout, cache, slots, keys, rope, weight, 1e-6))
    moved = rows * (4 * 128 + 4 * 64 + 8 + layout.value_bytes + layout.scale_bytes)
    return {
        "what": "store",
        "format": name,
        "size": f"{rows:,} rows",
        "us": micro,
        "rows per us": rows / micro[0],
        "GB/s": moved / micro[0] / 1000,
        "twin on one CPU, rows/s": cpu,
    }


def time_read(name: str, batch: int, rows: int) -> dict[str, Any]:
    layout = LAYOUTS[name]
    case = check.make_case(layout, np.random.default_rng(2), batch, rows, False)
    arrays = (case.cache, case.table, case.rows, case.query, case.weights)
    cache, table, lengths, query, weights = (torch.from_numpy(x).cuda() for x in arrays)
    micro = spread(lambda: read.read(layout, cache, table, lengths, query, weights, check.TOP_K))
    twin = spread(lambda: twins.read_torch(layout, cache, table, lengths, query, weights, check.TOP_K))
    logits = torch.empty((batch, rows), device="cuda")
    select = spread(lambda: twins.top_k_torch(logits, lengths, check.TOP_K))
    return {
        "what": "read",
        "format": name,
        "size": f"{batch} x {rows:,} rows",
        "us": micro,
        "rows per us": batch * rows / micro[0],
        "GB/s": batch * rows * (layout.value_bytes + layout.scale_bytes) / micro[0] / 1000,
        "of which top-k, us": select[0],
        "twin on the GPU, us": twin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    without_checks()
    results = [time_store(name, 65536) for name in LAYOUTS]
    results += [time_read(name, batch, 16384) for name in LAYOUTS for batch in (1, 8, 32)]
    if options.json:
        print(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
            )
        )
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(f"{'':6}{'format':<8}{'size':<18}{'us: median':>11}{'20 %':>9}{'80 %':>9}{'rows/us':>9}{'GB/s':>8}")
    for r in results:
        times = "".join(f"{x:>{w}.1f}" for x, w in zip(r["us"], (11, 9, 9), strict=True))
        line = (
            f"{r['what']:<6}{r['format']:<8}{r['size']:<18}{times}{r['rows per us']:>9.1f}{r['GB/s']:>8.0f}"
        )
        if r["what"] == "store":
            line += f"   twin, one CPU: {r['twin on one CPU, rows/s']:,.0f} rows/s"
        else:
            line += f"   top-k {r['of which top-k, us']:.1f} us; twin on the GPU {r['twin on the GPU, us'][0]:.1f} us"
        print(line)


if __name__ == "__main__":
    main()
