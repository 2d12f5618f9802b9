"""How long `replay` takes for a trace of 1,000,000 page snapshots, and whether its answer is right.

    python benchmarks/judge_million.py --work /var/tmp/judge-million

Builds the trace once (it is kept in the work folder), runs ``replay TRACE --json`` in a fresh process several times,
and beside each run, in a fresh process too, the comparison that one would write first: a loop over all pages that
compares the row digests of the source (SE) with those of the destination (RC). That loop says *that* pages differ, and
neither why, whose fault it is, nor whether the bytes mattered.

Exit code 1: the verdict is not exactly what was built into the trace, or a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fresh_process import ROOT, timed  # beside this script

# (room, layer, code) -> logical pages, as in million_trace. Nothing heavy is imported or built in this process: a
# child's peak memory, as the kernel counts it, begins with that of the process which started it.
Wrong = dict[tuple[int, int, str], tuple[int, ...]]

BAR_SECONDS = 30.0
BAR_BYTES = 2_000_000_000
REPLAY = "from replay.cli import main; main()"


def prepare(work: Path, requests: int, layers: int, seed: int) -> tuple[Path, int, Wrong]:
    """The trace, its number of page snapshots and what is wrong in it; built if it is not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    name = f"made-{requests}-{layers}-{seed}"
    trace, answer = work / f"{name}.h5", work / f"{name}.json"
    if not (trace.exists() and answer.exists()):
        trace.unlink(missing_ok=True)
        print(f"building {trace} ...", flush=True)
        begin = time.perf_counter()
        make = [sys.executable, "-m", "benchmarks.million_trace", str(trace), str(answer)]
        subprocess.run([*make, str(requests), str(layers), str(seed)], cwd=ROOT, check=True)
        print(f"built in {time.perf_counter() - begin:.0f} s, {trace.stat().st_size / 1e6:.0f} MB")
    told = json.loads(answer.read_text(encoding="utf-8"))
    found = {(room, layer, code): tuple(pages) for room, layer, code, pages in told["wrong"]}
    return trace, told["snapshots"], found


def compare_pages(trace_path: Path) -> int:
    """The plain comparison: pages whose row digests differ between SE (before the post) and RC."""
    import numpy as np

    from replay.trace.reader import open_trace

    with open_trace(trace_path) as trace:
        table = trace.table("snapshot")
        stage, moment, content = table["stage"], table["moment"], table.ragged("content")
        room, buffer, logical = table["room"], table["buffer"], table.ragged("logical")
        everything = np.arange(len(trace.contents))
        values, scales = trace.contents.row_values(everything), trace.contents.row_scales(everything)
        source: dict[tuple[int, int, int], int] = {}
        target: dict[tuple[int, int, int], int] = {}
        for i in range(len(table)):
            if stage[i] == "SE" and moment[i] == "before":
                place = source
            elif stage[i] == "RC" and moment[i] == "":
                place = target
            else:
                continue
            for k, page in zip(logical[i], content[i], strict=True):
                place[int(room[i]), int(buffer[i]), int(k)] = int(page)
        differing = 0
        for key, page in source.items():
            other = target.get(key)
            if other is not None and not (
                np.array_equal(values[page], values[other]) and np.array_equal(scales[page], scales[other])
            ):
                differing += 1
    return differing


def check(verdict: dict[str, Any], wrong: Wrong) -> list[str]:
    """What is not exactly as it was built into the trace; empty if all is right."""
    found: dict[tuple[int, int, str], tuple[int, ...]] = {}
    problems = []
    for finding in verdict["findings"]:
        key = (finding["request"]["room"], finding["layer"], finding["code"])
        if key in found:
            problems.append(f"{key} is named twice")
        found[key] = tuple(sorted(page["logical"] for page in finding["pages"]))
    named = {(*key, page) for key, pages in found.items() for page in pages}
    meant = {(*key, page) for key, pages in wrong.items() for page in pages}
    right = len(named & meant)
    print(
        f"verdict {verdict['verdict']}: {len(found)} findings; of {len(meant)} bad pages "
        f"recall {right / len(meant):.4f}, precision {right / max(1, len(named)):.4f}"
    )
    rooms_named, rooms_meant = {key[0] for key in found}, {key[0] for key in wrong}
    print(
        f"requests: {len(rooms_named & rooms_meant)} of {len(rooms_meant)} bad ones named, "
        f"{len(rooms_named - rooms_meant)} others"
    )
    if verdict["verdict"] != "divergent":
        problems.append(f"the verdict is {verdict['verdict']}")
    problems += [f"not named: {item}" for item in sorted(meant - named)[:5]]
    problems += [f"wrongly named: {item}" for item in sorted(named - meant)[:5]]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--work", type=Path, default=Path("build/judge-million"), help="folder for the trace")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-bar", action="store_true", help="do not fail where it takes too long")
    options = parser.parse_args()
    if options.compare:
        print(compare_pages(options.compare))
        return 0

    work = options.work.resolve()
    trace, snapshots, wrong = prepare(work, options.requests, options.layers, options.seed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{snapshots:,} page snapshots, {options.requests:,} requests, {options.layers} layers")
    print(f"Python {platform.python_version()}, {cores} cores, {platform.machine()}")
    verdict_file, plain_file = work / "verdict.json", work / "plain.txt"
    walls, peaks, plain, ratios = [], [], [], []
    problems: list[str] = []
    for run in range(options.runs):
        wall, peak, code = timed([sys.executable, "-c", REPLAY, str(trace), "--json"], verdict_file)
        beside, beside_peak, _ = timed([sys.executable, __file__, "--compare", str(trace)], plain_file)
        walls.append(wall)
        peaks.append(peak)
        plain.append(beside)
        ratios.append(wall / beside)
        print(
            f"run {run + 1}: replay {wall:6.2f} s, {peak / 1e6:5.0f} MB, exit {code}; plain comparison "
            f"{beside:6.2f} s, {beside_peak / 1e6:5.0f} MB; ratio {wall / beside:.2f}",
            flush=True,
        )
        if code != 1:
            problems.append(f"run {run + 1}: exit code {code}, not 1 (divergent)")
    print(
        f"plain comparison: {int(plain_file.read_text())} pages differ between SE and RC, of an unknown kind"
    )
    problems += check(json.loads(verdict_file.read_text(encoding="utf-8")), wrong)
    print(
        f"replay {statistics.median(walls):.2f} s (median; {min(walls):.2f} to {max(walls):.2f}), "
        f"plain comparison {statistics.median(plain):.2f} s ({min(plain):.2f} to {max(plain):.2f}), "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    if not options.no_bar and statistics.median(walls) > BAR_SECONDS:
        problems.append(f"slower than {BAR_SECONDS:.0f} s")
    if not options.no_bar and max(peaks) > BAR_BYTES:
        problems.append(f"more than {BAR_BYTES / 1e9:.0f} GB")
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
