"""F20 at the store, from the bytes alone: the rows of page p lie at page c * p.

Asked where a store's own page does not hold its rows, for kernels whose stride was not told. The rows of page p must be
right for their inputs at page c * p, or those of page p / c lie where the store's own rows should be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay.classify.wrong_stride import FACTORS
from replay.kernels.reference import StoreInputs, check_store
from replay.recorded import StoreCase
from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]

#: Rows that must be right for other inputs.
LEAST_ROWS = 4


def factor(timeline: Timeline, case: StoreCase, wrong: I64) -> int:
    """C where the wrong rows of a store lie at page c * p, or page p / c's rows lie in their place; 0 otherwise."""
    if len(wrong) < LEAST_ROWS or case.kernel:
        return 0
    return next(
        (c for c in FACTORS if _there(timeline, case, wrong, c) or _here(timeline, case, wrong, c)), 0
    )


def _there(timeline: Timeline, case: StoreCase, wrong: I64, factor: int) -> bool:
    """Whether a later look at page c * p shows the wrong rows as their inputs give them."""
    snaps, contents = timeline.snapshots, timeline.trace.contents
    seq = int(timeline.trace.table("store")["seq"][case.store])
    for stage in ("ST", "SE", "RC", "LT"):
        looks = snaps.at_place(stage, case.buffer, case.page * factor)
        looks = looks[(snaps.seq[looks] >= seq) & (snaps.content[looks] >= 0)]
        for content in snaps.content[looks[:2]].tolist():
            if contents.has_data[content]:
                data = np.asarray(contents.data(np.array([content]))[0])
                if _right(case, data, case.rows[wrong], _part(case.inputs, wrong)):
                    return True
    return False


def _here(timeline: Timeline, case: StoreCase, wrong: I64, factor: int) -> bool:
    """Whether the wrong rows are those of page p / c, which the request stored before."""
    if case.page % factor:
        return False
    return any(
        _right(case, case.data, rows, inputs)
        for rows, inputs in _stored(timeline, case, case.page // factor, case.rows[wrong])
    )


def _stored(timeline: Timeline, case: StoreCase, page: int, wanted: I64) -> Iterator[tuple[I64, StoreInputs]]:
    """Rows (of ``wanted``) and inputs of every store of the same request to ``page``."""
    table = timeline.trace.table("store")
    mine = (table["process"] == case.process) & (timeline.request_column("store") == case.request)
    mine &= timeline.buffer_column("store") == case.buffer
    for store in np.flatnonzero(mine & (table.bulk_size("keys") > 0)).tolist():
        slots = np.asarray(table.array("slots", store), np.int64)
        chosen = np.flatnonzero(
            (slots // case.layout.rows == page) & np.isin(slots % case.layout.rows, wanted)
        )
        if len(chosen) < LEAST_ROWS:
            continue
        keys, rope = table.bulk("keys", store), table.bulk("rope", store)
        if len(keys) == len(rope) == len(slots):
            inputs = StoreInputs(keys[chosen], rope[chosen], case.inputs.norm_weight, case.inputs.epsilon)
            yield slots[chosen] % case.layout.rows, inputs


def _part(inputs: StoreInputs, rows: I64) -> StoreInputs:
    return StoreInputs(inputs.keys[rows], inputs.rope[rows], inputs.norm_weight, inputs.epsilon)


def _right(case: StoreCase, data: npt.NDArray[np.uint8], rows: I64, inputs: StoreInputs) -> bool:
    layout = case.layout
    check = check_store(
        layout, inputs, layout.values(data[None])[0][rows], layout.scales(data[None])[0][rows]
    )
    return bool(check.reproduced.all()) and int(check.judged.sum()) >= LEAST_ROWS
