"""A small part of ``make accuracy``: each kind once, fault-free traffic, and proof that no trace has a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy import case, clean
from benchmarks.accuracy.clean import FORMATS
from benchmarks.accuracy.faults import CODES, FAULTS
from benchmarks.accuracy.measure import Outcome, Task, compare, judged
from replay.classify.registry import NAMED, VOCABULARY
from replay.trace.reader import open_trace
from replay.trace.schema import TABLES
from tests.unit.trace_samples import everything


def outcome_of(tmp_path: Path, code: str, variant: str, format: str, seed: int = 0) -> Outcome:
    truth = case.write(tmp_path / "t.h5", code, variant, format, seed)
    outcome = Outcome(Task(code, variant, format, seed))
    compare(judged(tmp_path / "t.h5"), truth, outcome)
    return outcome


def test_the_world_has_every_kind() -> None:
    assert [f"F{number:02}" for number in range(1, 32)] == CODES


@pytest.mark.parametrize("code", CODES)
def test_a_fault_is_named_or_left_open_and_nobody_else_is_accused(code: str, tmp_path: Path) -> None:
    seed = CODES.index(code) % 2
    variant = case.variant_of(code, seed)
    outcome = outcome_of(tmp_path, code, variant, FORMATS[CODES.index(code) % 3], seed)
    assert outcome.wrong_certain == []
    assert outcome.bystanders == []
    if code not in NAMED and outcome.answer == "none":
        return
    assert outcome.stage_right, (outcome.answer, outcome.stage, outcome.note)
    assert outcome.answer in (code, "unclassified")


@pytest.mark.parametrize(("code", "variant"), [("F06", "ranks-alike"), ("F09", ""), ("F13", ""), ("F31", "")])
def test_pages_that_come_in_slices_of_several_ranks_have_no_wrong_length(
    code: str, variant: str, tmp_path: Path
) -> None:
    outcome = outcome_of(tmp_path, code, variant, "fp8", 3)
    assert (outcome.answer, outcome.wrong_certain, outcome.bystanders) == (code, [], [])
    assert outcome.kind_right, outcome.note


@pytest.mark.parametrize(("code", "variant", "seed"), [("F22", "token", 1), ("F21", "elsewhere", 3)])
def test_pages_that_were_written_since_they_were_looked_at_speak_against_no_misreading(
    code: str, variant: str, seed: int, tmp_path: Path
) -> None:
    """The wrong rows come from pages of others, to some of which transfers or stores went after the last look."""
    outcome = outcome_of(tmp_path, code, variant, "fp8", seed)
    assert (outcome.answer, outcome.wrong_certain, outcome.bystanders) == (code, [], [])
    assert outcome.certain, outcome.note


def test_wrong_bytes_of_drafted_rows_are_seen(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "F30", "other-rows", "bf16", 11)
    assert (outcome.answer, outcome.wrong_certain, outcome.bystanders) == ("F30", [], [])
    assert outcome.kind_right, outcome.note


@pytest.mark.parametrize("seed", [1, 3, 6, 12])  # in the last, sampled requests draft and move rows
def test_fault_free_traffic_is_clean(seed: int, tmp_path: Path) -> None:
    clean.write(tmp_path / "t.h5", seed, 150)
    verdict = judged(tmp_path / "t.h5")
    assert verdict.findings == ()
    assert verdict.verdict == "clean", verdict.not_judged


@pytest.mark.parametrize(
    ("seed", "requests"), [(5, 60), (8, 200)]
)  # in the second, an owner's own ST is lost
def test_fault_free_traffic_with_losses_accuses_nobody(seed: int, requests: int, tmp_path: Path) -> None:
    assert clean.write(tmp_path / "t.h5", seed, requests).lossy
    verdict = judged(tmp_path / "t.h5")
    assert verdict.findings == ()
    assert verdict.verdict == "inconclusive"


@pytest.mark.parametrize("code", ["F05", "F15", "F20", "F31"])
def test_no_trace_carries_a_label(code: str, tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    case.write(path, code, case.variant_of(code, 0), "fp8", 0)
    words = {name for name, _ in VOCABULARY.values()} | set(CODES) | {"fault", "victim", "truth"}
    with open_trace(path) as trace:
        told = {
            str(text)
            for name, columns in TABLES.items()
            for column in columns
            if column.kind == "str"
            for text in np.unique(trace.table(name)[column.name])
        } | {repr(process) for process in trace.processes}
    assert [(word, text) for word in words for text in told if word.lower() in text.lower()] == []
    raw = path.read_bytes().lower()
    assert [word for word in words if len(word) > 5 and word.lower().encode() in raw] == []


@pytest.mark.parametrize(
    ("code", "may_differ"),
    [
        ("F26", {"read.top_k"}),
        ("F24", {"read.logits", "read.top_k", "read.number_format"}),
        ("F28", {"metadata.holds"}),
        ("F31", {"snapshot.content", "read.logits", "read.top_k"}),
    ],
)
def test_a_fault_changes_nothing_but_what_it_did(code: str, may_differ: set[str], tmp_path: Path) -> None:
    variant = case.variant_of(code, 0)
    case.write(tmp_path / "bad.h5", code, variant, "fp8", 0)
    case.write(tmp_path / "good.h5", code, variant, "fp8", 0, twin=True)
    with open_trace(tmp_path / "bad.h5") as bad, open_trace(tmp_path / "good.h5") as good:
        first, second = everything(bad), everything(good)
    different = {name for name in first if first[name] != second[name]}
    assert different
    assert different <= may_differ


def test_a_case_is_the_same_every_time(tmp_path: Path) -> None:
    (code, variant), _ = sorted(FAULTS.items(), key=lambda item: item[0])[0]
    told: list[Any] = []
    for name in ("a.h5", "b.h5"):
        truth = case.write(tmp_path / name, code, variant, "fp4", 1)
        with open_trace(tmp_path / name) as trace:
            told.append((truth, everything(trace)))
    assert told[0] == told[1]
