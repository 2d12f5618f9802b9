"""The figures as a page of the docs."""

from __future__ import annotations

from typing import Any

_HEAD = """# How often the judge is right

Made by `make accuracy` (`python -m benchmarks.accuracy --markdown docs/accuracy.md`); do not edit. A
simulated prefill/decode pair writes one trace for each kind of fault, page format and seed, with 10 to 30
other requests around; the judge gets the trace alone, and its verdict is compared with what really happened.

| figure | |
|---|---|
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
part of them: one or two pipeline stages, layers on one side only, a second component, a host tier,
speculative rows with and without moves, slot translations, metadata slots, scales that are powers of two,
sender threads, and recordings of digests alone. Sizes are log-uniform from 1 to 200 pages. One third of the
clean traces lost 0.1 to 5 % of their records, and says so as the recorder does.

## What it cannot show

- Time. Steps are interleaved at random; nothing takes as long as it would, and clocks say nothing.
- A device. There are no streams and no graphs; looks are instants, and a look that itself changes timing is
  not modelled.
- Real keys. Rows are random with some spread: scales and logits of a model are distributed otherwise.
- Tensor-parallel slices of a row: the page formats have none. F06 is a sub-range of a page; "all ranks
  identical" is not made.
- F24 has the formats that a wrong tag can name; F21 gives zeros, not foreign data.
- Two faults at once, hooks that are missing, journals that are cut, clocks of two hosts: tests of their own
  have these.
- The faults are those that we thought of. A real engine has others.
"""


def page(figures: dict[str, Any]) -> str:
    """The page, from the JSON figures."""
    lines = [f"| {words} | {_value(name, figures[name])} |" for name, words in _WORDS.items()]
    return _HEAD + "\n".join(lines) + "\n" + _matrix(figures) + _kinds(figures) + _TAIL


def _value(name: str, value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{100 * value:.1f} %" if isinstance(value, float) else f"{value:,}"


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
        shares = [_value("", found[name]) for name in ("stage_right", "kind_right", "certain_of_right")]
        lines.append("| " + " | ".join([code, str(found["traces"]), *shares]) + " |")
    return "\n".join(lines) + "\n"
