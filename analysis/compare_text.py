"""A comparison of two traces in words and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from analysis.finding_text import count_text, extent_text
from analysis.printable import printable
from replay.align import Pair
from replay.compare_reads import LOGITS_TOLERANCE
from replay.comparison import SCHEMA, Comparison, Difference
from replay.words import counted

WIDTH = 80
_INDENT = 14
_BY = {"room": "by room", "rid": "by the hash of the client's id", "order": "by the order of equal lengths"}
#: What a difference between two runs does not prove.
NOTE = (
    f"Two right runs may differ: kernels are not deterministic (about {LOGITS_TOLERANCE:g} in the logits, and stored "
    "keys follow), and a prompt that reused a prefix may have been computed otherwise than one that did not. A "
    "difference says where to look; the verdict on one trace says what is wrong."
)


def comparison_text(found: Comparison, verbose: bool = False) -> str:
    """``found`` as lines of at most 80 columns: the first difference, and with ``verbose`` all of them."""
    if not found.comparable:
        head, lines = "NOTHING COMPARABLE", ["no look at a page and no read has a partner in the other trace"]
    elif found.differences:
        head, lines = "DIFFERENT", [_first_line(found.differences[0])]
    else:
        head, lines = "EQUAL", ["all that both traces show is the same"]
    out = textwrap.wrap(f"{head}  {lines[0]}", WIDTH, subsequent_indent=" " * (len(head) + 2))
    if found.differences:
        first = found.differences[0]
        out += _section("request", _pair_text(first.pair))
        out += _section("where", _where(first))
        if len(found.differences) > 1:
            out += _section("in all", _counts(found.differences))
    out += _section("aligned", _aligned(found))
    if found.compared:
        out += _section("compared", ", ".join(f"{stage} {n:,}" for stage, n in found.compared.items() if n))
    if found.not_compared:
        left_out = [f"{counted(n, 'look')}: {why}" for why, n in found.not_compared.items()]
        out += _section("left out", "; ".join(left_out))
    if found.largest_logit_difference:
        out += _section(
            "logits", f"differ by at most {found.largest_logit_difference:.2g} of the largest one"
        )
    if found.differences:
        out += _section("note", NOTE)
    if verbose and found.differences:
        out += ["", *_table(found.differences)]
    return "\n".join(out)


def comparison_json(found: Comparison) -> dict[str, Any]:
    """``found`` as plain JSON types, schema ``kv-replay/diff/1`` (docs/diff-json.md)."""
    return {
        "schema": SCHEMA,
        "result": "nothing comparable"
        if not found.comparable
        else "different"
        if found.differences
        else "equal",
        "aligned": [asdict(pair) for pair in found.pairs],
        "alone": {"good": found.alone_good, "bad": found.alone_bad},
        "compared": found.compared,
        "not_compared": [{"why": why, "looks": n} for why, n in found.not_compared.items()],
        "differences": [asdict(item) for item in found.differences],
        "largest_logit_difference": found.largest_logit_difference,
        "logits_tolerance": LOGITS_TOLERANCE,
        "note": NOTE,
    }


def _section(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(printable(text), WIDTH - _INDENT, break_on_hyphens=False) or [""]
    return [f"  {label}".ljust(_INDENT) + lines[0], *(" " * _INDENT + line for line in lines[1:])]


def _first_line(first: Difference) -> str:
    what = "rows that the reading side wrote" if first.appended else "first difference"
    return f"{first.stage}: {what} at {first.look or 'the read'}"


def _pair_text(pair: Pair) -> str:
    names = [
        f"room {room}" + (f" attempt {attempt}" if attempt else "") for room, attempt in (pair.good, pair.bad)
    ]
    return f"{names[0]} of the good run = {names[1]} of the bad run, aligned {_BY[pair.by]}"


def _where(item: Difference) -> str:
    text = f"{item.role} rank {item.rank}, {item.buffer} layer {item.layer}"
    if item.read >= 0:
        text += f", read {item.read}"
    if item.logical >= 0:
        text += f", logical page {item.logical} (page {item.page_good} = page {item.page_bad})"
    return ", ".join([text, *_extent(item)])


def _extent(item: Difference) -> list[str]:
    return [item.detail] if item.detail else [*extent_text(item), *count_text([item])]


def _counts(differences: Sequence[Difference]) -> str:
    stages = Counter(item.stage for item in differences)
    requests = len({id(item.pair) for item in differences})
    told = ", ".join(f"{n:,} at the {stage}" for stage, n in stages.items())
    return f"{counted(len(differences), 'difference')} in {requests:,} of the requests: {told}; -v lists them"


def _aligned(found: Comparison) -> str:
    ways = Counter(pair.by for pair in found.pairs)
    text = "; ".join(f"{counted(n, 'request')} {_BY[by]}" for by, n in ways.items()) or "no request"
    for name, alone in (("good", found.alone_good), ("bad", found.alone_bad)):
        if alone:
            text += f"; {len(alone):,} of the {name} run without a partner"
    return text


def _table(differences: Sequence[Difference]) -> list[str]:
    lines = []
    for item in differences:
        rooms = f"{item.pair.good[0]}={item.pair.bad[0]}"
        page = f"page {item.logical}" if item.logical >= 0 else f"read {item.read}"
        own = ", appended" if item.appended else ""
        where = f"{item.role} {item.rank}, {item.buffer} {item.layer}, {page}"
        head = f"{item.stage} {item.look}{own}, room {rooms}, {where}"
        text = printable(f"{head}: {', '.join(_extent(item))}")
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return lines
