"""The verdict in words: what is said, in which order, and within which limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.block import LINES, WIDTH
from analysis.report import verdict_text
from replay.verdict import Donor, Finding, Hazard, NotJudged, PageFinding, RequestId, RunnerUp, Verdict

ALL_ROWS = ((0, 63),)


def late_write(room: int = 7719, layer: int = 0, **changes: object) -> Finding:
    pages = tuple(
        PageFinding(2 + k, 14 + k, ALL_ROWS, ALL_ROWS, ((0, 8448),), 8194, Donor(7702, layer, k))
        for k in range(2)
    )
    finding = Finding(
        code="F14",
        kind="late-foreign-write",
        stage="destination",
        confidence="certain",
        request=RequestId(room),
        role="decode",
        rank=0,
        buffer="index_k",
        layer=layer,
        pages=pages,
        evidence=("room 7702 was aborted while its write was in flight", "the write landed after 7719's own"),
        runner_up=RunnerUp("F31", "the bytes are another request's"),
    )
    return replace(finding, **changes)  # type: ignore[arg-type]


def torn(value_rows: tuple[tuple[int, int], ...] = ((32, 63),)) -> Finding:
    page = PageFinding(1, 6, value_rows, ALL_ROWS, ((4096, 8448),), 4255)
    return late_write(
        code="F09", kind="completion-early", stage="completion", pages=(page,), layer=12, evidence=()
    )


def divergent(*findings: Finding, **parts: object) -> Verdict:
    return Verdict("divergent", findings, **parts)  # type: ignore[arg-type]


def test_one_fault_in_every_layer_reads_as_one_block() -> None:
    verdict = divergent(
        *(late_write(layer=layer) for layer in range(21)),
        cleared=(
            "store",
            "source",
            "descriptor",
            "wire",
            "table",
            "read-kernel",
        ),
        scope={
            "requests": 61,
            "rooms": [7700, 7760],
            "layers": 21,
            "pages": 1234,
            "read_snapshots": 4000,
            "stores": {"judged": 8, "rows": 512, "rows_reproduced": 512},
            "pages_seen": {"RC": 1234},
        },
    )

    assert (
        verdict_text(verdict)
        == """\
DIVERGENT  destination: late foreign write (F14), certain
  request     room 7719 (decode rank 0), index_k, 21 layers (0..20)
  where       logical pages 2..3 = decode pages 14..15, rows 0..63, bytes
              [0,8448), 8,194 bytes differ in each
  why         They hold room 7702's pages 0..1. Room 7702 was aborted while its
              write was in flight. The write landed after 7719's own. Not F31:
              the bytes are another request's.
  cleared     store (all 512 rows reproduced), source, descriptor, wire, table,
              read-kernel
  scope       61 requests (rooms 7700..7760), 21 layers, 1,234 pages; 4,000
              pages seen at reads; 8 stores done again"""
    )


def test_values_and_scales_of_different_rows_are_told_apart() -> None:
    text = verdict_text(divergent(torn()))

    assert "completion: completion early (F09), certain" in text
    flat = " ".join(text.split())
    assert (
        "logical page 1 = decode page 6, values of rows 32..63, scales of rows 0..63, bytes [4096,8448), "
        "4,255 bytes differ"
    ) in flat


def test_clean_names_its_scope() -> None:
    verdict = Verdict("clean", cleared=("store", "wire"), scope={"requests": 60, "sampled_reads": 1200})

    assert (
        verdict_text(verdict)
        == """\
CLEAN  every judged rung agrees
  cleared     store, wire
  scope       60 requests; sampled reads 1,200"""
    )


def test_inconclusive_says_what_was_not_judged_and_what_was_lost() -> None:
    verdict = Verdict(
        "inconclusive",
        not_judged=(NotJudged("store", "its inputs were not kept"),),
        losses={"queue": {"snapshot": 12}, "disk": 0, "ring": None},
    )

    assert (
        verdict_text(verdict)
        == """\
