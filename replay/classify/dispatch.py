"""Asks the classifiers of page bytes, rung by rung, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify import (
    buffer_missing,
    completion_early,
    component_late,
    failed_transfer_used,
    freed_page_referenced,
    late_foreign_write,
    layout_permuted,
    list_too_short,
    local_clear,
    lost_on_wire,
    moved_as_pages,
    padding_row_written,
    partial_slice,
    sent_before_written,
    source_overwritten,
    speculative_row_misuse,
    stride_at_store,
    truncated_copy,
    wrong_item_length,
    wrong_layer_pairing,
    wrong_page_id_space,
)
from replay.classify.base import Evidence, Explanation, halves, in_words

Bool = npt.NDArray[np.bool_]
#: (case, evidence, units still unexplained, look that shows them) -> explanation of some of these units
Classifier = Callable[[Case, Evidence, Bool, str], Explanation | None]


#: Kinds that the descriptors themselves show, in the order in which they are asked; only where these do not bring
#: the page whole from its own source.
DESCRIPTOR_KINDS: tuple[Classifier, ...] = (
    layout_permuted.explain,
    partial_slice.explain,
    wrong_item_length.explain,
    buffer_missing.explain,
    list_too_short.explain,
    wrong_page_id_space.explain,
    wrong_layer_pairing.explain,
)

#: Kinds that a store or copy of the page's own side shows, by where it landed.
LOCAL_KINDS: tuple[Classifier, ...] = (
    padding_row_written.explain,
    speculative_row_misuse.explain,
    moved_as_pages.explain,
    stride_at_store.hit,
)

#: Kinds that explain why the destination at completion is not what the source held.
WIRE_KINDS: tuple[Classifier, ...] = (
    *LOCAL_KINDS,
    local_clear.recorded,
    failed_transfer_used.explain,
    source_overwritten.explain,
    layout_permuted.explain,
    wrong_layer_pairing.explain,
    component_late.explain,
    completion_early.explain,
    lost_on_wire.explain,
)

#: Kinds that explain a page which changed after it had arrived.
DESTINATION_KINDS: tuple[Classifier, ...] = (
    truncated_copy.explain,
    late_foreign_write.explain,
    wrong_page_id_space.landed,
    wrong_item_length.overwritten,
    *LOCAL_KINDS,
    freed_page_referenced.explain,
    layout_permuted.explain,
    local_clear.explain,
)

#: Kinds that explain rows which the reading side appended.
APPENDED_KINDS: tuple[Classifier, ...] = (
    *DESTINATION_KINDS,
    component_late.overwrote,
    completion_early.overwrote,
)


def explain_case(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    """Every cause of a case, rung by rung; what one cause explains is set aside and the rest asked again."""
    yield from _source(case, evidence)
    yield from _wire(case, evidence)
    yield from _destination(case, evidence)


def _ask(
    kinds: Iterable[Classifier], case: Case, evidence: Evidence, bad: Bool, stage: str
) -> Generator[Explanation, None, Bool]:
    """Ask one kind after the other; the units that none explains are the generator's return value."""
    for explain in kinds:
        if not bad.any():
            break
        found = explain(case, evidence, bad, stage)
        if found is not None:
            yield found
            bad = bad & ~found.explained
    return bad


def _source(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    bad = yield from _ask(
        (truncated_copy.explain, *LOCAL_KINDS, sent_before_written.explain),
        case,
        evidence,
        case.source_bad,
        "SE",
    )
    for stage in ("SE", "SE+"):
        if case.has(stage):
            bad = yield from _ask((source_overwritten.explain, *LOCAL_KINDS), case, evidence, bad, stage)
    if bad.any():
        seen = "SE" if case.has("SE") and (bad & ~case.same("SE", "ST")).any() else "SE+"
        yield _unclassified(
            case,
            evidence,
            bad,
            "source",
            "ST",
            seen,
            "the source at the send differs from its finished store",
        )


def _wire(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    first = (
        freed_page_referenced.explain,
        sent_before_written.torn,
        late_foreign_write.explain,
        wrong_page_id_space.landed,
        sent_before_written.late_look,
    )
    descriptors = DESCRIPTOR_KINDS if case.delivery == "wrong" else ()
    bad = yield from _ask((*first, *descriptors, *WIRE_KINDS), case, evidence, case.wire_bad, "RC")
    if bad.any():
        source = next((stage for stage in ("SE+", "SE", "ST") if case.has(stage)), "ST")
        stage = "descriptor" if case.delivery == "wrong" else "wire"
        why = (
            "no descriptor of the request brings these bytes from their source page"
            if stage == "descriptor"
            else "the destination at completion differs from the source"
        )
        yield _unclassified(case, evidence, bad, stage, source, "RC", why)


def _destination(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    # Bytes that arrived after completion was told are the wire rung's, not a change at the destination.
    healed = case.same("LT", "SE+") | case.same("LT", "SE")
    if not case.has("SE") and not case.has("SE+"):
        healed = case.same("LT", "ST")
    looks = (
        ("LT", case.later_bad & ~healed, DESTINATION_KINDS),
        ("RD", case.read_bad, DESTINATION_KINDS),
        ("RD", case.appended_bad, APPENDED_KINDS),
    )
    done = np.zeros(len(case.valid), bool)
    for stage, mask, kinds in looks:
        bad = mask & ~done
        if not bad.any() or not case.has(stage):
            continue
        done |= bad
        bad = yield from _ask(kinds, case, evidence, bad, stage)
        if bad.any():
            kept = ("RC", "ST") if case.sent_here else ("RC", "SE", "ST")
            expected = next((name for name in kept if case.has(name)), "ST")
            where, why = "destination", "the page changed after its bytes had arrived"
            if kinds is APPENDED_KINDS:
                expected, why = "OWN", "rows that this side appended differ from its own store"
            elif not case.has("RC") and expected != "ST":
                where, why = (
                    "wire",
                    "the page differs from its source at the read; RC is missing",
                )
            yield _unclassified(case, evidence, bad, where, expected, stage, why)


def _unclassified(
    case: Case, evidence: Evidence, bad: Bool, stage: str, expected: str, observed: str, why: str
) -> Explanation:
    values, scales = halves(bad)
    lines = [why, in_words(values, scales)]
    donor = evidence.donors.best(case, observed, bad) if evidence.donors is not None else None
    if evidence.donors is not None and donor is not None:
        lines.append(evidence.donors.words(case, donor))
    return Explanation(
        code="unclassified",
        stage=stage,
        confidence="likely",
        explained=bad,
        expected=expected,
        observed=observed,
        evidence=tuple(lines),
        at_source=stage == "source",
    )
