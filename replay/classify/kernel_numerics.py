"""F25: the read kernel's arithmetic.

Signature: bytes, table and lengths are right and known (the pages did not change while the kernel ran), and logits lie
outside the bound that any right kernel keeps. Told apart by trying the other ways to go wrong at the read on the
same bytes: another page layout, zeros for whole pages, a constant factor, another page's keys. Where one of them gives
these logits, the kind is not F25, and the finding says so instead of naming it. The logits are those of the trace, or
those of a kernel of the user's that was run on the same bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.classify.base import VOCABULARY, Evidence, Kind, claims, span
from replay.findings import PageEvidence, byte_ranges, kind_name, ranges
from replay.kernels.reference import TopKViolations, logits_reference
from replay.recorded import ReadCase
from replay.timeline import Timeline
from replay.verdict import Confidence, PageFinding

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]

KIND = Kind(
    code="F25",
    shows="logits outside the bound on known bytes",
    certain=(
        "pages and table were the same before and after the kernel; no other layout, factor, page "
        "or zero run gives these logits"
    ),
    best=claims(digest=None, pages="certain"),
    rivals=(
        ("F07", "no other layout of the same bytes gives these logits"),
        ("F24", "no other number format gives them"),
        ("F21", "the pages do not give zeros from some page id on"),
    ),
)

INVALID_TOP_K = Kind(
    code="F26",
    shows="slots among the first min(length, k) that name no row",
    certain="the logits are those recorded with it, and hold no NaN",
    best=claims(digest=None, pages="certain"),
    rivals=(("F27", "the slots name no row"),),
)

WRONG_TOP_K = Kind(
    code="F27",
    shows="valid rows below the k-th score",
    certain="the logits are those recorded with it, and hold no NaN",
    best=claims(digest=None, pages="certain"),
    rivals=(("F26", "every slot names a row, once"),),
)


def explain(
    timeline: Timeline, evidence: Evidence, case: ReadCase, logits: F64, bound: F64, wrong: Bool
) -> list[PageEvidence]:
    """One entry for each page with wrong logits."""
    rule = _other_cause(case, logits, bound, wrong)
    code = "F25" if rule is None else "unclassified"
    seen = bool(case.kernel) or (case.bracketed and evidence.covers(case.process, "read"))
    sure = seen and rule is None
    confidence: Confidence = "certain" if sure else "likely"
    rows = case.layout.rows
    excess = np.abs(case.logits - logits) / np.where(np.isfinite(bound) & (bound > 0), bound, np.inf)
    worst = int(np.nanargmax(np.where(wrong, np.nan_to_num(excess, nan=np.inf), -1.0)))
    step = int(timeline.trace.table("read")["step"][case.read])
    whose = f"your kernel {case.kernel}" if case.kernel else "recorded"
    lines = (
        f"step {step}: {int(wrong.sum())} of {case.rows} logits lie outside the bound; row {worst}: {whose} "
        f"{float(case.logits[worst]):.6g}, reference {float(logits[worst]):.6g}, bound {float(bound[worst]):.2g}",
        *_circumstances(case),
    )
    found = []
    for logical in np.unique(np.flatnonzero(wrong) // rows).tolist():
        inside = np.zeros(rows, bool)
        part = wrong[logical * rows : (logical + 1) * rows]
        inside[: len(part)] = part
        info = timeline.buffers[case.buffer]
        spans, _ = byte_ranges(case.layout, inside, inside)
        found.append(
            PageEvidence(
                code=code,
                kind="kernel-numerics" if code == "F25" else "unclassified",
                stage="read-kernel",
                confidence=confidence,
                process=case.process,
                request=case.request,
                buffer=info.name,
                layer=info.layer,
                page=PageFinding(
                    logical=int(logical),
                    physical=int(case.physical[logical]),
                    value_rows=ranges(inside),
                    scale_rows=ranges(inside) if case.layout.scale_bytes else (),
                    byte_ranges=spans,
                ),
                evidence=(*lines, f"wrong in this page: {span(inside)}"),
                rule=rule,
            )
        )
    return found


def _circumstances(case: ReadCase) -> tuple[str, ...]:
    if case.kernel:
        return ("it was run on a copy of the pages that the read saw, with the recorded query and weights",)
    same = (
        "the pages and the table were the same before and after the kernel"
        if case.bracketed
        else "whether the pages stayed the same while the kernel ran is not known"
    )
    return "the page bytes are those that arrived, and table and length are right", same


def _other_cause(case: ReadCase, logits: F64, bound: F64, wrong: Bool) -> str | None:
    """Another cause that gives the wrong rows these logits, in words."""
    seen = case.logits.astype(np.float64)
    if not np.isfinite(seen[wrong]).all():
        return "logits that are no numbers"
    rows = case.layout.rows
    pages = np.unique(np.flatnonzero(wrong) // rows)
    index = np.flatnonzero(np.isin(np.arange(case.rows) // rows, pages))
    if (seen[index] == 0).all() and wrong[index].mean() > 0.5:
        return "whole pages give exactly zero, as an address out of range does"
    for factor in (2.0, 0.5, 4.0, 0.25, -1.0):
        scaled = np.abs(seen - factor * logits) <= abs(factor) * bound
        if scaled[wrong].all() and wrong.sum() >= 4:
            return f"the wrong logits are {factor:g} times the right ones, as with another number format"
    if case.layout.name == "fp8":
        other = _interleaved(case)
        moved, allowed = logits_reference(case.layout, other, case.rows, case.query, case.weights)
        with np.errstate(invalid="ignore"):
            fits = np.abs(seen - moved) <= allowed
        if fits[wrong].all():
            return "rows read as 132 bytes of value and scale side by side give these logits"
    for logical in pages.tolist():
        for other_page in range(len(case.pages)):
            mine = np.arange(logical * rows, min((logical + 1) * rows, case.rows))
            theirs = np.arange(other_page * rows, min((other_page + 1) * rows, case.rows))
            count = min(len(mine), len(theirs))
            if other_page == logical or count < 8:
                continue
            close = np.abs(seen[mine[:count]] - logits[theirs[:count]]) <= bound[theirs[:count]]
            if close.all():
                return f"logical page {logical} has the logits of logical page {other_page}"
    return None


def _interleaved(case: ReadCase) -> npt.NDArray[np.uint8]:
    """Planar pages as a reader of interleaved rows (value, scale, value, scale ...) sees them."""
    layout = case.layout
    width = layout.value_bytes + layout.scale_bytes
    rows = case.pages[:, : layout.rows * width].reshape(len(case.pages), layout.rows, width)
    values = rows[..., : layout.value_bytes].reshape(len(case.pages), -1)
    scales = rows[..., layout.value_bytes :].reshape(len(case.pages), -1)
    return np.concatenate([values, scales], axis=1)


def top_k(timeline: Timeline, case: ReadCase, broken: TopKViolations) -> PageEvidence:
    """The finding for a top-k that its own logits do not give."""
    info = timeline.buffers[case.buffer]
    parts = {
        "invalid": broken.invalid,
        "repeated": broken.repeated,
        "below the k-th score": broken.low,
        "past the end": broken.surplus,
    }
    # Slots that name no row (or one twice) are invalid; a choice of valid rows below the k-th score is wrong.
    code = (
        "F26"
        if len(broken.invalid) and not len(broken.repeated)
        else "F27"
        if len(broken.low)
        else "unclassified"
    )
    words = ", ".join(f"{len(slots)} {name}" for name, slots in parts.items() if len(slots))
    return PageEvidence(
        code=code,
        kind=kind_name(code),
        stage="top-k",
        confidence="certain" if code in VOCABULARY and broken.judged else "likely",
        process=case.process,
        request=case.request,
        buffer=info.name,
        layer=info.layer,
        page=PageFinding(logical=0, physical=int(case.physical[0]) if len(case.physical) else -1),
        evidence=(f"top-{case.k} of {case.rows} logits: {words} entries", "the logits themselves are right"),
    )