INCONCLUSIVE  no difference found, but not all could be judged
  not judged  store: its inputs were not kept
  losses      queue (snapshot 12)"""
    )


def test_requests_of_one_kind_are_counted_and_other_kinds_are_named() -> None:
    text = verdict_text(divergent(*(late_write(room) for room in range(100, 130)), torn()))

    assert "room 100 (decode rank 0)" in text
    assert "and 29 more requests" in " ".join(text.split())
    assert "also        completion: completion early (F09), certain: room 7719" in text
    assert "room 101" not in text


def test_few_other_requests_are_named() -> None:
    text = " ".join(verdict_text(divergent(late_write(1), late_write(2), late_write(3))).split())

    assert "; and rooms 2, 3" in text


def test_verbose_shows_every_request_and_kind_in_full() -> None:
    text = verdict_text(divergent(late_write(1), late_write(2), torn()), verbose=True)

    for part in ("room 1 (", "room 2 (", "completion: completion early (F09)", "not F31"):
        assert part in text


def test_a_hazard_stands_apart_from_findings() -> None:
    verdict = Verdict("clean", hazards=(Hazard("item lengths 8448 and 16384", "layer 3"),))

    assert "  hazard      item lengths 8448 and 16384 (layer 3)" in verdict_text(verdict).splitlines()


def test_an_attempt_and_aliases_are_part_of_the_request() -> None:
    text = " ".join(verdict_text(divergent(late_write(request=RequestId(5, 2, (8, 9))))).split())

    assert "room 5 attempt 2 (decode rank 0)" in text
    assert "pages shared with rooms 8, 9" in text


def test_scattered_pages_are_listed_in_their_order() -> None:
    pages = tuple(PageFinding(k, p) for k, p in ((1, 40), (3, 17), (7, 2)))
    text = " ".join(verdict_text(divergent(late_write(pages=pages))).split())

    assert "logical pages 1, 3, 7 = decode pages 40, 17, 2" in text


def test_pages_that_differ_in_their_rows_are_described_in_runs() -> None:
    rows = [((0, 63),), ((0, 63),), ((0, 23),)]
    pages = tuple(PageFinding(k, 9 - k, row, row, (), 100 + k) for k, row in enumerate(rows))
    text = " ".join(verdict_text(divergent(late_write(pages=pages))).split())

    assert (
        "= decode pages 9, 8, 7; pages 0..1: rows 0..63, 100 to 101 bytes differ in each; "
        "page 2: rows 0..23, 102 bytes differ"
    ) in text


def test_many_unlike_pages_are_cut() -> None:
    pages = tuple(PageFinding(k, k, ((k, k),)) for k in range(9))
    text = " ".join(verdict_text(divergent(late_write(pages=pages))).split())

    assert "page 2: values of row 2; and others, see -v" in text


def test_layers_that_differ_in_the_count_of_bytes_only_share_one_line() -> None:
    pages = tuple(replace(page, bytes_differing=8203) for page in late_write().pages)
    text = " ".join(verdict_text(divergent(late_write(), late_write(layer=1, pages=pages))).split())

    assert "2 layers (0..1)" in text
    assert "8,194 to 8,203 bytes differ in each" in text


def test_layers_that_differ_in_their_pages_say_so() -> None:
    findings = late_write(), late_write(layer=1, pages=(PageFinding(9, 90),))

    short = " ".join(verdict_text(divergent(*findings)).split())
    full = " ".join(verdict_text(divergent(*findings), verbose=True).split())

    assert "layer 0: logical pages 2..3" in short
    assert "not the same in every layer, see -v" in short
    assert "layer 1: logical page 9 = decode page 90" in full


def test_a_finding_without_pages_is_about_the_request() -> None:
    assert "the whole request, decode side" in verdict_text(divergent(late_write(pages=())))


def test_unclassified_has_no_code_in_brackets() -> None:
    text = verdict_text(divergent(late_write(code="unclassified", kind="unclassified")))

    assert text.startswith("DIVERGENT  destination: unclassified, certain")


@pytest.mark.parametrize("color", [False, True])
def test_no_colour_without_being_asked(color: bool) -> None:
    text = verdict_text(divergent(late_write()), color=color)

    assert ("\x1b[" in text) is color


def test_control_characters_of_a_trace_do_not_reach_the_terminal() -> None:
    text = verdict_text(
        divergent(late_write(evidence=("\x1b]0;owned\x07 bell",), buffer="\x1b[2J")), verbose=True
    )

    assert "\x1b" not in text
    assert "\x07" not in text


def crowded() -> Verdict:
    findings = [late_write(room, layer) for room in range(40) for layer in range(8)]
    findings += [torn(), late_write(code="F18", kind="torn-block-table", stage="table")]
    findings[0] = replace(
        findings[0], evidence=tuple(f"evidence number {i} " + "word " * 12 for i in range(9))
    )
    return divergent(
        *findings,
        hazards=tuple(Hazard(f"hazard {i} " + "x" * 50, "somewhere") for i in range(9)),
        cleared=tuple(f"stage-{i} (all of its many rows)" for i in range(9)),
        not_judged=tuple(NotJudged(f"rung {i}", "why " * 20) for i in range(9)),
        scope={f"fact_{i}": "long " * 10 for i in range(9)},
        losses={f"loss_{i}": i for i in range(30)},
    )


def test_the_block_never_grows_beyond_its_limits() -> None:
    lines = verdict_text(crowded()).splitlines()

    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH
    labels = [line[:12].strip() for line in lines[1:] if line[:12].strip()]
    assert labels == ["request", "where", "why", "also", "cleared", "not judged", "hazard", "scope", "losses"]
    assert any(line.endswith(" ...") for line in lines)


def test_verbose_has_no_limit_of_lines_but_keeps_the_width() -> None:
    lines = verdict_text(crowded(), verbose=True).splitlines()

    assert len(lines) > 100
    assert max(map(len, lines)) <= WIDTH
    assert not any(line.endswith(" ...") for line in lines)


def test_ten_thousand_findings_take_little_time() -> None:
    verdict = divergent(*(late_write(room) for room in range(10_000)))

    assert "and 9,999 more requests" in " ".join(verdict_text(verdict).split())
    assert verdict_text(verdict, verbose=True).count("request     room") == 10_000
