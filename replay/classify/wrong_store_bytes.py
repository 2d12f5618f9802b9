"""F30: the store wrote other bytes than its own inputs give.

Signature: the page after the store holds, in the slots that the store named, codes or scales which no right kernel can
have made of the recorded inputs.

Chosen over F20, where the rows were never written here (they still hold what was there before) and lie where a wrong
stride leads; over F23, where a padding row of another batch came after; over rows that landed in each other's slots
(they are right for another row's inputs) and pages that are right in another layout, which stay unclassified.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from replay.classify import padding_row_written, rows_at_multiple
from replay.classify.base import Evidence, Kind, claims, span
from replay.classify.page_layouts import hypotheses
from replay.findings import PageEvidence
from replay.kernels.reference import StoreCheck, check_store, decode_pages, store_reference, unrotated
from replay.ranges import byte_ranges, ranges
from replay.recorded import StoreCase
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding
from replay.words import counted, verb

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

KIND = Kind(
    code="F30",
    shows="codes or scales that no right store makes of the recorded inputs",
    certain=(
        "the look is ordered after the store, all stores and allocations are recorded; the row is not right for "
        "another row's inputs and is not old (by the last look before, or nearest to its own inputs)"
    ),
    best=claims(digest=None, pages="certain"),
    rivals=(
        ("F10", "the rows are not what was there before the store"),
        ("F20", "the rows are not right for another row's inputs"),
    ),
)

#: Part of a row's codes that may be wrong for the row to be the store's own for certain, where nobody saw it before.
MOSTLY_RIGHT = 0.5

#: Decimal digits against an accident that rows have to bring together which are nearest to their own inputs.
NEAREST_DIGITS = 6

#: Wrong rows whose bytes are tried against every other row's inputs.
TRIED_ROWS = 4


def explain(timeline: Timeline, evidence: Evidence, case: StoreCase, check: StoreCheck) -> PageEvidence:
    """The finding for the rows of ``case`` that the reference does not reproduce."""
    wrong = np.flatnonzero(~check.reproduced)
    layout = case.layout
    rows = np.zeros(layout.rows, bool)
    rows[case.rows[wrong]] = True
    stored, snapshot = timeline.moment("store", case.store), timeline.snapshots.moment_of(case.snapshot)
    ordered = timeline.order.before(stored, snapshot)
    scales = np.zeros(layout.rows, bool)
    if layout.scale_bytes:
        scales[case.rows[check.wrong_scales.any(axis=1)]] = True
    values = np.zeros(layout.rows, bool)
    values[case.rows[check.wrong_codes.any(axis=1)]] = True
    code, rule, known = _cause(timeline, evidence, case, check, wrong)
    seen = bool(case.kernel) or (ordered and evidence.covers(case.process, "store", "alloc"))
    sure = seen and known
    confidence: Confidence = "certain" if sure else "likely"
    spans, _ = byte_ranges(layout, values, scales)
    position = timeline.trace.table("store").array("positions", case.store)
    info = timeline.buffers[case.buffer]
    return PageEvidence(
        code=code,
        stage="store",
        confidence=confidence,
        process=case.process,
        request=case.request,
        buffer=info.name,
        layer=info.layer,
        page=PageFinding(
            logical=case.logical,
            physical=case.page,
            value_rows=ranges(values),
            scale_rows=ranges(scales),
            byte_ranges=spans,
        ),
        evidence=(
            f"{span(rows)}: {_codes_and_scales(check)} outside what a right store can make of the recorded inputs",
            *_reproduced(int(check.reproduced.sum())),
            f"store of {counted(len(position), 'row')}, step {int(timeline.trace.table('store')['step'][case.store])}; "
            + (
                f"your kernel {case.kernel} did it again in an empty page"
                if case.kernel
                else "the page was looked at after it" + (" in its order" if ordered else "")
            ),
        ),
        rule=rule,
    )


def _codes_and_scales(check: StoreCheck) -> str:
    codes, scales = int(check.wrong_codes.sum()), int(check.wrong_scales.sum())
    parts = [counted(number, noun) for number, noun in ((codes, "code"), (scales, "scale")) if number]
    return f"{' and '.join(parts)} {verb(codes + scales, 'lies', 'lie')}"


def _reproduced(others: int) -> tuple[str, ...]:
    if not others:
        return ()
    are = "is" if others == 1 else "are"
    return (f"{counted(others, 'other row')} of this store in the page {are} reproduced",)


def _cause(
    timeline: Timeline, evidence: Evidence, case: StoreCase, check: StoreCheck, wrong: I64
) -> tuple[str, str | None, bool]:
    """(code, rule, whether it is known that nothing else explains the rows)."""
    if case.kernel:  # it wrote into an empty page
        old: bool | None = not case.layout.values(case.data[None])[0][case.rows[wrong]].any()
    elif case.store in evidence.local.strided_set:
        stride = int(timeline.trace.table("store")["stride"][case.store])
        return "F20", f"page p was written at byte p * {stride}", True
    elif (proven := _padded(timeline, evidence, case, wrong)) is not None:
        return "F23", "a padding row was written", proven
    else:
        old = _old(timeline, case, wrong)
    factor = rows_at_multiple.factor(timeline, case, wrong)
    if factor:
        return "F20", f"the rows of page p lie at page {factor} * p", True
    if old:
        return "unclassified", "the rows still hold what was there before the store", False
    other = _other_row(case, wrong)
    if other is not None:
        return "unclassified", f"row {other[0]} holds what row {other[1]}'s inputs give", False
    name = _layout(case, wrong)
    if name:
        return "unclassified", f"the page is reproduced when it is {name}", False
    if old is None:
        # What stood there before is not known: only rows that are the store's own in large part, or nearer to their
        # own inputs than to those of any other row, are not old.
        codes = check.wrong_codes[wrong].mean(axis=1) if check.wrong_codes.size else np.ones(len(wrong))
        return "F30", None, bool((codes < MOSTLY_RIGHT).all()) or _nearest_own(case, wrong)
    return "F30", None, True


def _layout(case: StoreCase, wrong: I64) -> str:
    """The layout, if any, in which all rows of the store are right."""
    tried = hypotheses(case.layout)
    pages = np.stack([case.data[permutation] for _, permutation in tried])
    # A wrong row rules out nearly all of them.
    alike = _check(case, pages, np.full(len(pages), wrong[0])).reproduced
    for number in np.flatnonzero(alike).tolist():
        rows = np.arange(len(case.rows))
        if bool(_check(case, np.repeat(pages[[number]], len(rows), axis=0), rows).reproduced.all()):
            return tried[number][0]
    return ""


def _check(case: StoreCase, pages: U8, rows: I64) -> StoreCheck:
    """What is judged of row ``rows[i]`` of the store if its page were ``pages[i]``."""
    layout, each, place = case.layout, np.arange(len(rows)), case.rows[rows]
    values, scales = layout.values(pages)[each, place], layout.scales(pages)[each, place]
    return check_store(layout, case.inputs.part(rows), values, scales)


def _padded(timeline: Timeline, evidence: Evidence, case: StoreCase, wrong: I64) -> bool | None:
    """Whether order puts the padding rows that were stored to all the wrong rows before the page was looked at.

    None where no such rows were stored, or only later than that.
    """
    stored, seen = timeline.moment("store", case.store), timeline.snapshots.moment_of(case.snapshot)
    rows: set[int] = set()
    ordered: set[int] = set()
    for write, proven in evidence.local.between(case.buffer, case.page, stored, seen):
        padded = set(padding_row_written.padding_rows(timeline, write, case.page).tolist())
        rows |= padded
        ordered |= padded if proven else set()
    hit = set(case.rows[wrong].tolist())
    return hit <= ordered if hit <= rows else None


def _old(timeline: Timeline, case: StoreCase, wrong: I64) -> bool | None:
    """Whether the wrong rows are those of the last look before the store, by digest, or were never used (zeros).

    None where no such look was taken and they are not zero.
    """
    snaps, contents = timeline.snapshots, timeline.trace.contents
    store_seq = int(timeline.trace.table("store")["begin_seq"][case.store])
    earlier = np.concatenate(
        [snaps.at_place(stage, case.buffer, case.page) for stage in ("ST", "RC", "RD", "SE", "LT")]
    )
    earlier = earlier[(snaps.seq[earlier] <= store_seq) & (snaps.content[earlier] >= 0)]
    rows = case.rows[wrong]
    if not len(earlier):
        return True if not case.layout.values(case.data[None])[0][rows].any() else None
    now = contents.row_values(snaps.content[[case.snapshot]])[0][rows]
    last = earlier[np.argsort(snaps.seq[earlier])[-1:]]
    before = contents.row_values(snaps.content[last])[0][rows]
    return bool((now == before).all())


def _nearest_own(case: StoreCase, wrong: I64) -> bool:
    """Whether the wrong rows point along what their own inputs give, rather than what another row's do.

    A store that goes wrong in one step (a position, a rounding) leaves much of a row's direction. What all rows have
    in common is taken away first: keys of one layer share most of theirs. The rotations are undone before that, or
    the old rows of another request at the same positions would share what is left. A foreign row is nearest to its
    own place by accident once in n rows: enough of them have to agree.
    """
    given = case.inputs
    reference = store_reference(case.layout, given.keys, given.rope, given.norm_weight, given.epsilon).values
    stored = decode_pages(case.layout, case.data[None])[0][case.rows]
    if not np.isfinite(stored).all():
        return False
    reference, stored = (unrotated(rows, given.rope) for rows in (reference, stored))
    reference, stored = reference - reference.mean(axis=0), stored - stored.mean(axis=0)
    length = np.maximum(np.linalg.norm(reference, axis=1), np.finfo(np.float64).tiny)
    nearest = (stored[wrong] @ (reference / length[:, None]).T).argmax(axis=1)
    hits = int((nearest == wrong).sum())
    # At most comb(w, hits) / n ** hits by accident.
    digits = hits * math.log10(len(reference)) - math.log10(math.comb(len(wrong), hits))
    return 2 * hits >= len(wrong) and digits >= NEAREST_DIGITS


def _other_row(case: StoreCase, wrong: I64) -> tuple[int, int] | None:
    """A wrong row that is right for another row's inputs: (row, other row)."""
    count = len(case.rows)
    values = case.layout.values(case.data[None])[0][case.rows]
    scales = case.layout.scales(case.data[None])[0][case.rows]
    for row in wrong[:TRIED_ROWS].tolist():
        check = check_store(
            case.layout, case.inputs, np.repeat(values[[row]], count, 0), np.repeat(scales[[row]], count, 0)
        )
        fits = np.flatnonzero(check.reproduced & check.judged)
        if len(fits):
            return int(case.rows[row]), int(case.rows[fits[0]])
    return None
