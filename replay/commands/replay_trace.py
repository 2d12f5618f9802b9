"""``replay TRACE|FOLDER...``: the verdict on a trace."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from replay.commands.output import Progress, check_new, may_color, to_json, write_new
from replay.verdict import EXIT_CLEAN, EXIT_DIVERGENT, EXIT_INCONCLUSIVE, Verdict

_EXITS = {"clean": EXIT_CLEAN, "divergent": EXIT_DIVERGENT, "inconclusive": EXIT_INCONCLUSIVE}


def exit_code(verdict: Verdict) -> int:
    """The exit code that stands for ``verdict``."""
    return _EXITS[verdict.verdict]


def _kernel_name(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    from replay.commands.kernel_names import kernel_name

    return kernel_name(context, param, value)


class _Context(click.Context):
    """The verdict has no word of its own on the command line."""

    @property
    def command_path(self) -> str:
        return self.parent.command_path if self.parent else "replay"


class _Verdict(click.Command):
    context_class = _Context

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Traces first, as people type them."""
        formatter.write_usage(ctx.command_path, "TRACE|FOLDER... [OPTIONS]")


@click.command(cls=_Verdict, short_help="Judge a trace.")
@click.argument("traces", metavar="TRACE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON alone.")
@click.option("-v", "--verbose", is_flag=True, help="Show every finding and all of its evidence.")
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the verdict's JSON to this file too.",
)
@click.option("--force", is_flag=True, help="Write over the file given with --out.")
@click.option("--exhaustive", is_flag=True, help="Re-execute every recorded store and read, not a sample.")
@click.option(
    "--sample",
    metavar="N",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Reads and stores to run again in Triton.",
)
@click.option(
    "--read-kernel", metavar="MODULE:FUNCTION", callback=_kernel_name, help="Judge your own read kernel."
)
@click.option(
    "--store-kernel", metavar="MODULE:FUNCTION", callback=_kernel_name, help="Judge your own store kernel."
)
@click.option("--no-reexecute", "--no-triton", is_flag=True, help="Run no kernel; the numpy reference only.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time for one call of a kernel of yours.",
)
def command(
    traces: tuple[Path, ...],
    as_json: bool,
    verbose: bool,
    out: Path | None,
    force: bool,
    exhaustive: bool,
    sample: int,
    read_kernel: str | None,
    store_kernel: str | None,
    no_reexecute: bool,
    timeout: float,
) -> int:
    """Judge traces: name the first stage at which a page is wrong, or say that all is clean."""
    if no_reexecute and (read_kernel or store_kernel):
        raise click.UsageError(
            "--no-reexecute leaves no kernel to run; drop it, or --read-kernel/--store-kernel."
        )
    if out is not None:
        check_new(out, force)

    if read_kernel or store_kernel:
        from replay.commands.kernel_names import check_kernels

        check_kernels({"--read-kernel": read_kernel, "--store-kernel": store_kernel}, timeout)

    from replay.judge import JudgeOptions, judge
    from replay.trace.reader import open_trace

    options = JudgeOptions(
        exhaustive=exhaustive,
        sample=sample,
        read_kernel=read_kernel,
        store_kernel=store_kernel,
        reexecute=not no_reexecute,
        timeout=timeout,
    )
    with Progress() as progress, open_trace(*traces) as trace:
        verdict = judge(trace, options, progress)
    if out is not None:
        write_new(out, to_json(verdict.to_json()) + "\n", force)
    show(verdict, as_json=as_json, verbose=verbose)
    return exit_code(verdict)


def show(verdict: Verdict, *, as_json: bool, verbose: bool = False) -> None:
    """Print ``verdict`` on standard output, as JSON alone or as text."""
    if as_json:
        click.echo(to_json(verdict.to_json()))
        return
    from analysis.report import verdict_text

    click.echo(verdict_text(verdict, color=may_color(sys.stdout), verbose=verbose))
