"""Every fault of the lab, in every format: the verdict against what truly happened.

The interleaving is held by barriers on the engine's own code path (``replay/lab/forced.py``). All rounds run
through one pair of processes, and the lab's audit, which no replay reads, is the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from capture_hooks.layouts import LAYOUTS
from replay.judge import JudgeOptions, judge
from replay.lab.audit import Truth
from replay.lab.forced import Forced, forced
from replay.lab.run import Pair, RunResult
from replay.trace.reader import open_trace
from replay.verdict import Verdict
from tests.integration.lab_deeds import DEEDS
from tests.integration.lab_rounds import journals

SEEDS = range(5)
#: Fault of the lab -> code and stage of the verdict.
EXPECTED = {
    "wrong-item-length": ("F03", "descriptor"),
    "sent-before-written": ("F10", "source"),
    "completion-early": ("F09", "completion"),
    "late-foreign-write": ("F14", "destination"),
    "torn-block-table": ("F18", "table"),
    "wrong-store-bytes": ("F30", "store"),
    "kernel-numerics": ("F25", "read-kernel"),
}

#: Faults that need no race: one seed each.
ALWAYS = {
    "buffer-missing": ("F01", "descriptor"),
    "wrong-layer-pairing": ("F05", "descriptor"),
    "list-too-short": ("F02", "descriptor"),
    "partial-slice": ("F06", "descriptor"),
    "length-off-by-one": ("F19", "table"),
    "number-format": ("F24", "read-kernel"),
    "invalid-top-k": ("F26", "top-k"),
    "wrong-top-k": ("F27", "top-k"),
}
#: Faults with a twin that is held at the same points: one seed each.
TWINNED = {
    "wrong-page-id-space": ("F04", "descriptor"),
    "source-overwritten": ("F11", "source"),
    "component-late": ("F12", "completion"),
    "failed-transfer-used": ("F13", "wire"),
    "local-clear": ("F15", "destination"),
    "freed-page-referenced": ("F16", "destination"),
    "padding-row-written": ("F23", "store"),
    "metadata-mix-up": ("F28", "completion"),
}
#: What else such a fault leaves behind: the layer that nobody was paired with.
BESIDES = {"wrong-layer-pairing": {("F01", "descriptor"), ("unclassified", "descriptor")}}

Place = tuple[int, int, int]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as running:
        yield running


def run_round(
    pair: Pair,
    folder: Path,
    kind: str,
    format_: str,
    seed: int,
    *,
    twin: bool,
    more_rules: Mapping[str, str] | None = None,
) -> tuple[RunResult, Verdict, Forced]:
    """One round, and the verdict on what was captured in it."""
    flags = folder / "flags"
    flags.mkdir(parents=True)
    wanted = forced(kind, format_, seed, flags, twin=twin)
    capture = folder / "capture"
    config = replace(wanted.config, rules={**wanted.config.rules, **(more_rules or {})})
    result = pair.run(config, capture, {"KV_REPLAY_MODE": "full", "KV_REPLAY_SEAL": "0"})
    assert result.stats["timeouts"] == [], "the interleaving was not forced"
    with open_trace(capture) as trace:
        verdict = judge(trace, JudgeOptions(sample=0))
    return result, verdict, wanted


def places(verdict: Verdict) -> set[Place]:
    return {
        (finding.request.room, finding.layer, page.logical)
        for finding in verdict.findings
        for page in finding.pages
    }


def check_places(kind: str, verdict: Verdict, truth: Truth) -> None:
    """Requests, layers and pages against the truth."""
    named = places(verdict)
    read = truth.bad_at["read"] | truth.bad_at["end"]
    if kind == "torn-block-table":
        torn = {(room, layer) for room, layer, _ in truth.torn_tables}
        found = {(f.request.room, f.layer): f.confidence for f in verdict.findings}
        # A table that changed between the kernel and the look after it is likely, in the same request, never certain.
        assert torn <= set(found)
        assert all(place in torn or confidence == "likely" for place, confidence in found.items())
        assert {room for room, _ in found} == {room for room, _ in torn}
    elif kind == "wrong-store-bytes":
        assert {(room, page) for room, _, page in named} == truth.wrong_positions
    elif kind == "kernel-numerics":
        assert {room for room, _, _ in named} == truth.hit
    elif kind == "completion-early":
        # The audit looks once a step has run through all layers; an early layer may have been read torn before.
        assert read <= named <= read | truth.bad_at["arrived"]
    else:
        assert named == read


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("format_", sorted(LAYOUTS))
def test_the_fault_is_named_where_it_happened_and_its_twin_is_clean(
    pair: Pair, tmp_path: Path, format_: str, kind: str
) -> None:
    for seed in SEEDS:
        result, verdict, made = run_round(pair, tmp_path / f"{seed}", kind, format_, seed, twin=False)
        where = f"seed {seed}: {[(f.code, f.stage, f.confidence, f.request.room) for f in verdict.findings]}"
        assert verdict.verdict == "divergent", (where, verdict.not_judged)
        assert {(finding.code, finding.stage) for finding in verdict.findings} == {EXPECTED[kind]}, where
        assert result.truth is not None
        check_places(kind, verdict, result.truth)
        mine = [finding for finding in verdict.findings if finding.request.room == made.room]
        assert mine, where
        # Evidence that a starved machine drops weakens the word, never the kind.
        sure = any(finding.confidence == "certain" for finding in mine)
        assert sure or verdict.losses, (seed, [finding.evidence for finding in mine])

        result, verdict, _ = run_round(pair, tmp_path / f"{seed}-twin", kind, format_, seed, twin=True)
        assert result.truth is not None
        assert not result.truth.hit
        assert verdict.findings == (), f"seed {seed}: {verdict.findings}"
        assert verdict.verdict == "clean", f"seed {seed}: {verdict.not_judged}"


@pytest.mark.parametrize("kind", TWINNED)
@pytest.mark.parametrize("format_", sorted(LAYOUTS))
def test_the_fault_is_named_and_the_same_interleaving_without_it_is_clean(
    pair: Pair, tmp_path: Path, format_: str, kind: str
) -> None:
    result, verdict, made = run_round(pair, tmp_path / "fault", kind, format_, 1, twin=False)
    room = made.room
    where = [(f.code, f.stage, f.confidence, f.request.room, f.layer) for f in verdict.findings]
    assert verdict.verdict == "divergent", verdict.not_judged
    assert {(f.code, f.stage) for f in verdict.findings} == {TWINNED[kind]}, where
    truth = result.truth
    assert truth is not None
    assert room in truth.hit
    if kind == "metadata-mix-up":
        (finding,) = verdict.findings
        assert {finding.request.room} == {hit for hit, _ in truth.wrong_metadata}
        assert not any(truth.bad_at.values())
    else:
        assert places(verdict) == truth.bad_at["read"] | truth.bad_at["end"]
    mine = {f.confidence for f in verdict.findings if f.request.room == room}
    assert "certain" in mine or verdict.losses, where

    if kind in DEEDS:
        assert DEEDS[kind](journals(tmp_path / "fault" / "capture"), made)

    result, verdict, made = run_round(pair, tmp_path / "twin", kind, format_, 1, twin=True)
    assert result.truth is not None
    assert not result.truth.hit
    assert verdict.findings == ()
    assert verdict.verdict == "clean", verdict.not_judged
    # The transfer fails in the twin too: there the sender says so, and nobody reads.
    assert (room in result.truth.rooms) == (kind != "failed-transfer-used")
    assert result.outcomes[room] == ("fail" if kind == "failed-transfer-used" else "finish")
    if kind in DEEDS:
        assert not DEEDS[kind](journals(tmp_path / "twin" / "capture"), made)


@pytest.mark.parametrize("point", ["prefill.start:7002", "prefill.hand-over:7002.0"])
def test_a_late_write_is_certain_whichever_side_knew_of_the_request_first(
    pair: Pair, tmp_path: Path, point: str
) -> None:
    # The pages of the one that writes late are announced before prefill has heard of it, or has chunks to send.
    result, verdict, made = run_round(
        pair,
        tmp_path,
        "late-foreign-write",
        "fp8",
        1,
        twin=False,
        more_rules={point: "sender.announced:7002"},
    )
    assert (made.room, made.donor) == (7003, 7002)
    assert result.truth is not None
    check_places("late-foreign-write", verdict, result.truth)
    told = {(f.code, f.request.room, f.confidence) for f in verdict.findings}
    assert told == {("F14", made.room, "certain")}, [finding.evidence for finding in verdict.findings]


def test_an_error_and_a_metadata_slot_are_seen_over_plain_tcp_too(tmp_path: Path) -> None:
    with Pair(transport="tcp") as plain:
        for kind in ("failed-transfer-used", "metadata-mix-up"):
            result, verdict, made = run_round(plain, tmp_path / kind, kind, "fp8", 2, twin=False)
            assert result.truth is not None
            assert result.truth.hit == {made.room}
            assert {(f.code, f.stage) for f in verdict.findings} == {TWINNED[kind]}
            assert {f.request.room for f in verdict.findings} == {made.room}


@pytest.mark.parametrize("kind", ALWAYS)
@pytest.mark.parametrize("format_", sorted(LAYOUTS))
def test_a_fault_that_needs_no_race_is_named_in_every_request_that_it_hits(
    pair: Pair, tmp_path: Path, format_: str, kind: str
) -> None:
    result, verdict, made = run_round(pair, tmp_path, kind, format_, 3, twin=False)
    room = made.room
    where = [(f.code, f.stage, f.confidence, f.request.room, f.layer) for f in verdict.findings]
    assert verdict.verdict == "divergent", verdict.not_judged
    told = {(finding.code, finding.stage) for finding in verdict.findings}
    assert ALWAYS[kind] in told, where
    assert told <= {ALWAYS[kind]} | BESIDES.get(kind, set()), where
    assert result.truth is not None
    assert room in result.truth.hit
    named = {finding.request.room for finding in verdict.findings}
    assert room in named
    assert named <= result.truth.hit
    assert any(f.confidence == "certain" for f in verdict.findings if f.request.room == room), where


@pytest.mark.parametrize("kind", ["list-too-short", "wrong-top-k"])
def test_the_same_load_on_a_right_engine_is_clean(pair: Pair, tmp_path: Path, kind: str) -> None:
    result, verdict, _ = run_round(pair, tmp_path, kind, "fp8", 3, twin=True)
    assert result.truth is not None
    assert not result.truth.hit
    assert verdict.verdict == "clean", verdict.not_judged


def test_the_lab_has_no_fault_that_is_not_tested_here() -> None:
    from replay.lab.faults import FAULTS

    assert set(FAULTS) == set(EXPECTED) | set(ALWAYS) | set(TWINNED) | {"none"}
