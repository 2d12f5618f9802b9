"""``python -m benchmarks.accuracy``: the accuracy of the judge in figures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks.accuracy import markdown
from benchmarks.accuracy.case import variant_of
from benchmarks.accuracy.clean import FORMATS
from benchmarks.accuracy.faults import CODES
from benchmarks.accuracy.measure import Outcome, Task, ignore_interrupts, run, summary

CLEAN_REQUESTS = 200


def tasks(codes: list[str], formats: list[str], seeds: range, clean_traces: int) -> list[Task]:
    """Every trace of a measurement."""
    found = [
        Task(code, variant_of(code, seed), format, seed)
        for seed in seeds
        for code in codes
        for format in formats
    ]
    found += [Task("", "", "", seed, CLEAN_REQUESTS) for seed in range(clean_traces)]
    return found


def main() -> int:
    """Exit code 0; 130 when interrupted; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--seeds", default="20", help="how many seeds, or FIRST..LAST")
    parser.add_argument(
        "--kinds", default="", help="codes, such as F07,F10; all where left out; none for clean only"
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--clean", type=int, default=102, help="clean traces of 200 requests")
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"))
    parser.add_argument("--markdown", type=Path, help="write the figures as a page, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="say everything that was not right")
    args = parser.parse_args()
    first, dots, last = args.seeds.partition("..")
    seeds = range(int(first), int(last) + 1) if dots else range(int(first))
    codes = [] if args.kinds == "none" else args.kinds.split(",") if args.kinds else CODES
    unknown = sorted(set(codes) - set(CODES))
    if unknown:
        parser.error(f"unknown kind {unknown[0]}; known: {', '.join(CODES)}")
    plan = tasks(codes, args.formats.split(","), seeds, args.clean)
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kv-replay-accuracy-") as folder:
            for done, outcome in enumerate(measured(plan, Path(folder), args.processes), 1):
                outcomes.append(outcome)
                _progress(done, len(plan), begin)
                if args.verbose:
                    _tell(outcome)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: nothing was written\n")
        return 130
    outcomes.sort(key=lambda item: (item.task.code, item.task.format, item.task.seed))
    figures = summary(outcomes)
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown.page(figures))
    shown = {name: value for name, value in figures.items() if name not in ("matrix", "details")}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    return 0


def measured(plan: list[Task], folder: Path, processes: int) -> Iterator[Outcome]:
    """Outcomes as they come; the processes end with the loop, also on Ctrl-C."""
    work = partial(run, folder=folder)
    if processes < 2:
        yield from map(work, plan)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=ignore_interrupts)
    try:
        waiting = [pool.submit(work, task) for task in plan]
        for future in as_completed(waiting):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _progress(done: int, total: int, begin: float) -> None:
    spent = time.monotonic() - begin
    left = spent / done * (total - done)
    end = "\n" if done == total else ""
    if sys.stderr.isatty() or done % 50 == 0 or done == total:
        sys.stderr.write(f"\r{done}/{total} traces, {spent:.0f} s, about {left:.0f} s left {end}")
        sys.stderr.flush()


def _tell(outcome: Outcome) -> None:
    task = outcome.task
    name = f"{task.code or 'clean'} {task.variant} {task.format} {task.seed} ({outcome.seconds:.1f} s)"
    if task.code and not outcome.kind_right:
        sys.stderr.write(
            f"\n{name}: {outcome.answer} at {outcome.stage} {outcome.confidence} {outcome.note}\n"
        )
    for what in ("wrong_certain", "bystanders", "accusations"):
        for line in getattr(outcome, what)[:3]:
            sys.stderr.write(f"\n{name}: {what}: {line}\n")
    if not task.code and outcome.verdict != "clean" and not outcome.lossy:
        sys.stderr.write(f"\n{name}: {outcome.verdict}: {outcome.note}\n")


if __name__ == "__main__":
    sys.exit(main())
