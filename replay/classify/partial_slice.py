"""F06: only a slice of every page is transferred, or the same slice in the place of all.

Signature: the descriptors bring one fixed sub-range of every page of the buffer, in place, and the rest keeps the old
bytes; or each rank's part of the page is filled from the same part of the source ("all ranks identical").

Chosen over F03, where the item lengths that made the descriptors disagree with the page (a length too short, from the
page's first byte on); over F08, where the descriptors bring the whole page and a copy beside them dropped its tail;
over F07, where every byte of the source is brought once, in another order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, runs, unit_mask
from replay.classify.undelivered import Undelivered, look, still_old
from replay.verdict import Confidence, RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F06",
    shows=(
        "descriptors bring the same part of every page and nothing of the rest, or one part of the source in the "
        "place of all; the item lengths are the page's"
    ),
    certain=(
        "the sender's descriptors are all recorded, the rest of the page holds its old bytes; nothing is left "
        "unexplained"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F03", "the item lengths are right: the descriptors leave out a part of each page"),
        ("F08", "the descriptors themselves leave the part out"),
        ("F07", "part of the source is brought nowhere"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` in the part of the page that no descriptor fills, or that all ranks fill alike."""
    found = look(case, evidence)
    if found is None or not len(found.here):
        return None
    size = case.layout.page_bytes
    parts = _parts(case, evidence, found)
    if not parts or not _alike(case, evidence, found, parts):
        return None
    source_stage = next(stage for stage in ("SE", "SE+", "ST") if case.has(stage))
    covered, repeated = np.zeros(size, bool), np.zeros(size, bool)
    for start, stop, source_start in parts:
        if source_start == start:
            covered[start:stop] = True
        else:
            repeated[start:stop] = True
    if repeated.any():
        return _identical(case, bad, parts, repeated, source_stage)
    if covered.all() or _length_short(case, evidence, parts):
        return None
    left_out = bad & ~unit_mask(case.layout, covered)
    if not left_out.any():
        return None
    old = _old(case, left_out, covered)
    sure = old and bool((left_out == bad).all())
    values, scales = halves(left_out)
    words = ", ".join(f"[{start},{stop})" for start, stop in runs(covered))
    return Explanation(
        code="F06",
        stage="descriptor",
        confidence="certain" if sure else "likely",
        explained=left_out,
        expected=source_stage,
        observed="RC",
        evidence=(
            f"the descriptors bring bytes {words} of every page of {case.buffer.name} ({size} bytes) and leave out the "
            "rest",
            f"{in_words(values, scales)} lie in what is left out",
            *(("the rest holds what was there before the transfer",) if old else ()),
        ),
        rule=f"only bytes {words} of every page are sent",
        runner_up=RunnerUp(
            "F03", "the item lengths are right: the descriptors leave out a part of each page"
        ),
    )


def _identical(
    case: Case, bad: Bool, parts: list[tuple[int, int, int]], repeated: Bool, source_stage: str
) -> Explanation | None:
    """All parts of the page, or of each of its rows, are filled from one of them."""
    filled: dict[tuple[int, int], list[int]] = {}
    for start, stop, source in parts:
        filled.setdefault((source, stop - start), []).append(start)
    explained = bad & unit_mask(case.layout, repeated, some=True)
    ranks = len(next(iter(filled.values())))
    if ranks < 2 or not explained.any() or any(len(starts) != ranks for starts in filled.values()):
        return None
    # In the slices of rows, what is filled alike lies side by side; anything else is another order of the source.
    if len(filled) > 1 and any(
        starts != [source + k * length for k in range(ranks)] for (source, length), starts in filled.items()
    ):
        return None
    seen, right = case.data("RC"), case.data(source_stage)
    kept = seen is not None and right is not None
    if (
        seen is not None
        and right is not None
        and any(
            not np.array_equal(seen[start:stop], right[source : source + stop - start])
            for start, stop, source in parts
        )
    ):
        return None
    source, length = min(filled)
    what = f"bytes [{source},{source + length}) of the source"
    if len(filled) > 1:
        what = f"the same part of the source: {what}, and {len(filled) - 1} more like it"
    confidence: Confidence = "certain" if bool((explained == bad).all()) else "likely"
    return Explanation(
        code="F06",
        stage="descriptor",
        confidence=confidence,
        explained=explained,
        expected=source_stage,
        observed="RC",
        evidence=(
            f"{ranks} parts of every {'page' if len(filled) == 1 else 'row'} are all filled from {what}",
            *(("the page holds these bytes in each part",) if kept else ()),
        ),
        rule=f"every part is the source's bytes [{source},{source + length})",
        runner_up=RunnerUp("F07", "part of the source is brought nowhere"),
    )


def _parts(case: Case, evidence: Evidence, found: Undelivered) -> list[tuple[int, int, int]]:
    """(start, stop, source start) of what is written to the page; empty where another page than its own comes."""
    pieces = evidence.descriptors.pieces
    own = evidence.descriptors.from_own_page(found.here, found.source, found.source_page, case.logical)
    if not own.all():
        return []
    parts = zip(
        pieces.start[found.here].tolist(),
        pieces.stop[found.here].tolist(),
        pieces.source_start[found.here].tolist(),
        strict=True,
    )
    return sorted(set(parts))


def _alike(case: Case, evidence: Evidence, found: Undelivered, parts: list[tuple[int, int, int]]) -> bool:
    """Whether the request's descriptors bring these very parts to each of its pages in the buffer."""
    pieces = evidence.descriptors.pieces
    rows = found.buffer
    wanted = {(start, stop) for start, stop, _ in parts}
    for page in np.unique(pieces.page[rows]).tolist():
        here = rows[pieces.page[rows] == page]
        if set(zip(pieces.start[here].tolist(), pieces.stop[here].tolist(), strict=True)) != wanted:
            return False
    return True


def _length_short(case: Case, evidence: Evidence, parts: list[tuple[int, int, int]]) -> bool:
    """Whether this is a length that is too short (F03): one part, from byte 0 on, as long as the item length told."""
    if len(parts) != 1 or parts[0][0] != 0:
        return False
    return case.layout.page_bytes not in evidence.descriptors.told_lengths(case.request, case.process)


def _old(case: Case, left_out: Bool, covered: Bool) -> bool:
    """Whether the part that is left out still holds what was there before, as far as the looks can tell."""
    before, seen = case.data("RC-"), case.data("RC")
    if before is not None and seen is not None and len(before) == len(seen) == len(covered):
        return bool((before == seen)[~covered].all())
    whole = left_out & ~unit_mask(case.layout, covered, some=True)
    return bool(whole.any() and (still_old(case, whole) == whole).all())
