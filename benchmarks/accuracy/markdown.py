"""The figures as a page of the docs."""

from __future__ import annotations

from typing import Any

_HEAD = """# How often the judge is right

Made by `make accuracy` (`python -m benchmarks.accuracy --markdown docs/accuracy.md`); do not edit. A
simulated prefill/decode pair writes one trace for each kind of fault, page format and seed, with 10 to 30
other requests around; the judge gets the trace alone, and its verdict is compared with what really happened.

{made}

| figure | measured | asked for |
|---|---|---|
"""

_WORDS = {
    "kinds": "kinds of fault",
    "traces": "traces with a fault in them",
    "stage_right": "right stage",
    "kind_right": "right stage and right kind",
    "certain_of_right": "of the right ones, those marked `certain`",
    "wrong_certain": "traces with a wrong kind marked `certain`",
    "clean_requests": "fault-free requests",
    "accusations": "findings on them",
    "clean_of_lossless": "of those in traces without loss, those whose verdict is `clean`",
}

#: Figure -> what is asked of it: no less than (or, where no finding may be, no more than) this.
_BARS = {
    "kinds": 31,
    "stage_right": 1.0,
    "kind_right": 0.98,
    "certain_of_right": 0.8,
    "wrong_certain": 0,
    "clean_requests": 20_000,
    "accusations": 0,
    "clean_of_lossless": 0.99,
}

_TAIL = """
## What is counted

- The *answer* is the first finding about the request that the fault hit, in the judge's own order. It is
  right if its code and its stage are those of the fault. `unclassified` at the right stage counts for the
  stage and not for the kind.
- *wrong kind marked certain* counts findings on any request of the trace.
- F01 beside F05 is no mistake: layers that nobody writes because of a wrong pairing are missing from the
  transfer, too.
- The Triton sample is left out (`reexecute=False`): the float64 reference judges all stores and reads.

## What the generator does

Both sides keep their memory byte for byte. Every look is a copy of it, and every record says what the engine
did, so a fault's traces follow from what was done and not from what is known about its signature. The truth
is kept beside the trace; the generator shares no code with the classifiers (an import contract), has number
formats and kernels of its own, and a test shows that no trace carries a label.

In every trace: page allocators with reuse, chunked prefill, several requests at a time in random order,
prefixes shared physically or as copies, aborts with and without retry, warm-up and health requests, steps
that overshoot, rows appended by decode, padding rows in slot 0, page ids that differ between the sides. In
part of them: one or two pipeline stages, several prefill ranks that each send their slice of every page or of
every row, layers on one side only, a second component, a host tier that counts pages or rows, speculative
rows with and without moves, slot translations, metadata slots, scales that are powers of two, sender threads,
and recordings of digests alone. In part of the clean ones, running requests lose their pages to the host tier
and come back to others, and pages that only rejected drafts had needed are given back. Sizes are log-uniform
from 1 to 200 pages. One third of the clean traces lost 0.1 to 5 % of their records, and says so as the
recorder does.

## What it cannot show

- Time. Steps are interleaved at random; nothing takes as long as it would, and clocks say nothing.
- A device. There are no streams and no graphs; looks are instants, and a look that itself changes timing is
  not modelled.
- Real keys. Rows are random with some spread: scales and logits of a model are distributed otherwise.
- F24 has the formats that a wrong tag can name. F23 stores a row, not a NaN in the reserved slot 0. F08 cuts
  what goes to the host tier and comes back, not what a move within the device carries.
- Two faults at once, hooks that are missing, journals that are cut, clocks of two hosts: tests of their own
  have these.
- The faults are those that we thought of. A real engine has others.
"""


def page(figures: dict[str, Any]) -> str:
    """The page, from the JSON figures."""
    lines = [
        f"| {words} | {_value(figures[name])} | {_bar(name, figures[name])} |"
        for name, words in _WORDS.items()
    ]
    made = figures["made"]
    told = f"Measured on {made['date']} at commit {made['commit']}: {made['machine']}"
    told += f", {made['cpu_minutes']} minutes of CPU time."
    head = _HEAD.format(made=told) + "\n".join(lines) + "\n"
    return head + _matrix(figures) + _kinds(figures) + _not_right(figures) + _TAIL


def _value(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{100 * value:.2f} %" if isinstance(value, float) else f"{value:,}"


def _bar(name: str, value: Any) -> str:
    if name not in _BARS:
        return ""
    bar = _BARS[name]
    met = value is not None and (value <= bar if bar == 0 else value >= bar)
    share = f"at least {100 * bar:.0f} %" if bar < 1 else "100 %"
    asked = share if isinstance(bar, float) else f"at least {bar:,}" if bar else "0"
    return asked if met else f"{asked}: **missed**"


def _matrix(figures: dict[str, Any]) -> str:
    lines = ["", "## Answers", "", "| fault | answers | | |", "|---|---|---|---|"]
    for code, row in figures["matrix"].items():
        best = sorted(row.items(), key=lambda item: (item[0] != code, -item[1], item[0]))
        shown = [f"{answer} {count}" for answer, count in best]
        lines.append("| " + " | ".join([code, *[*shown, "", ""][:2], ", ".join(shown[2:])]) + " |")
    return "\n".join(lines) + "\n"


def _kinds(figures: dict[str, Any]) -> str:
    lines = [
        "",
        "## By kind",
        "",
        "| fault | traces | right stage | right kind | certain of right |",
        "|---|---|---|---|---|",
    ]
    for code, found in figures["details"].items():
        shares = [_value(found[name]) for name in ("stage_right", "kind_right", "certain_of_right")]
        lines.append("| " + " | ".join([code, str(found["traces"]), *shares]) + " |")
    return "\n".join(lines) + "\n"


def _not_right(figures: dict[str, Any]) -> str:
    """Every trace that was not right, by what it takes to make it again."""
    lines = [
        f"- {code} {line}"
        for code, found in figures["details"].items()
        for line in [
            *found.get("not_right", []),
            *(f"{line} (wrong and certain)" for line in found.get("wrong_certain", [])),
            *(f"{line} (a request that the fault did not touch)" for line in found.get("bystanders", [])),
        ]
    ]
    lines += [f"- clean {line}" for line in figures["fair"]]
    text = "\n".join(lines) if lines else "Nothing."
    return f"\n## Not right\n\nFault, variant, format and seed, and the answer.\n\n{text}\n"
