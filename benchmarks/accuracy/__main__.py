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
from typing import Any

from benchmarks.accuracy import machine, markdown
from benchmarks.accuracy.case import variant_of
from benchmarks.accuracy.clean import FORMATS
from benchmarks.accuracy.faults import CODES
from benchmarks.accuracy.kept import Kept, OtherCodeError
from benchmarks.accuracy.measure import NotWrittenError, Outcome, Task, begin_worker, run, summary

CLEAN_REQUESTS = 200


def tasks(codes: list[str], formats: list[str], seeds: range, clean: range) -> list[Task]:
    """Every trace of a measurement; clean ones lie between the others, so that a part of it shows all sorts."""
    faulty = [
        Task(code, variant_of(code, seed), format, seed)
        for seed in seeds
        for code in codes
        for format in formats
    ]
    fair = [Task("", "", "", seed, CLEAN_REQUESTS) for seed in clean]
    places = [(number / len(faulty), 0, task) for number, task in enumerate(faulty)]
    places += [(number / len(fair), 1, task) for number, task in enumerate(fair)]
    return [task for _, _, task in sorted(places, key=lambda place: place[:2])]


def numbers(text: str) -> range:
    """``20``: the first twenty; ``3..5``: those."""
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


def main() -> int:
    """Exit code 0; 1 where traces cannot be written; 130 when interrupted; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--seeds", type=numbers, default="20", help="how many seeds, or FIRST..LAST")
    parser.add_argument(
        "--kinds", default="", help="codes, such as F07,F10; all where left out; none for clean only"
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument(
        "--clean", type=numbers, default="102", help="clean traces of 200 requests: how many, or FIRST..LAST"
    )
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"))
    parser.add_argument("--markdown", type=Path, help="write the figures as a page, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="keep each outcome in this file, and go on from what is there"
    )
    parser.add_argument("--verbose", action="store_true", help="say everything that was not right")
    args = parser.parse_args()
    codes = [] if args.kinds == "none" else args.kinds.split(",") if args.kinds else CODES
    unknown = sorted(set(codes) - set(CODES))
    if unknown:
        parser.error(f"unknown kind {unknown[0]}; known: {', '.join(CODES)}")
    plan = tasks(codes, args.formats.split(","), args.seeds, args.clean)
    try:
        kept = Kept(args.keep) if args.keep else None
    except (OtherCodeError, json.JSONDecodeError) as error:
        parser.error(str(error))
    outcomes = [] if kept is None else [kept.outcomes[task] for task in plan if task in kept.outcomes]
    known = {outcome.task for outcome in outcomes}
    progress = _Progress(len(plan), len(outcomes))
    try:
        with tempfile.TemporaryDirectory(prefix="kv-replay-accuracy-") as folder:
            todo = [task for task in plan if task not in known]
            for outcome in measured(todo, Path(folder), args.processes):
                outcomes.append(outcome)
                if kept is not None:
                    kept.add(outcome)
                if args.verbose:
                    _tell(outcome)
                progress.step(outcomes)
    except (KeyboardInterrupt, NotWrittenError) as error:
        what = "nothing was written" if kept is None else f"{len(outcomes)} outcomes are in {kept.path}"
        told = str(error) if isinstance(error, NotWrittenError) else "interrupted"
        sys.stderr.write(f"\n{told}: {what}\n")
        return 1 if isinstance(error, NotWrittenError) else 130
    outcomes.sort(key=lambda item: (item.task.code, item.task.format, item.task.seed))
    figures = summary(outcomes) | {"made": machine.described(sum(item.seconds for item in outcomes))}
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown.page(figures))
    sys.stdout.write(json.dumps(_short(figures), indent=1) + "\n")
    return 0


def measured(plan: list[Task], folder: Path, processes: int) -> Iterator[Outcome]:
    """Outcomes as they come; the processes end with the loop, also on Ctrl-C."""
    work = partial(run, folder=folder)
    if processes < 2:
        yield from map(work, plan)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=begin_worker)
    try:
        waiting = [pool.submit(work, task) for task in plan]
        for future in as_completed(waiting):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in ("matrix", "details", "fair")}


class _Progress:
    """How far the measurement is, and the figures so far."""

    def __init__(self, total: int, known: int) -> None:
        self.total, self.known, self.begin = total, known, time.monotonic()

    def step(self, outcomes: list[Outcome]) -> None:
        done = len(outcomes)
        if not sys.stderr.isatty() and done % 50 and done != self.total:
            return
        spent = time.monotonic() - self.begin
        left = spent / (done - self.known) * (self.total - done)
        line = f"{done}/{self.total} traces, {spent:.0f} s, about {left:.0f} s left "
        if sys.stderr.isatty():
            line = "\r" + line + ("\n" if done == self.total else "")
        else:
            line += json.dumps(_short(summary(outcomes))) + "\n"
        sys.stderr.write(line)
        sys.stderr.flush()


def _tell(outcome: Outcome) -> None:
    lines = []
    if outcome.task.code and not outcome.kind_right:
        lines.append(f"{outcome.answer} at {outcome.stage} {outcome.confidence} {outcome.note}")
    for what in ("wrong_certain", "bystanders", "accusations"):
        lines += [f"{what}: {line}" for line in getattr(outcome, what)[:3]]
    if not outcome.task.code and (outcome.answer or (outcome.verdict != "clean" and not outcome.lossy)):
        lines.append(f"{outcome.answer or outcome.verdict}: {outcome.note}")
    if lines:
        sys.stderr.write("\n".join(["", *lines, f"again: {outcome.task.again}", ""]))
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
