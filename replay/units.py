"""Units of page contents: the digest of each row's values, then the scale word of each row."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

#: Contents read together when only a few are asked for, and how many such blocks are kept (about 50 MB).
_BLOCK = 256
_KEPT = 192
#: Up to this many contents are looked up in blocks; more are read directly.
_FEW = 8


def units_of(timeline: Timeline, content: npt.ArrayLike) -> U64:
    """Units of contents: ``uint64[k, 2 * rows]``. All contents must have the same number of rows."""
    ids = np.asarray(content, np.int64)
    if len(ids) > _FEW:
        return _read(timeline, ids)
    rows = [_one(timeline, number) for number in ids.tolist()]
    return np.stack(rows) if rows else np.zeros((0, 0), np.uint64)


def _one(timeline: Timeline, content: int) -> U64:
    """Classifiers ask for one page at a time, and for its neighbours soon after: read a block at once."""
    blocks: OrderedDict[int, U64] = timeline.unit_blocks
    number, inside = divmod(content, _BLOCK)
    if number in blocks:
        blocks.move_to_end(number)
        return _row(blocks[number], inside)
    contents = timeline.trace.contents
    ids = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, len(contents)), dtype=np.int64)
    if (contents.rows[ids] != contents.rows[content]).any():
        return _row(_read(timeline, np.array([content], np.int64)), 0)  # two formats meet here
    blocks[number] = _read(timeline, ids)
    if len(blocks) > _KEPT:
        blocks.popitem(last=False)
    return _row(blocks[number], inside)


def _row(block: U64, index: int) -> U64:
    row: U64 = block[index]
    return row


def _read(timeline: Timeline, ids: I64) -> U64:
    contents = timeline.trace.contents
    return np.concatenate([contents.row_values(ids), contents.row_scales(ids).astype(np.uint64)], axis=1)
