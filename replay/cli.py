"""The command ``replay``: the list of commands, the default (a verdict on a trace), and every exit code.

Commands are loaded by name when they are called, so ``replay --help`` imports neither torch nor h5py. One place,
:func:`main`, turns what goes wrong into a message and an exit code.
"""

from __future__ import annotations

from replay.interrupt import done, keep, loaded  # first: it sees to Ctrl-C during all that follows

# isort: split
import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from replay.verdict import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNREADABLE, EXIT_USAGE

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: A reader of our output went away: what a shell reports for a process ended by SIGPIPE.
EXIT_PIPE = 141
#: Under which names we are installed, and the variable that asks for a shell's completions of each.
COMPLETION = {"replay": "_REPLAY_COMPLETE", "kv-replay": "_KV_REPLAY_COMPLETE"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: the module that holds it as ``command``, and its line in ``replay --help``."""

    module: str
    help: str


#: Every command in the order of the help. A module that is not there yet leaves its command out.
COMMANDS: dict[str, Entry] = {
    "demo": Entry("replay.commands.demo", "Record a small prefill/decode pair with a fault, and judge it."),
    "info": Entry("replay.commands.info", "Say what is in a trace: processes, hooks, events, losses."),
    "verify": Entry("replay.commands.verify", "Check that a trace is whole and consistent with itself."),
    "seal": Entry("replay.commands.seal", "Turn journals into compressed HDF5 traces."),
    "merge": Entry("replay.commands.merge", "Join the traces of both sides into one file."),
    "trim": Entry("replay.commands.trim", "Cut a trace down to a part and the evidence for it."),
    "diff": Entry("replay.commands.diff", "Show where a good run and a bad one part."),
    "geometry": Entry("replay.commands.geometry", "Compare the pools of both sides before any traffic."),
    "timeline": Entry("replay.commands.timeline", "List what happened to a request or a page, in order."),
    "plot": Entry("replay.commands.plot", "Draw what a verdict names: stages, bytes, rows, owners, rates."),
    "report": Entry(
        "replay.commands.report", "Tell a verdict in one HTML file, or in Markdown for an issue."
    ),
    "bundle": Entry(
        "replay.commands.bundle", "Pack a fault for a bug report, without what says whose it is."
    ),
    "kernels": Entry("replay.commands.kernels", "Check the store and read kernels against the reference."),
    "explain": Entry("replay.commands.explain", "Explain a kind of fault, such as F09."),
    "env": Entry("replay.commands.env", "List the KV_REPLAY_* options and their values."),
    "trigger": Entry("replay.commands.trigger", "Tell a running capture that a reply was garbled."),
}
VERDICT = Entry("replay.commands.replay_trace", "Judge a trace.")
#: Name under which the default command runs; it is not in the help and cannot be mistaken for a file.
_VERDICT_NAME = "TRACE|FOLDER..."


def available() -> list[str]:
    """Names of the commands whose modules exist."""
    return [name for name, entry in COMMANDS.items() if importlib.util.find_spec(entry.module) is not None]


class Commands(click.Group):
    """A group that loads commands when they are called and takes anything else as traces to judge."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return available()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command called ``cmd_name``."""
        entry = VERDICT if cmd_name == _VERDICT_NAME else COMMANDS.get(cmd_name)
        if entry is None or (entry is not VERDICT and importlib.util.find_spec(entry.module) is None):
            return None
        found = importlib.import_module(entry.module).command
        if not isinstance(found, click.Command):
            raise TypeError(f"{entry.module}.command is not a click command")
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the verdict command in front of arguments that name no command."""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        first = next((i for i, arg in enumerate(args) if arg not in own), None)
        if first is not None and args[first] not in available():
            self._refuse_typo(ctx, args[first])
            args = [*args[:first], _VERDICT_NAME, *args[first:]]
        return super().parse_args(ctx, args)

    def _refuse_typo(self, ctx: click.Context, word: str) -> None:
        """A word that is neither a command, an option nor an existing path is a usage error."""
        if word.startswith("-") or Path(word).exists():
            return
        import difflib  # not for the help, which is to be quick

        near = difflib.get_close_matches(word, available(), n=1)
        hint = f" Did you mean 'replay {near[0]}'?" if near else " 'replay --help' lists the commands."
        raise click.UsageError(f"'{word}' is neither a command nor an existing trace or folder.{hint}", ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands, options, and files: the first word may be a trace."""
        from click.shell_completion import CompletionItem

        found = super().shell_complete(ctx, incomplete)
        return found if incomplete.startswith("-") else [*found, CompletionItem(incomplete, type="file")]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both forms: traces to judge, or a command."""
        formatter.write_usage(ctx.command_path, "TRACE|FOLDER... [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND ...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options of the verdict, general options, then the commands, one line each."""
        verdict = self.get_command(ctx, _VERDICT_NAME)
        assert verdict is not None
        for title, source in (("Verdict options", verdict), ("General options", self)):
            options = [param for param in source.get_params(ctx) if isinstance(param, click.Option)]
            if source is verdict:
                options = [option for option in options if "--help" not in option.opts]
            records = [option.get_help_record(ctx) for option in options]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])
        commands = [(name, COMMANDS[name].help) for name in self.list_commands(ctx)]
        if commands:
            with formatter.section("Commands"):
                formatter.write_dl(commands)


