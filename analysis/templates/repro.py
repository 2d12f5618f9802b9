"""Shows the differences that the enclosed verdict names, from ``pages.npz`` beside this file. Needs numpy alone.

    python repro.py

Each case is told in one or two lines. The exit code is 0 when every enclosed difference is there, 1 otherwise, and 141
when the reader of the output went away.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

Array = Any


def runs(mask: Array) -> str:
    """Closed ranges of the true entries: ``0..3, 7``."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    pairs = list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True))
    shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in pairs[:6])
    return (shown or "none") + (" ..." if len(pairs) > 6 else "")


def split(case: dict[str, Any], page: Array) -> tuple[Array, Array]:
    """Values [rows, value_bytes] and scales [rows, scale_bytes] of one page; all values lie before all scales."""
    border = case["rows"] * case["value_bytes"]
    values = page[:border].reshape(case["rows"], case["value_bytes"])
    return values, page[border : border + case["rows"] * case["scale_bytes"]].reshape(case["rows"], -1)


def small_float(code: Array, exponent: int, mantissa: int, bias: int) -> Array:
    """A float of few bits: sign, exponent, mantissa."""
    sign = np.where(code >> (exponent + mantissa) & 1, -1.0, 1.0)
    power = (code >> mantissa & ((1 << exponent) - 1)).astype(np.int64)
    rest = (code & ((1 << mantissa) - 1)) / 2.0**mantissa
    return sign * np.where(power == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (power - bias))


def decoded(case: dict[str, Any], values: Array, scales: Array) -> Array:
    """Keys [rows, head_dim] in float64."""
    if case["value_type"] == "bf16":
        bits = np.ascontiguousarray(values).view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if case["value_type"] == "e2m1":
        codes = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
        keys = small_float(codes, 2, 1, 1)
    else:
        keys = np.where((values & 127) == 127, np.nan, small_float(values, 4, 3, 7))
    if case["scale_type"] == "fp32":
        factors = np.ascontiguousarray(scales).view("<f4").astype(np.float64)
    else:
        factors = 2.0 ** (scales.astype(np.float64) - 127)
    return keys * np.repeat(factors, case["scale_block"], axis=1)


def show_page(case: dict[str, Any], data: dict[str, Array]) -> bool:
    """The page where it was right against the page where it was wrong."""
    (right, scales), (seen, seen_scales) = split(case, data["right"]), split(case, data["seen"])
    values_differ, scales_differ = (right != seen).any(axis=1), (scales != seen_scales).any(axis=1)
    # Rows that the prompt does not fill may differ: they are nobody's claim.
    named = np.zeros((2, case["rows"]), bool)
    for number, ranges in enumerate((case["value_rows"], case["scale_rows"])):
        for first, last in ranges:
            named[number, first : last + 1] = True
    count = int((right != seen)[named[0]].sum() + (scales != seen_scales)[named[1]].sum())
    print(f"    {count} bytes differ; rows: values {runs(values_differ & named[0])}; scales "
          f"{runs(scales_differ & named[1])}")  # fmt: skip
    if "donor" in data:
        donor, donor_scales = split(case, data["donor"])
        rows = named[0] | named[1]
        same = int(((seen == donor).all(axis=1) & (seen_scales == donor_scales).all(axis=1))[rows].sum())
        print(f"    {same} of {int(rows.sum())} of these rows are those of {case['donor']}")
    if not data["seen"].any():
        print("    the page is all zero")
    keys = decoded(case, right, scales), decoded(case, seen, seen_scales)
    row = int(np.argmax(named[0] | named[1]))
    print(f"    row {row} begins {np.array2string(keys[1][row, :4], precision=4)} and should begin "
          f"{np.array2string(keys[0][row, :4], precision=4)}")  # fmt: skip
    return count > 0 and case["bytes_differing"] in (None, count)


def show_rows(case: dict[str, Any], data: dict[str, Array]) -> bool:
    """The same where only digests of the rows were kept."""
    values = data["right_values"] != data["seen_values"]
    scales = data["right_scales"] != data["seen_scales"]
    print(f"    by digest; rows: values {runs(values)}; scales {runs(scales)}")
    return bool(values.any() or scales.any())


