"""From differing bytes to a kind of fault: one small module a kind, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify import (
    buffer_missing,
    completion_early,
    failed_transfer_used,
    late_foreign_write,
    list_too_short,
    lost_on_wire,
    sent_before_written,
    source_overwritten,
    wrong_item_length,
    wrong_layer_pairing,
    wrong_page_id_space,
)
from replay.classify.base import Evidence, Explanation, halves, span

Bool = npt.NDArray[np.bool_]


#: Kinds that the descriptors themselves show, in the order in which they are asked.
DESCRIPTOR_KINDS = (
    wrong_item_length.explain,
    buffer_missing.explain,
    list_too_short.explain,
    wrong_page_id_space.explain,
    wrong_layer_pairing.explain,
)


def explain_case(case: Case, evidence: Evidence, *, judged: bool, delivered: bool) -> Iterator[Explanation]:
    """Every cause of a case, rung by rung; what one cause explains is set aside and the rest asked again.

    ``judged``/``delivered``: whether the descriptors could be checked, and whether they bring the page rightly.
    """
    yield from _source(case, evidence)
    yield from _wire(case, evidence, judged=judged, delivered=delivered)
    yield from _destination(case, evidence)


def _source(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    bad = case.source_bad
    if not bad.any():
        return
    found = sent_before_written.explain(case, evidence, bad)
    if found is not None:
        yield found
        bad = bad & ~found.explained
    for stage in ("SE", "SE+"):
        if bad.any() and case.has(stage):
            found = source_overwritten.explain(case, evidence, bad, stage)
            if found is not None:
                yield found
                bad = bad & ~found.explained
    if bad.any():
        seen = "SE" if case.has("SE") and (bad & ~case.same("SE", "ST")).any() else "SE+"
        yield _unclassified(
            bad, "source", "ST", seen, "the source at the send differs from its finished store"
        )


def _wire(case: Case, evidence: Evidence, *, judged: bool, delivered: bool) -> Iterator[Explanation]:
    bad = case.wire_bad
    if not bad.any():
        return
    source = next((stage for stage in ("SE+", "SE", "ST") if case.has(stage)), "ST")
    half = sent_before_written.torn(case, evidence, bad)
    if half is not None:
        yield half
        bad = bad & ~half.explained
    foreign = late_foreign_write.explain(case, evidence, bad, "RC") if bad.any() else None
    if foreign is not None:
        yield foreign
        bad = bad & ~foreign.explained
    for kind in DESCRIPTOR_KINDS if judged and not delivered else ():
        found = kind(case, evidence, bad) if bad.any() else None
        if found is not None:
            yield found
            bad = bad & ~found.explained
    if bad.any():
        failed = failed_transfer_used.explain(case, evidence, bad)
        if failed is not None:
            yield failed
            bad = bad & ~failed.explained
    if bad.any():
        taken = source_overwritten.explain(case, evidence, bad, "RC")
        if taken is not None:
            yield taken
            bad = bad & ~taken.explained
    if bad.any():
        early = completion_early.explain(case, evidence, bad)
        if early is not None:
            yield early
            bad = bad & ~early.explained
    if bad.any():
        lost = lost_on_wire.explain(case, evidence, bad, judged and delivered)
        if lost is not None:
            yield lost
            bad = bad & ~lost.explained
    if bad.any():
        stage = "descriptor" if judged and not delivered else "wire"
        why = (
            "no descriptor of the request brings these bytes from their source page"
            if stage == "descriptor"
            else "the destination at completion differs from the source"
        )
        yield _unclassified(bad, stage, source, "RC", why)


def _destination(case: Case, evidence: Evidence) -> Iterator[Explanation]:
    # Bytes that arrived after completion was told are the wire rung's, not a change at the destination.
    healed = case.same("LT", "SE+") | case.same("LT", "SE")
    if not case.has("SE") and not case.has("SE+"):
        healed = case.same("LT", "ST")
    looks = (("LT", case.later_bad & ~healed), ("RD", case.read_bad), ("RD", case.appended_bad))
    done = np.zeros(len(case.valid), bool)
    for stage, mask in looks:
        bad = mask & ~done
        if not bad.any() or not case.has(stage):
            continue
        done |= bad
        foreign = late_foreign_write.explain(case, evidence, bad, stage)
        if foreign is not None:
            yield foreign
            bad = bad & ~foreign.explained
        if bad.any():
            displaced = wrong_item_length.overwritten(case, evidence, bad, stage)
            if displaced is not None:
                yield displaced
                bad = bad & ~displaced.explained
        if bad.any() and mask is case.appended_bad:
            late = completion_early.overwrote(case, evidence, bad)
            if late is not None:
                yield late
                bad = bad & ~late.explained
        if bad.any():
            expected = next((name for name in ("RC", "SE", "ST") if case.has(name)), "ST")
            where, why = "destination", "the page changed after its bytes had arrived"
            if mask is case.appended_bad:
                expected, why = "OWN", "rows that this side appended differ from its own store"
            elif not case.has("RC") and expected != "ST":
                where, why = (
                    "wire",
                    "the page differs from its source at the read; RC is missing",
                )
            yield _unclassified(bad, where, expected, stage, why)


def _unclassified(bad: Bool, stage: str, expected: str, observed: str, why: str) -> Explanation:
    values, scales = halves(bad)
    return Explanation(
        code="unclassified",
        stage=stage,
        confidence="likely",
        explained=bad,
        expected=expected,
        observed=observed,
        evidence=(why, f"values of {span(values)}, scales of {span(scales)}"),
        at_source=stage == "source",
    )
