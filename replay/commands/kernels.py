"""``replay kernels``: check the store and read kernels, or a user's own, against the float64 reference."""

from __future__ import annotations

from typing import Any

import click

from capture_hooks.layouts import LAYOUTS
from replay.commands.kernel_names import check_kernels, kernel_name
from replay.commands.output import Progress, paragraph, to_json
from replay.verdict import EXIT_CLEAN, EXIT_DIVERGENT, EXIT_INCONCLUSIVE
from replay.words import counted, verb

SCHEMA = "kv-replay/kernels/1"


@click.command()
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(sorted(LAYOUTS)),
    help="Only this format; repeatable.",
)
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1, 256), help="Only this batch size; repeatable."
)
@click.option("--rows", type=click.IntRange(1, 1 << 20), help="Rows of the longest request.")
@click.option(
    "--read-kernel", metavar="MODULE:FUNCTION", callback=kernel_name, help="Check this read kernel too."
)
@click.option(
    "--store-kernel", metavar="MODULE:FUNCTION", callback=kernel_name, help="Check this store kernel too."
)
@click.option(
    "--accumulator-bits",
    type=click.IntRange(1, 24),
    help="Fraction bits that the read kernel's tensor cores keep while they add: 13 for fp8 on Hopper.",
)
@click.option(
    "--hadamard-product", is_flag=True, help="The store kernel makes its Hadamard step as a matrix product."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds for one call of a user's kernel.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the made-up keys and queries.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON alone.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show the traceback of a kernel that could not be judged."
)
def command(
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    rows: int | None,
    read_kernel: str | None,
    store_kernel: str | None,
    accumulator_bits: int | None,
    hadamard_product: bool,
    timeout: float,
    seed: int,
    as_json: bool,
    verbose: bool,
) -> int:
    """Check the store and read kernels against the float64 reference.

    Begins with the casts and dot products of the Triton that runs here. Then the kernels of this package, and a user's
    own where named (docs/kernels.md has the signatures), store rows and read batches of requests of one length and of
    varied lengths. Errors are relative to the bound that is derived for each number: up to 1 is right.

    Exit codes: 0 all right, 1 something outside its bound, 2 a user's kernel that cannot be found, 3 one that could not
    be judged.
    """
    check_kernels({"--read-kernel": read_kernel, "--store-kernel": store_kernel}, timeout)
    from replay.kernels import launch

    try:
        device = launch.prepare()
    except RuntimeError as error:
        raise click.UsageError(str(error)) from error
    # These decide at import whether Triton interprets, so they come after `prepare`.
    from replay.kernels import check
    from replay.kernels.selfcheck import self_check

    batches = tuple(dict.fromkeys(batches)) or (1, 8, 32)
    plan = check.Plan(
        formats=tuple(dict.fromkeys(formats)) or tuple(LAYOUTS),
        batches=batches,
        device=device,
        seed=seed,
        accumulator_bits=accumulator_bits,
        hadamard_terms=127 if hadamard_product else 7,
        rows={} if rows is None else dict.fromkeys(batches, rows),
    )
    casts = self_check(device)
    if not as_json:
        _show_casts(casts)
    stores: list[check.StoreResult] = []
    reads: list[check.ReadResult] = []
    total = len(plan.formats) * (1 + 2 * len(batches)) + len(plan.formats) * (
        (store_kernel is not None) + 2 * len(batches) * (read_kernel is not None)
    )
    with Progress() as progress:
        sources: list[tuple[str, Any, list[Any]]] = [
            ("store", check.check_stores(plan), stores),
            ("read", check.check_reads(plan), reads),
        ]
        if store_kernel is not None:
            sources.append(
                (f"store {store_kernel}", check.check_user_stores(plan, store_kernel, timeout), stores)
            )
        if read_kernel is not None:
            sources.append((f"read {read_kernel}", check.check_user_reads(plan, read_kernel, timeout), reads))
        for what, results, into in sources:
            progress(f"checking {what}", len(stores) + len(reads), total)
            for result in results:
                into.append(result)
                progress(f"checking {what}", len(stores) + len(reads), total)
    statuses = {result.status for result in stores} | {result.status for result in reads}
    code = (
        EXIT_DIVERGENT
        if "wrong" in statuses
        else EXIT_INCONCLUSIVE
        if "not judged" in statuses
        else EXIT_CLEAN
    )
    if as_json:
        body = {
            "schema": SCHEMA,
            "engine": casts.engine,
            "casts": [{"name": c.name, "right": c.right, "detail": c.detail} for c in casts.conversions],
            "store": [check.as_json(result) for result in stores],
            "read": [check.as_json(result) for result in reads],
            "right": code == EXIT_CLEAN,
        }
        click.echo(to_json(body))
        return code
    wide = max(map(len, [*(r.kernel for r in stores), *(r.kernel for r in reads)])) + 2
    _show_stores(stores, wide)
    _show_reads(reads, wide)
    _show_end(stores, reads, verbose)
    return code


