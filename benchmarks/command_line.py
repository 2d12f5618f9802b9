"""How long the command line takes to answer: its help, and verdicts on traces of 20 MB without kernels.

    python benchmarks/command_line.py

One trace is clean and holds page bytes, the other holds the digests of many looks, and faults of several kinds. Prints
median and range over some runs, beside a bare start of the interpreter, and the processor time, which other work on the
machine changes less. Exit code 1 if a bar was missed: the help 0.3 s beyond the bare start, a verdict 3 s.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replay.trace.builder import TraceBuilder

HELP_BAR, VERDICT_BAR = 0.3, 3.0
REQUESTS, LAYERS, PAGES = 40, 8, 8
#: Requests of the trace with faults (``million_trace.py``).
MANY_REQUESTS = 240
ROOT = Path(__file__).resolve().parent.parent


def build(path: Path) -> None:
    """A clean story with 2,560 distinct pages of random bytes, which do not compress."""
    rng = np.random.default_rng(1)
    with TraceBuilder(path, replace=True) as trace:
        prefill = trace.process(role="prefill", engine="by hand", mode="pages")
        decode = trace.process(role="decode", engine="by hand", mode="pages")
        for side in (prefill, decode):
            side.hooks_complete()
            for layer in range(LAYERS):
                side.buffer(buffer=layer, layer=layer, format="fp8", pages=1024, address=(layer + 1) << 32)
        for room in range(REQUESTS):
            pages = np.arange(PAGES) + room * PAGES
            rows = PAGES * 64
            told = {"room": room, "logical": np.arange(PAGES), "pages": pages, "rows": rows}
            data = rng.integers(0, 120, (LAYERS, PAGES, 8448), np.uint8)
            for side in (prefill, decode):
                side.request(room=room, tokens=rows, rows=rows)
                side.alloc(room=room, pages=pages)
            decode.receive(room=room, pages=pages, buffers=range(LAYERS), item_lengths=[8448] * LAYERS)
            trace.edge(decode, prefill, "announce", f"{room}.0")
            for layer in range(LAYERS):
                prefill.store(room=room, buffer=layer, step=room, slots=np.arange(rows) + pages[0] * 64,
                              positions=np.arange(rows), logical_rows=np.arange(rows))  # fmt: skip
                prefill.snapshot(stage="ST", buffer=layer, step=room, data=data[layer], **told)
                transfer = room * LAYERS + layer
                prefill.snapshot(
                    stage="SE", moment="before", buffer=layer, transfer=transfer, data=data[layer], **told
                )
                ranges = [[((layer + 1) << 32) + int(page) * 8448, 8448] for page in pages]
                prefill.send(transfer=transfer, room=room, logical=0, pages=pages, destination_pages=pages, last=True,
                             item_lengths=[8448], source=ranges, destination=ranges, written=1)  # fmt: skip
                prefill.transfer_state(state="done", transfer=transfer, room=room)
            trace.edge(prefill, decode, "status", f"{room}.0")
            decode.transfer_state(state="arrived", room=room)
            decode.request(room=room, phase="arrived", rows=rows)
            for layer in range(LAYERS):
                decode.snapshot(stage="RC", buffer=layer, data=data[layer], **told)
                decode.snapshot(stage="LT", buffer=layer, data=data[layer], **told)
                decode.snapshot(
                    stage="RD", moment="before", buffer=layer, step=room, data=data[layer], **told
                )
                decode.read(room=room, buffer=layer, step=room, rows=rows, table=pages)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run of a command, from start to exit: by the clock, and of processor time."""

    wall: list[float]
    cpu: list[float]

    def line(self, name: str) -> str:
        """Medians and the range of the clock."""
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        spread = f"{min(self.wall):.2f} to {max(self.wall):.2f}"
        return f"{name:<48} {wall:6.2f} s  ({spread}), {cpu:.2f} s of processor time"


def timed(command: list[str], runs: int, codes: tuple[int, ...] = (0,)) -> Times:
    """Run ``command`` so often, in fresh processes."""
    found = Times([], [])
    for _ in range(runs):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=False)
        found.wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode in codes, done.stderr.decode()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    replay = [sys.executable, "-c", "from replay.cli import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        clean, faults = Path(folder) / "clean.h5", Path(folder) / "faults.h5"
        build(clean)
        make = [
            sys.executable,
            "-m",
            "benchmarks.million_trace",
            str(faults),
            str(Path(folder) / "answer.json"),
        ]
        subprocess.run([*make, str(MANY_REQUESTS), str(LAYERS), "1"], cwd=ROOT, check=True)
        bare = timed([sys.executable, "-c", "pass"], runs)
        shown = timed([*replay, "--help"], runs)
        found = {"bare interpreter": bare, "replay --help": shown}
        judged = []
        for path, about, code in ((clean, "clean, page bytes", 0), (faults, "faults, digests", 1)):
            name = f"replay TRACE, {path.stat().st_size / 1e6:.1f} MB, {about}"
            judged.append(timed([*replay, str(path), "--no-reexecute"], max(3, runs // 2), (code,)))
            found[name] = judged[-1]
    for name, times in found.items():
        print(times.line(name))
    beyond = statistics.median(shown.wall) - statistics.median(bare.wall)
    print(f"{'the help beyond the bare interpreter':<48} {beyond:6.2f} s  (bar {HELP_BAR} s)")
    missed = beyond > HELP_BAR or any(statistics.median(times.wall) > VERDICT_BAR for times in judged)
    print("a bar was missed" if missed else "within the bars")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
