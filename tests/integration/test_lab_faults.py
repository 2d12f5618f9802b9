"""Each fault of the lab does its harm on the engine's own code path, where it is meant to; its twin does none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capture_hooks.events import Alloc, Free, Read, Send, Store, TransferState
from capture_hooks.layouts import layout
from replay.lab.faults import FOREIGN_ITEM
from replay.lab.forced import Forced, forced
from replay.lab.run import Pair, RunResult
from tests.integration.lab_rounds import OPTIONS, counts, journals, of

FORMATS = ("fp8", "bf16", "fp4")
#: Those that are held by barriers or differ by format; the others are tested with their verdicts.
FORCED = (
    "wrong-item-length",
    "sent-before-written",
    "completion-early",
    "late-foreign-write",
    "torn-block-table",
    "wrong-store-bytes",
    "kernel-numerics",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as found:
        yield found


def play(
    pair: Pair, kind: str, format_: str, tmp_path: Path, *, twin: bool = False
) -> tuple[Forced, RunResult]:
    flags = tmp_path / "flags"
    flags.mkdir()
    made = forced(kind, format_, 11, flags, twin=twin)
    result = pair.run(made.config, tmp_path / "capture", OPTIONS)
    assert result.stats["timeouts"] == [], "the interleaving was forced"
    assert "fail" not in counts(result.outcomes)
    return made, result


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kind", FORCED)
def test_the_fault_hits_whom_it_is_meant_to_hit(pair: Pair, kind: str, format_: str, tmp_path: Path) -> None:
    made, result = play(pair, kind, format_, tmp_path)
    assert result.truth is not None
    assert made.room in result.truth.hit


@pytest.mark.parametrize("kind", [*FORCED, "none"])
def test_the_same_clients_without_the_fault_read_only_right_bytes(
    pair: Pair, kind: str, tmp_path: Path
) -> None:
    made, result = play(pair, kind, "fp8", tmp_path, twin=True)
    assert result.truth is not None
    assert made.room in result.truth.rooms
    assert not result.truth.hit
    assert not any(result.truth.bad_at.values())


def test_a_late_foreign_write_lands_in_pages_that_were_freed_at_once(pair: Pair, tmp_path: Path) -> None:
    made, result = play(pair, "late-foreign-write", "fp8", tmp_path)
    assert result.truth is not None
    assert not {p for p in result.truth.bad_at["arrived"] if p[0] == made.room}, "its own write was right"
    bad = {place for place in result.truth.bad_at["read"] if place[0] == made.room}
    assert {layer for _, layer, _ in bad} == set(range(made.config.layers))
    found = journals(tmp_path / "capture")
    (given,) = [e for e in of(found["decode"], Alloc) if e.room == made.room]
    (freed,) = [e for e in of(found["decode"], Free) if e.room == made.donor]
    assert freed.reason == "abort"
    states = [e for e in of(found["decode"], TransferState) if e.room == made.donor]
    order = [found["decode"].index(e) for e in (freed, given)]
    acknowledged = [found["decode"].index(e) for e in states if e.state == "acknowledged"]
    assert order == sorted(order)
    assert acknowledged[0] > order[1], "the pages had a new owner before the acknowledgement"
    late = [e for e in of(found["prefill"], Send) if e.room == made.donor]
    hit = {int(given.pages[logical]) for _, _, logical in bad}
    assert hit <= {int(page) for e in late for page in e.destination_pages}


def test_a_request_that_was_given_up_after_wrong_reads_counts_as_hit(pair: Pair, tmp_path: Path) -> None:
    """The foreign write lands after the first read, which was right; then the client goes away."""
    (tmp_path / "flags").mkdir()
    made = forced("late-foreign-write", "fp8", 11, tmp_path / "flags")
    (posted,) = [place for place in made.config.rules if place.startswith("sender.post:")]
    landed = posted.replace("post", "done")
    # So many tokens that it is still running when its client goes away.
    jobs = tuple(
        replace(job, new_tokens=2000, abort_when=landed) if job.room == made.room else job
        for job in made.config.jobs
    )
    # Not before its first read, but while it runs.
    first = f"read.first:{made.room}.0"
    held = {place: flag for place, flag in made.config.rules.items() if place != first}
    rules = held | {posted: f"read.over:{made.room}"}
    result = pair.run(replace(made.config, jobs=jobs, rules=rules), tmp_path / "capture", OPTIONS)
    assert result.stats["timeouts"] == [], "the interleaving was forced"
    assert result.outcomes[made.room] == "abort"
    assert result.truth is not None
    assert not {place for place in result.truth.bad_at["read"] if place[0] == made.room}
    assert made.room in {room for room, _, _ in result.truth.bad_at["end"]}
    assert made.room in result.truth.hit


def test_sent_before_written_is_posted_while_its_event_has_not_happened(pair: Pair, tmp_path: Path) -> None:
    made, _ = play(pair, "sent-before-written", "fp8", tmp_path)
    sends = [e for e in of(journals(tmp_path / "capture")["prefill"], Send) if e.room == made.room]
    assert {e.awaited for e in sends} == {0}
    early = {e.chunk for e in sends if e.written == 0}
    (held,) = (place for place in made.config.rules if place.startswith("forward.layer:"))
    assert int(held.split(".")[2]) in early


def test_completion_early_says_success_before_the_transfer_is_done(pair: Pair, tmp_path: Path) -> None:
    made, _ = play(pair, "completion-early", "fp8", tmp_path)
    found = journals(tmp_path / "capture")
    arrived = [e for e in of(found["decode"], TransferState) if e.room == made.room and e.state == "arrived"]
    assert len(arrived) == 1
    names = [
        (type(e).__name__, getattr(e, "state", getattr(e, "what", ""))) for e in found["prefill"]
        if getattr(e, "room", None) == made.room or getattr(e, "key", "").startswith(f"{made.room}.")
    ]  # fmt: skip
    assert ("TransferState", "done") in names[names.index(("Order", "status")) :]


def test_a_torn_block_table_has_entries_of_another_request(pair: Pair, tmp_path: Path) -> None:
    made, _ = play(pair, "torn-block-table", "fp8", tmp_path)
    decode = journals(tmp_path / "capture")["decode"]
    owner = {int(page): e.room for e in of(decode, Alloc) for page in e.pages}
    reads = [e for e in of(decode, Read) if e.room == made.room]
    foreign = [e for e in reads if {owner.get(int(page)) for page in e.table_after} != {made.room}]
    assert foreign
    assert {e.step for e in foreign} == {max(e.step for e in reads)}, "in its last step"


@pytest.mark.parametrize("format_", FORMATS)
def test_the_wrong_item_length_is_another_formats(pair: Pair, format_: str, tmp_path: Path) -> None:
    made, _ = play(pair, "wrong-item-length", format_, tmp_path)
    sends = of(journals(tmp_path / "capture")["prefill"], Send)
    lengths = {int(length) for e in sends for length in np.concatenate([e.source[:, 1], e.destination[:, 1]])}
    assert lengths == {FOREIGN_ITEM[format_]}
    assert {int(n) for e in sends for n in e.item_lengths} == lengths
    assert FOREIGN_ITEM[format_] != layout(format_).page_bytes
    assert made.config.format == format_


def test_wrong_store_bytes_come_from_positions_that_begin_anew_in_each_chunk(
    pair: Pair, tmp_path: Path
) -> None:
    _, result = play(pair, "wrong-store-bytes", "fp8", tmp_path)
    stores = of(journals(tmp_path / "capture")["prefill"], Store)
    wrong = {e.room for e in stores if not np.array_equal(e.positions, 4 * e.logical_rows)}
    assert wrong
    assert all(e.positions[0] == 0 for e in stores if e.room in wrong)
    assert result.truth is not None
    assert {room for room, _ in result.truth.wrong_positions} == wrong
