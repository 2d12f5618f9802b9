"""F20 at the store: a store's kernel was given another stride than the pages have.

Signature: data for page p was put at byte ``p * stride``: page 0 is right, page p keeps its old rows, and what lies at
``p * stride`` (page c * p, or another layer's) changed.

Where the stride was not told, ``rows_at_multiple.py`` finds the rows by their inputs.

Chosen over F30, where the rows are in their place and wrong; over F14, F11 and F15 for the page that was hit, since the
writer is a store that lands there by its own stride.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from capture_hooks.digest import digest_pages
from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, halves, span, unit_mask
from replay.classify.wrote_here import place_of, writes
from replay.findings import PageEvidence
from replay.page_columns import BufferInfo
from replay.ranges import byte_ranges, ranges
from replay.timeline import Timeline
from replay.verdict import PageFinding, RunnerUp

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


def hit(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (a page that changed after its store or arrival) where such a store landed."""
    place = place_of(case, stage)
    if place is None or not halves(bad)[0].any() or not len(evidence.local.strided):
        return None
    table = case.timeline.trace.table("store")
    for write, proven in writes(evidence, place):
        if write.table != "store" or write.row not in evidence.local.strided_set:
            continue
        explained = bad & unit_mask(case.layout, write.mask, some=True)
        values, _ = halves(explained)
        if not values.any():
            continue
        info = evidence.local.buffer_of("store", write.row)
        pitch = info.pitch if info is not None else 0
        room = case.timeline.requests[write.request][0] if write.request >= 0 else -1
        stride = int(table["stride"][write.row])
        return Explanation(
            code="F20",
            stage="store",
            confidence="certain" if proven and bool((explained == bad).all()) else "likely",
            explained=explained,
            expected=place.expected,
            observed=stage,
            evidence=(
                f"{span(values)} of page {place.page} changed after {place.earlier}",
                f"a store of room {room} (step {int(table['step'][write.row])}) was given a stride of {stride} bytes; "
                f"the pages are {pitch} apart, and its rows land here",
            ),
            rule=f"page p was written at byte p * {stride}",
            aliases=(room,) if room >= 0 and write.request != case.request else (),
            runner_up=RunnerUp("F30", "the rows are another page's, put at a wrong address"),
            at_source=place.at_source,
        )
    return None


def own(timeline: Timeline, evidence: Evidence) -> list[PageEvidence]:
    """Pages that such a store should have written and did not: their rows are still old, or another page's."""
    found: list[PageEvidence] = []
    local, snaps = evidence.local, timeline.snapshots
    table = timeline.trace.table("store")
    for store in local.strided.tolist():
        info, request = local.buffer_of("store", store), int(local.store_request[store])
        if info is None or request < 0 or timeline.beside[request]:
            continue
        slots = np.asarray(table.ragged("slots")[store], np.int64)
        moment = timeline.moment("store", store)
        for page in np.unique(slots[slots >= 0] // info.layout.rows).tolist():
            looks = snaps.at_place("ST", info.number, page)
            looks = looks[(snaps.request[looks] == request) & (snaps.content[looks] >= 0)]
            looks = looks[snaps.seq[looks] >= moment.seq]
            if page == 0 or not len(looks):
                continue
            rows = np.unique(slots[slots // info.layout.rows == page] % info.layout.rows)
            wrong = rows[_not_written(evidence, info, page, int(looks[0]), store, rows)]
            if not len(wrong):
                continue
            mask = np.zeros(info.layout.rows, bool)
            mask[wrong] = True
            ordered = timeline.order.before(moment, snaps.moment_of(int(looks[0])))
            sure = ordered and len(wrong) == len(rows) and evidence.covers(info.process, "store")
            spans, _ = byte_ranges(info.layout, mask, mask)
            stride = int(table["stride"][store])
            found.append(
                PageEvidence(
                    code="F20",
                    stage="store",
                    confidence="certain" if sure else "likely",
                    process=info.process,
                    request=request,
                    buffer=info.name,
                    layer=info.layer,
                    page=PageFinding(
                        logical=int(snaps.logical[looks[0]]),
                        physical=page,
                        value_rows=ranges(mask),
                        scale_rows=ranges(mask) if info.layout.scale_bytes else (),
                        byte_ranges=spans,
                    ),
                    evidence=(
                        f"a store (step {int(table['step'][store])}) was given a stride of {stride} bytes; the pages "
                        f"are {info.pitch} apart",
                        f"{span(mask)} of its pages do not hold what it wrote: they are as before, or another page's",
                    ),
                    rule=f"page p was written at byte p * {stride}",
                )
            )
    return found


def _not_written(evidence: Evidence, info: BufferInfo, page: int, look: int, store: int, rows: I64) -> Bool:
    """Rows that the look after the store shows as they were before it, or that another page's rows landed on."""
    timeline = evidence.timeline
    snaps, contents = timeline.snapshots, timeline.trace.contents
    now = contents.row_values(snaps.content[[look]])[0][rows]
    begin = timeline.moment("store", store).begin_seq
    before = np.concatenate(
        [snaps.at_place(name, info.number, page) for name in ("ST", "RC", "LT", "SE", "RD")]
    )
    before = before[(snaps.seq[before] < begin) & (snaps.content[before] >= 0)]
    if len(before):
        last = before[[int(np.argmax(snaps.seq[before]))]]
        old = np.asarray(now == contents.row_values(snaps.content[last])[0][rows])
    else:
        empty = np.zeros((1, info.layout.page_bytes), np.uint8)
        old = np.asarray(now == digest_pages(info.layout, empty).row_values[0][rows])
    for write in evidence.local.of_page(info.number, page):
        if write.table == "store" and write.row == store:
            values = write.mask[: info.layout.scale_base].reshape(info.layout.rows, -1)
            old |= values[rows].any(axis=1)
    return old
