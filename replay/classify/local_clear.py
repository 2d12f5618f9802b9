"""F15: the reading side cleared or rewrote a page after its bytes had arrived.

Signature: RC is right, and a later look or read shows zeros, or the page's own content from before the transfer. The
zeros may reach over the page into its neighbours: then they are as long as a slab's stride.

Chosen over F14, whose bytes are those of a foreign source page and whose transfer names this one; over F16, whose
bytes another owner of the page brought later; over F23 and F29, where a store names the rows; over F09, where RC was
not right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from capture_hooks.layouts import Layout
from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, Kind, claims, halves, in_words, runs, unit_mask
from replay.classify.wrote_here import Place, place_of, quiet, writes
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]

#: Zero bytes in the place of others that are needed to call them a clear: fewer may be one altered word.
ENOUGH_BYTES = 16

KIND = Kind(
    code="F15",
    shows="the page arrived right and holds zeros, or what it held before the transfer, at a later look",
    certain=(
        "a recorded clear lies between the looks; or no transfer can have written then and no store or copy did: "
        "sends, allocations, stores and copies all recorded"
    ),
    best=claims(digest="certain", pages="certain"),
    rivals=(
        ("F14", "the bytes are no foreign source page's, and no transfer in flight names the page"),
        ("F16", "no other owner brought these bytes"),
        ("F09", "the page was right at completion"),
    ),
)


def explain(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` that hold zeros, or the page's content from before the transfer."""
    place = place_of(case, stage)
    if place is None or place.at_source:
        return None
    cleared = _cleared(case, bad, stage, place.expected)
    stale = bad & case.same(stage, "RC-") if case.has("RC-") and stage != "RC" else np.zeros(len(bad), bool)
    zero = int(halves(cleared)[0].sum()) >= int(halves(stale)[0].sum())
    explained = cleared if zero else stale
    values, scales = halves(explained)
    if not values.any():
        return None
    told = _clear_record(case, evidence, place, explained) if zero else None
    others = [
        write
        for write, _ in writes(evidence, place)
        if not write.padding and (unit_mask(case.layout, write.mask, some=True) & explained).any()
    ]
    if told is None and others:
        return None  # a store or copy of the engine may have written this: not a clear
    unseen = quiet(evidence, place) and evidence.covers(place.process, "store", "copy")
    if told is None and not unseen:
        # A foreign transfer may carry zeros too, from a page nobody had written: with sends, stores or copies that may
        # be missing, nothing tells a clear from that.
        return None
    sure = (unseen or (told is not None and told[1])) and bool((explained == bad).all())
    run = _zero_run(case, evidence, place, stage) if zero else ""
    what = "zeros" if zero else "what the page held before the transfer"
    lines = [
        f"{in_words(values, scales)} were right at {place.expected} and hold {what} at {stage}",
        *((run,) if run else ()),
    ]
    if told is not None:
        lines.append(told[0])
    else:
        lines.append(
            "no transfer was in flight for the page, and no store or copy that was recorded touched it"
        )
    return Explanation(
        code="F15",
        stage="destination",
        confidence="certain" if sure else "likely",
        explained=explained,
        expected=place.expected,
        observed=stage,
        evidence=tuple(lines),
        rule="cleared after arrival" if zero else "its earlier content came back",
        runner_up=RunnerUp(
            "F14", "the bytes are no foreign source page's, and no transfer in flight names the page"
        ),
    )


def recorded(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """As :func:`explain` for a page that was cleared before anybody saw it right: only where the clear was recorded."""
    place = place_of(case, stage)
    if place is None or place.at_source:
        return None
    cleared = _cleared(case, bad, stage, place.expected)
    if not halves(cleared)[0].any() or _clear_record(case, evidence, place, cleared) is None:
        return None
    return explain(case, evidence, bad, stage)


@lru_cache(maxsize=16)
def _zero_units(layout: Layout) -> U64:
    found = digest_pages(layout, np.zeros((1, layout.page_bytes), np.uint8))
    return np.concatenate([found.row_values[0], found.row_scales[0].astype(np.uint64)])


def _cleared(case: Case, bad: Bool, stage: str, earlier: str) -> Bool:
    """Units of ``bad`` whose altered bytes are all zero."""
    whole = bad & (case.units[stage] == _zero_units(case.layout))
    right, seen = case.data(earlier), case.data(stage)
    if right is None or seen is None or len(right) != len(seen) or len(right) != case.layout.page_bytes:
        return np.asarray(whole)
    altered = right != seen
    if int((altered & (seen == 0)).sum()) < ENOUGH_BYTES:
        return np.asarray(whole)
    # The edge of a clear may lie within a row.
    return np.asarray(bad & unit_mask(case.layout, ~altered | (seen == 0)))


def _clear_record(case: Case, evidence: Evidence, place: Place, explained: Bool) -> tuple[str, bool] | None:
    """The recorded clear that covers the units, in words, and whether order puts it between the looks."""
    table = case.timeline.trace.table("copy")
    for write, proven in writes(evidence, place):
        if write.table != "copy" or str(table["operation"][write.row]) != "clear":
            continue
        if (explained & ~unit_mask(case.layout, write.mask, some=True)).any():
            continue
        length, pitch = int(table["length"][write.row]), case.buffer.pitch
        ids = table.ragged("ids")[write.row].tolist()
        named = place.page in ids
        return (
            f"a clear of {length} bytes at page{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:6]))} lies "
            "between the two looks"
            + ("" if named else f": it reaches over its own pages, which are {pitch} bytes apart")
        ), proven
    return None


def _zero_run(case: Case, evidence: Evidence, place: Place, stage: str) -> str:
    """How far the zeros reach, in words: within the page, and over its neighbours where they were looked at."""
    seen = case.data(stage)
    size = case.layout.page_bytes
    if not case.valid.all() and seen is None:
        return ""
    zero = _zero_units(case.layout)
    if not bool((case.units[stage] == zero)[case.valid].all()):
        if seen is None or len(seen) != size:
            return ""
        longest = max(runs(seen == 0), key=lambda run: run[1] - run[0], default=(0, 0))
        return f"the zeros are bytes [{longest[0]},{longest[1]}) of the page"
    is_zero = _zero_at(case, stage, zero)
    first = last = place.page
    while is_zero(first - 1):
        first -= 1
    while is_zero(last + 1):
        last += 1
    if first == last:
        return "the whole page is zero, and its neighbours are not known to be"
    run = (last - first) * case.buffer.pitch + size
    return f"the zeros reach over pages {first}..{last} of the buffer, {run} bytes"


def _zero_at(case: Case, stage: str, zero: U64) -> Callable[[int], bool]:
    """Whether the last look at a page of the buffer at ``stage`` shows no value but zeros."""
    snaps = case.timeline.snapshots
    contents = case.timeline.trace.contents

    def is_zero(page: int) -> bool:
        looks = snaps.at_place(stage, case.buffer.number, page) if page >= 0 else np.zeros(0, np.int64)
        looks = looks[snaps.content[looks] >= 0]
        if not len(looks):
            return False
        content = snaps.content[looks[-1:]]
        if int(contents.rows[int(content[0])]) != case.layout.rows:
            return False
        values = contents.row_values(content)[0]
        return bool((values == zero[: case.layout.rows]).all())

    return is_zero
