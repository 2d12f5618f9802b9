"""``replay demo``: run a prefill/decode pair with a fault in it under a small and a large load, and judge what
was captured.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.commands.output import Progress, paragraph, to_json, write_new
from replay.lab.faults import FAULTS
from replay.words import counted
from replay.writing import WriteError, check_folder, writing

if TYPE_CHECKING:
    from replay.lab.config import LabConfig
    from replay.lab.run import RunResult
    from replay.verdict import Verdict

#: What the demo sets besides KV_REPLAY_CAPTURE: it seals by itself, its ring reaches over a whole run, store
#: inputs of every second request are kept, and arrived pages are looked at again once a slow transfer has had
#: time to end.
OPTIONS = {
    "KV_REPLAY_SEAL": "0",
    "KV_REPLAY_RING_SECONDS": "300",
    "KV_REPLAY_STORE_EVERY": "2",
    "KV_REPLAY_LATER_MS": "300",
}
_CAPTURED = (".journal", ".h5", ".request")


@dataclass(frozen=True, slots=True)
class Level:
    """One load of the demo: what the clients saw, and what the replay says."""

    concurrency: int
    result: RunResult
    verdict: Verdict

    @property
    def hit(self) -> int:
        """Requests whose reply was wrong, as the lab itself knows."""
        assert self.result.truth is not None
        return len(self.result.truth.hit)

    @property
    def served(self) -> int:
        """Requests that were read at least once."""
        assert self.result.truth is not None
        return len(self.result.truth.rooms)

    @property
    def named(self) -> int:
        """Requests that the verdict names."""
        rooms = {finding.request.room for finding in self.verdict.findings}
        return len(rooms.union(*(finding.request.aliases for finding in self.verdict.findings)))


def _levels(_: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers such as 4,60.", param=param) from None
    if not found or min(found) < 1 or max(found) > 1024:
        raise click.BadParameter("a level is between 1 and 1024 requests.", param=param)
    return tuple(dict.fromkeys(found))


def _list_faults(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    width = max(map(len, FAULTS))
    for fault in FAULTS.values():
        click.echo(paragraph(fault.about, f"{fault.kind:<{width}}  ", " " * (width + 2)))
    ctx.exit()


@click.command()
@click.option(
    "--fault",
    type=click.Choice(list(FAULTS)),
    default="late-foreign-write",
    show_default=True,
    metavar="KIND",
    help="What the engine does wrongly; see --list-faults.",
)
@click.option("--list-faults", is_flag=True, is_eager=True, expose_value=False, callback=_list_faults,
              help="List the kinds of fault.")  # fmt: skip
@click.option("--format", "format_", type=click.Choice(["fp8", "bf16", "fp4"]), default="fp8", show_default=True,
              help="Page format.")  # fmt: skip
@click.option("--requests", metavar="N", type=click.IntRange(1, 4096), default=96, show_default=True,
              help="Requests at each level.")  # fmt: skip
@click.option("--concurrency", metavar="N,N", callback=_levels, default="4,60", show_default=True,
              help="Requests at a time, one run for each level.")  # fmt: skip
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of prompts and clients."
)
@click.option(
    "--layers", metavar="N", type=click.IntRange(1, 64), default=4, show_default=True, help="Layers."
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "nixl", "tcp"]),
    default="auto",
    show_default=True,
    help="What carries the pages; auto is NIXL where it is installed.",
)
@click.option("-o", "--out", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False),
              default=Path("demo"), show_default=True, help="Where captures, trace, plot and summary go.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON alone.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on standard error while it runs.")
def command(
    fault: str,
    format_: str,
    requests: int,
    concurrency: tuple[int, ...],
    seed: int,
    layers: int,
    transport: str,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> int:
    """Record a small prefill/decode pair with a fault in it, and judge it.

    Two processes move pages of an index-K cache over loopback, by NIXL or by TCP, while clients come, wait and go
    away. Each level of load is a run of its own. The verdict is that of the highest level; FOLDER gets its trace.h5
    and a plot, and summary.json with the rates of all levels.
    """
    from replay.commands.replay_trace import exit_code, show

    say = _Say(quiet)
    config = _config(fault, format_, requests, seed, layers, transport)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    check_folder(out)
    found = [_level(config, level, out, say, last=level == max(concurrency)) for level in concurrency]
    chosen = max(found, key=lambda level: level.concurrency)
    _summarise(found, fault, out / "summary.json")
    if not as_json:
        for line in _rates(found):
            click.echo(line)
        click.echo()
    show(chosen.verdict, as_json=as_json)
    if not as_json:
        click.echo()
        names = ("trace.h5", "stages.png", "summary.json")
        written = [path for path in (out / name for name in names) if path.exists()]
        click.echo(paragraph(f"Written: {', '.join(map(str, written))}.", "", "  "))
        click.echo(f"Try: replay {out / 'trace.h5'} --verbose")
    return exit_code(chosen.verdict)


def _config(fault: str, format_: str, requests: int, seed: int, layers: int, transport: str) -> LabConfig:
    from replay.lab.config import LabConfig

    sizes: dict[str, Any] = dict(FAULTS[fault].sizes)
    try:
        return LabConfig(
            format=format_,
            requests=requests,
            seed=seed,
            layers=layers,
            fault=fault,
            transport=transport,
            **sizes,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _level(config: LabConfig, concurrency: int, out: Path, say: _Say, *, last: bool) -> Level:
    """Run one level and judge it; ``last`` writes trace and plot too."""
    from dataclasses import replace

    from replay.judge import JudgeOptions, judge
    from replay.lab.run import Pair
    from replay.lab.transport import TransportError
    from replay.trace.merge import merge
    from replay.trace.reader import open_trace

    folder = out / f"capture-{concurrency}"
    _clear(folder)
    try:
        environ = {**OPTIONS, "KV_REPLAY_CAPTURE": str(folder)}
        with Pair(environ, config.transport) as pair:
            say(
                f"{concurrency} at a time: {counted(config.requests, 'request')}, pages over "
                f"{_carrier(pair.transport)}",
                pair.note,
            )
            try:
                result = pair.run(replace(config, concurrency=concurrency))
            except KeyboardInterrupt:
                say("stopping the pair ...")
                raise
    except TransportError as error:
        raise click.UsageError(str(error)) from None
    if not any(path.stat().st_size for path in folder.glob("*.journal")):
        raise WriteError(
            folder,
            "nothing of the recording could be written",
            "Make room on the disk, or choose another place",
        )
    say(f"{concurrency} at a time: done in {result.stats['seconds']:.0f} s; judging")
    trace_path = out / "trace.h5"
    source = folder
    if last:
        with Progress(None if say.on else False) as progress:
            merge([folder], trace_path, replace=True, progress=progress)
        source = trace_path
    began = time.monotonic()
    with Progress(None if say.on else False) as progress, open_trace(source) as trace:
        verdict = judge(trace, JudgeOptions(), progress)
        if last:
            _plot(trace, verdict, out / "stages.png", say)
    say(f"{concurrency} at a time: judged in {time.monotonic() - began:.0f} s")
    return Level(concurrency, result, verdict)


def _plot(trace: Any, verdict: Verdict, path: Path, say: _Say) -> None:
    from replay.commands.plot import draw

    try:
        draw(trace, verdict, path)
    except (ImportError, click.UsageError) as error:
        say(f"no plot: {error}")


def _summarise(found: list[Level], fault: str, path: Path) -> None:
    """What the clients saw at each load, for ``replay plot --kind rate``."""
    from analysis.diff.rates import Rate, summary

    levels = [Rate(level.concurrency, level.served, level.hit) for level in found]
    write_new(path, to_json(summary(levels, {"fault": fault})) + "\n", force=True)


def _clear(folder: Path) -> None:
    """An empty capture folder; nothing but what a capture writes is removed."""
    if not folder.exists():
        folder.mkdir()
        return
    for path in folder.iterdir():
        if path.is_file() and (path.suffix in _CAPTURED or path.name.endswith(".h5.partial")):
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            raise click.UsageError(f"'{path}' is not a part of a capture; give another folder with --out.")


def _carrier(transport: str) -> str:
    return {"nixl": "NIXL (UCX)", "tcp": "plain TCP"}[transport]


def _rates(levels: list[Level]) -> list[str]:
    lines = []
    for level in levels:
        share = f"{100 * level.hit / max(level.served, 1):.0f} %"
        done = level.result.stats["decode"]["triton"], level.result.stats["prefill"]["triton"]
        lines.append(
            f"{level.concurrency:>4} at a time: {level.hit} of {counted(level.served, 'reply', 'replies')} hit "
            f"({share}); the replay names {counted(level.named, 'request')}"
        )
    sample = f"{counted(done[1]['store'], 'page')} stored and {done[0]['read']} read"
    text = f"{sample} by the Triton kernels on the interpreter, all others by their torch twins"
    lines.append(paragraph(text, "", "  "))
    return lines


class _Say:
    """Lines about the progress on standard error."""

    def __init__(self, quiet: bool) -> None:
        self.on = not quiet
        self._began = time.monotonic()
        self._noted = ""

    def __call__(self, line: str, note: str = "") -> None:
        if self.on:
            click.echo(f"[{time.monotonic() - self._began:5.1f} s] {line}", err=True)
        if note and note != self._noted:
            self._noted = note
            print(f"replay: {note}", file=sys.stderr)  # noqa: T201  # worth knowing even with --quiet