def show_table(case: dict[str, Any], data: dict[str, Array]) -> bool:
    """The block table that the read used against the pages that the request was given."""
    for logical, seen, given in zip(*(data[name][:8] for name in ("logical", "seen", "given")), strict=True):
        print(f"    entry {logical}: the read used page {seen}, the allocator gave page {given}")
    return bool((data["seen"] != data["given"]).all())


def show_read(case: dict[str, Any], data: dict[str, Array]) -> bool:
    """The recorded logits and top-k against float64 on the pages that the read saw."""
    keys = np.concatenate([decoded(case, *split(case, page)) for page in data["pages"]])[: case["length"]]
    dots = np.maximum(keys @ data["query"].astype(np.float64).T, 0.0)
    logits = dots @ data["weights"].astype(np.float64)
    error = np.abs(data["logits"].astype(np.float64) - logits)
    worst = int(np.argmax(np.nan_to_num(error, nan=np.inf)))
    print(f"    step {case['step']}, {case['length']} rows: the largest error is {error[worst]:.3g} in row {worst} "
          f"(logit {data['logits'][worst]:.6g}, should be {logits[worst]:.6g})")  # fmt: skip
    judged = np.isfinite(data["bound"])
    beyond = int((~(error <= data["bound"]) & judged).sum())
    print(f"    {beyond} of {case['length']} logits are farther off than an fp32 kernel may be")
    wrong = beyond > 0
    wanted = min(case["k"], case["length"])
    if wanted <= 0 or not len(data["top_k"]):
        return wrong
    head = data["top_k"][:wanted]
    valid = (head >= 0) & (head < case["length"])
    threshold = np.sort(data["logits"][: case["length"]])[-wanted]
    low = int((data["logits"][head[valid]] < threshold).sum())
    repeated = int(valid.sum()) - len(np.unique(head[valid]))
    print(f"    top-{case['k']}: {wanted - int(valid.sum())} invalid entries, {repeated} repeated, {low} below the "
          f"{wanted}th largest logit")  # fmt: skip
    return wrong or low > 0 or repeated > 0 or not valid.all()


def show_store(case: dict[str, Any], data: dict[str, Array]) -> bool:
    """The stored rows against the store done again in float64."""
    keys, right = decoded(case, data["values"], data["scales"]), data["reference"]
    error = np.nan_to_num(np.abs(keys - right), nan=np.inf)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    codes, scales = int(data["wrong_codes"].sum()), int(data["wrong_scales"].sum())
    print(f"    page {case['page']}, rows {', '.join(map(str, data['row'][:8].tolist()))}: {codes} values and {scales} "
          "scales are none that rounding could give")  # fmt: skip
    print(f"    row {data['row'][worst[0]]}, dimension {worst[1]}: stored {keys[worst]:.4g}, should be about "
          f"{right[worst]:.4g}")  # fmt: skip
    return codes + scales > 0


SHOW = {"page": show_page, "rows": show_rows, "table": show_table, "read": show_read, "store": show_store}


def main() -> int:
    """Show every case."""
    with np.load(Path(__file__).with_name("pages.npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    cases = json.loads(arrays.pop("cases").tobytes())
    shown = 0
    for number, case in enumerate(cases):
        place = f"room {case['room']}, {case['cache']} layer {case['layer']}"
        place += f", logical page {case['logical']} (page {case['page']})" if "logical" in case else ""
        place += f": {case['wrong_at']} against {case['right_at']}" if "wrong_at" in case else ""
        print(f"{case['stage']}: {case['finding']}\n    {place}")
        data = {n.partition(".")[2]: a for n, a in arrays.items() if n.partition(".")[0] == str(number)}
        there = SHOW[case["kind"]](case, data)
        shown += there
        print("    the difference is there" if there else "    NOT as the verdict says")
    print(
        f"{shown} of {len(cases)} differences shown" if cases else "the verdict names no difference to show"
    )
    return 0 if shown == len(cases) else 1


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is not there: unpack the whole bundle, and run this file where it lies")
    except BrokenPipeError:
        # Python flushes once more while it exits; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
