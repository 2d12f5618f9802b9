"""``replay env``: the KV_REPLAY_* options, what they are set to, and what is wrong with them."""

from __future__ import annotations

import os
import textwrap

import click

from capture_hooks.options import OPTIONS, Option, Options
from replay.commands.output import to_json

SCHEMA = "kv-replay/env/1"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the options and warnings as JSON alone.")
@click.option(
    "--markdown", is_flag=True, help="Print the table of docs/options.md, without the values set here."
)
def command(as_json: bool, markdown: bool) -> None:
    """List the KV_REPLAY_* options: current value, default and meaning.

    Values are read as the capture would read them. Unknown names and bad values are warned of on standard error.
    """
    if markdown:
        click.echo(markdown_table(), nl=False)
        return
    options, warnings = Options.from_environ(os.environ)
    if as_json:
        body = [_as_json(option, options) for option in OPTIONS]
        click.echo(to_json({"schema": SCHEMA, "options": body, "warnings": warnings}))
        return
    for option in OPTIONS:
        value, default = option.show(getattr(options, option.name)), option.show(option.default)
        said = value or "(unset)"
        if value != default:
            said += f"  (default {default or 'unset'})"
        click.echo(f"{option.env}={said}")
        click.echo(textwrap.fill(option.help, 80, initial_indent="    ", subsequent_indent="    "))
    for warning in warnings:
        click.echo(f"replay: warning: {warning}", err=True)


def _as_json(option: Option, options: Options) -> dict[str, object]:
    return {
        "name": option.name,
        "env": option.env,
        "type": option.type,
        "value": getattr(options, option.name),
        "default": option.default,
        "set": option.env in os.environ,
        "help": option.help,
    }


def markdown_table() -> str:
    """The text of ``docs/options.md``; a test holds the file to it."""
    lines = [
        "# Options",
        "",
        "Environment variables of the capture, read once when a process starts. `replay env` shows them with the",
        "values that are set, and names what it does not know. This page is made by `make docs`.",
        "",
        "| variable | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for option in OPTIONS:
        default = f"`{option.show(option.default)}`" if option.show(option.default) else "unset"
        lines.append(
            f"| `{option.env}` | {option.type} | {default} | {option.help.replace('|', chr(92) + '|')} |"
        )
    lines += [
        "",
        "Sizes take a plain number of bytes, `4GB` (powers of 1000), or `4GiB` and `4G` (powers of 1024). A value that",
        "does not parse never stops the server: the default is used and a warning says so.",
    ]
    return "\n".join(lines) + "\n"
