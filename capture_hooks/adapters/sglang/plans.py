"""The plan of a fused store: which rows it writes, where to, and for whom.

A plan row is 16 bytes. Decode: word 0 is the request's length in tokens; the row is written if that is a
multiple of the compress ratio, at ``out_loc`` of the same row. Prefill: word 0 is the position behind the
row's last token (0xFFFFFFFF = padding) and the low half of word 1 the query token, and the row is written at
``out_loc`` of that token. RoPE gets word 0 less the ratio. With plans made on the device the order of rows is
arbitrary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

_PADDING = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Span:
    """Query tokens of one request in a batch: its place, its first query token, its lengths before and
    after.
    """

    index: int
    start: int
    before: int
    length: int


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that a plan writes for known requests, in the plan's order.

    ``plan`` is the row of the plan, ``owner`` the place of its request in the batch, ``slot`` where it is
    written, ``position`` what RoPE gets, ``row`` which row of the request it is, by the batch's own lengths.
    """

    plan: I64
    owner: I64
    slot: I64
    position: I64
    row: I64

    def of(self, owner: int) -> Written:
        """The rows of one request, in the order of its rows."""
        chosen = np.flatnonzero(self.owner == owner)
        chosen = chosen[np.argsort(self.row[chosen], kind="stable")]
        return Written(*(getattr(self, name)[chosen] for name in Written.__slots__))


def written_rows(
    plan: npt.NDArray[np.uint8], out_loc: I64, spans: Sequence[Span], *, decode: bool, ratio: int
) -> Written:
    """Rows written by ``plan`` (``uint8[n, 16]``) with ``out_loc`` (``int64[m]``).

    Rows of nobody in ``spans`` (padding, warm-up, other requests) are left out, and so is a row whose slot
    the plan does not have.
    """
    words = np.ascontiguousarray(plan).view("<u4").reshape(-1, 4)
    length = words[:, 0].astype(np.int64)
    if decode:
        place = np.arange(len(words), dtype=np.int64)
        valid = (length % ratio == 0) & (length > 0)
    else:
        place = (words[:, 1] & 0xFFFF).astype(np.int64)
        valid = length != _PADDING
    valid &= place < len(out_loc)
    chosen = np.flatnonzero(valid)
    place, length = place[chosen], length[chosen]
    owner = np.full(len(chosen), -1, np.int64)
    expected = np.zeros(len(chosen), np.int64)
    for span in spans:
        if decode:
            mine = place == span.index
            expected[mine] = span.length
        else:
            mine = (place >= span.start) & (place < span.start + span.length - span.before)
            expected[mine] = span.before + place[mine] - span.start + 1
        owner[mine] = span.index
    known = owner >= 0
    place, length, expected = place[known], length[known], expected[known]
    return Written(chosen[known], owner[known], out_loc[place], length - ratio, expected // ratio - 1)
