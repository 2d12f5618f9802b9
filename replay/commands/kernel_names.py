"""The options that name a user's kernel: their form, and whether the kernel is there."""

from __future__ import annotations

from collections.abc import Mapping

import click

from replay.kernels.userkernel import find_kernels, parse_spec


def kernel_name(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the form ``module:function``; the module is imported in the child process that runs it."""
    if value is not None:
        try:
            parse_spec(value)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param=param) from None
    return value


def check_kernels(named: Mapping[str, str | None], timeout: float) -> None:
    """Refuse kernels that cannot be found, before anything is judged.

    ``named`` maps options to what was given; ``timeout`` is in seconds for the import of one module.
    """
    given = {option: spec for option, spec in named.items() if spec is not None}
    if not given:
        return
    wrong = [
        f"{option} {given[option]}: {error.reason}"
        for option, error in zip(given, find_kernels(list(given.values()), timeout), strict=True)
        if error is not None
    ]
    if wrong:
        raise click.UsageError("; ".join(wrong).rstrip(".?") + ("?" if wrong[-1].endswith("?") else "."))