def _version() -> str:
    from importlib import metadata  # takes longer than all else that the help imports

    try:
        return metadata.version("kv-replay")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"kv-replay {_version()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
def cli(debug: bool) -> None:
    """Judge what happened to the KV-cache pages of a prefill/decode pair.

    Reads traces (.h5), journals (.journal) or folders of them and names the first stage at which a page is wrong.

    Exit codes: 0 clean or done, 1 divergent, 2 usage, 3 inconclusive or lossy, 4 unreadable trace,
    70 internal error, 130 interrupted, 141 closed pipe.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit the process with the right code."""
    for name, variable in COMPLETION.items():
        if variable in os.environ:
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(cli, {}, name, variable, os.environ[variable]))
    keep()
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it, as with >&-
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = EXIT_PIPE
    except KeyboardInterrupt:  # before or after the command itself
        code = EXIT_INTERRUPTED
    if code == EXIT_PIPE:
        _drop_output()
    done()
    sys.exit(code)


def run(args: list[str]) -> int:
    """Run the command line ``args`` and return its exit code."""
    debug = "--debug" in args[: args.index("--")] if "--" in args else "--debug" in args
    try:
        with cli.make_context("replay", [arg for arg in args if arg != "--debug"]) as ctx:
            result = cli.invoke(ctx)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE if isinstance(error, click.UsageError) else EXIT_INTERNAL
    except (KeyboardInterrupt, click.Abort):
        click.echo("replay: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _explain(error, debug)
    return result if isinstance(result, int) else 0


def _explain(error: Exception, debug: bool) -> int:
    """Say what went wrong and return the exit code for it."""
    code = _expected(error)
    if code is not None:
        click.echo(f"replay: {error}", err=True)
        return code
    if isinstance(error, OSError) and error.errno in _FULL:
        import tempfile

        from replay.writing import write_error

        if _in_echo(error):
            click.echo(
                "replay: cannot write the output: the disk where it goes is full. Make room on it", err=True
            )
            _drop_output()
            return EXIT_USAGE
        click.echo(f"replay: {write_error(Path(error.filename or tempfile.gettempdir()), error)}", err=True)
        return EXIT_USAGE
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename is not None:
        click.echo(f"replay: cannot use {os.fspath(error.filename)!r}: {error.strerror}", err=True)
        return EXIT_UNREADABLE
    import traceback

    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    click.echo(f"replay: internal error: {type(error).__name__}: {error}{place}", err=True)
    if not debug:
        click.echo(
            f"This is a fault of kv-replay {_version()}, not of your trace. Run the same command with --debug and "
            "report the traceback, together with 'replay info --json' of the trace where that works.",
            err=True,
        )
    return EXIT_INTERNAL


def _in_echo(error: Exception) -> bool:
    """Whether ``error`` came up while something was printed."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code is click.echo.__code__


def _drop_output() -> None:
    """Python flushes once more while it exits; give it somewhere to write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATH_ERRORS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)


#: Errors that are no fault of the program, by module and name, and their exit codes.
_EXPECTED = (
    ("replay.trace.errors", "TraceError", EXIT_UNREADABLE),
    ("capture_hooks.journal", "JournalError", EXIT_UNREADABLE),
    ("replay.writing", "WriteError", EXIT_USAGE),
    ("replay.rooms", "NotInTraceError", EXIT_USAGE),
)


def _expected(error: Exception) -> int | None:
    """The exit code of an error that has its own sentence. Looks only at modules that are loaded already."""
    for module, name, code in _EXPECTED:
        kind: Any = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(error, kind):
            return code
    return None


loaded()
