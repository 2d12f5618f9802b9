"""F20 at the store: a store's kernel was given another stride than the pages have.

Signature: data for page p was put at byte ``p * stride``: page 0 is right, page p keeps its old rows, and what lies at
``p * stride`` (page c * p, or another layer's) changed.

Chosen over F30, where the rows are in their place and wrong; over F14, F11 and F15 for the page that was hit, since the
writer is a store that lands there by its own stride.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.bisect import Case
from replay.classify.base import Evidence, Explanation, halves, span, unit_mask
from replay.classify.wrote_here import place_of, writes
from replay.verdict import RunnerUp

Bool = npt.NDArray[np.bool_]


def hit(case: Case, evidence: Evidence, bad: Bool, stage: str) -> Explanation | None:
    """Units of ``bad`` (a page that changed after its store or arrival) where such a store landed."""
    place = place_of(case, stage)
    if place is None or not halves(bad)[0].any() or not len(evidence.local.strided):
        return None
    table = case.timeline.trace.table("store")
    strided = set(evidence.local.strided.tolist())
    for write, proven in writes(evidence, place):
        if write.table != "store" or write.row not in strided:
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
            expected=place.earlier,
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