def _show_casts(casts: Any) -> None:
    click.echo(f"Casts and dot products: {casts.engine}")
    for conversion in casts.conversions:
        head = f"  {'right' if conversion.right else 'WRONG':<6} {conversion.name:<22} "
        click.echo(
            paragraph(conversion.detail, head, " " * len(head)) if conversion.detail else head.rstrip()
        )
    if casts.wrong:
        text = (
            "The kernels of this package use none of the wrong ones; a user's kernel that does is not judged."
        )
        click.echo(paragraph(text, "  "))


def _number(value: float) -> str:
    return f"{value:.2g}" if value == value and abs(value) != float("inf") else "inf"


def _show_stores(results: list[Any], wide: int) -> None:
    click.echo("\nStore against the reference (error: largest distance over its bound)")
    click.echo(
        f"  {'kernel':<{wide}}{'format':<8}{'rows':>8}{'error':>9}{'wrong':>7}{'unequal':>9}{'seconds':>9}"
    )
    for r in results:
        line = f"  {r.kernel:<{wide}}{r.format:<8}{r.rows:>8,}"
        if r.status == "not judged":
            click.echo(f"{line}  not judged")
            continue
        click.echo(
            f"{line}{_number(r.error):>9}{r.wrong_rows:>7,}{r.unequal_rows:>9,}{r.seconds:>9.2f}{_mark(r)}"
        )


def _show_reads(results: list[Any], wide: int) -> None:
    click.echo("\nRead against the reference (error: the largest over its bound; top-512: Jaccard)")
    columns = f"{'kernel':<{wide}}{'format':<8}{'batch':>5}  {'lengths':<9}{'rows':>8}"
    click.echo(f"  {columns}{'error':>9}{'wrong':>7}{'top-512':>9}{'seconds':>9}")
    for r in results:
        line = f"  {r.kernel:<{wide}}{r.format:<8}{r.batch:>5}  {r.lengths:<9}{r.rows:>8,}"
        if r.status == "not judged":
            click.echo(f"{line}  not judged")
            continue
        click.echo(
            f"{line}{_number(r.error):>9}{r.wrong_rows:>7,}{r.jaccard:>9.4f}{r.seconds:>9.2f}{_mark(r)}"
        )


def _mark(result: Any) -> str:
    if result.status == "right":
        return ""
    notes = []
    if getattr(result, "stray_bytes", 0):
        notes.append(f"{counted(result.stray_bytes, 'byte')} changed outside the rows")
    if getattr(result, "invalid_top_k", 0):
        notes.append(f"top-k of {counted(result.invalid_top_k, 'request')} does not follow from its logits")
    return "  WRONG" + (f": {', '.join(notes)}" if notes else "")


def _show_end(stores: list[Any], reads: list[Any], verbose: bool) -> None:
    reasons = {r.why: r.detail for r in (*stores, *reads) if r.why}
    for why, detail in reasons.items():
        click.echo(f"\nNot judged: {why}")
        if detail and verbose:
            click.echo(detail)
        elif detail:
            click.echo("(--verbose shows more)")
    rows = sum(r.rows for r in reads)
    counts = {
        status: sum(r.status == status for r in stores) + sum(r.status == status for r in reads)
        for status in ("wrong", "not judged")
    }
    wrong = counts["wrong"]
    said = (
        f"{wrong} outside {verb(wrong, 'its bound', 'their bounds')}" if wrong else "none outside its bound"
    )
    if counts["not judged"]:
        said += f", {counts['not judged']} not judged"
    checked = f"{counted(len(stores), 'store')} and {counted(len(reads), 'read')}"
    click.echo(f"\n{checked} ({counted(rows, 'row')} read): {said}")
