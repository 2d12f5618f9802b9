"""The lengths that reads used against the rows that exist: the prompt's, and those that this side stored itself.

Judged on the reading side of a transfer alone: a prefill reads each token's own past, so that its reads are shorter
than what is stored. Reads in overshoot steps are judged by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.timeline import Timeline

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

#: Stores whose rows are looked at at once.
_STORES = 1024

#: (process, request, buffer number)
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LengthCase:
    """The reads of one request in one buffer whose length is not that of the rows that exist.

    Columns, one row a read.
    """

    process: int
    request: int
    buffer: int
    reads: I64  #: rows of the read table
    rows: I64  #: length that the kernel used
    exist: I64  #: rows that exist, or that the query may see
    told: Bool  #: whether the record itself says how many the query may see (``Read.accepted``)
    drafted: I64  #: rows with all drafted ones, -1 where not told
    judged: int  #: reads of the request in this buffer, right ones too


@dataclass(frozen=True, slots=True)
class _Stores:
    """What one request stored in one buffer: columns, by begin."""

    begin: I64
    end: I64
    top: I64  #: rows that exist after the store, by its last row
    count: I64  #: rows stored
    draft: Bool
    known: bool  #: whether each record tells the rows of the request


def judge_lengths(timeline: Timeline) -> list[LengthCase]:
    """Compare the length of every read of an arrived request with the rows that exist."""
    reads = timeline.trace.table("read")
    if not len(reads):
        return []
    process = reads["process"].astype(np.int64)
    request = timeline.request_column("read")
    buffer = timeline.buffer_column("read")
    late = timeline.owners.over(process, request, reads["seq"])
    decode = np.array([p.role == "decode" for p in timeline.trace.processes], bool)
    chosen = ~late & (request >= 0) & (buffer >= 0) & decode[process] & ~timeline.marked[request]
    chosen &= timeline.request_rows[np.maximum(request, 0)] >= 0
    index = np.flatnonzero(chosen)
    order = np.lexsort((reads["seq"][index], buffer[index], request[index], process[index]))
    index = index[order]
    if not len(index):
        return []
    keys = np.stack([process[index], request[index], buffer[index]])
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    arrived = set(timeline.phases("arrived"))
    stores = _stores(timeline)
    agreed = _agreed(timeline)
    cases = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(index)], strict=True):
        key = (int(keys[0, start]), int(keys[1, start]), int(keys[2, start]))
        if key[:2] in arrived:
            case = _judge(timeline, key, index[start:stop], stores.get(key), bool(agreed[key[1]]))
            if case is not None:
                cases.append(case)
    return cases


def _agreed(timeline: Timeline) -> Bool:
    """Requests of which both sides told the same number of rows."""
    table = timeline.trace.table("request")
    numbers, told = timeline.request_column("request"), table["rows"].astype(np.int64)
    agreed = np.ones(len(timeline.requests) + 1, bool)
    known = (numbers >= 0) & (told >= 0)
    agreed[numbers[known & (told != timeline.request_rows[np.maximum(numbers, 0)])]] = False
    return agreed


def _stores(timeline: Timeline) -> dict[Key, _Stores]:
    """Stores of each request and buffer."""
    table = timeline.trace.table("store")
    top = np.full(len(table), -1, np.int64)
    count = np.zeros(len(table), np.int64)
    for low in range(
        0, len(table), _STORES
    ):  # the rows of all stores at once may be more than fits into memory
        rows = table.arrays("logical_rows", low, min(low + _STORES, len(table)))
        owner = low + np.asarray(rows.owner(), np.int64)
        values = np.asarray(rows.values, np.int64)
        np.maximum.at(top, owner, values)
        np.add.at(count, owner, values >= 0)
    slot_count = table.lengths("slots")
    request, buffer = timeline.request_column("store"), timeline.buffer_column("store")
    found: dict[Key, list[int]] = {}
    columns = zip(table["process"].tolist(), request.tolist(), buffer.tolist(), strict=True)
    for row, key in enumerate(columns):
        if key[1] >= 0 and key[2] >= 0:
            found.setdefault(key, []).append(row)
    result = {}
    for key, listed in found.items():
        index = np.array(listed, np.int64)
        index = index[np.argsort(table["begin_seq"][index], kind="stable")]
        result[key] = _Stores(
            begin=table["begin_seq"][index].astype(np.int64),
            end=table["seq"][index].astype(np.int64),
            top=top[index] + 1,
            count=count[index],
            draft=table["draft"][index].astype(bool),
            known=bool(((top[index] >= 0) | (slot_count[index] == 0)).all()),
        )
    return result


def _judge(
    timeline: Timeline, key: Key, index: I64, stores: _Stores | None, agreed: bool
) -> LengthCase | None:
    """The reads ``index`` of one request in one buffer; None where all lengths are right or nothing can be said."""
    if stores is not None and not stores.known:
        return None
    table = timeline.trace.table("read")
    rows = table["rows"][index].astype(np.int64)
    accepted = table["accepted"][index].astype(np.int64)
    prompt = int(timeline.request_rows[key[1]])
    most = np.full(len(index), prompt, np.int64)  # rows that may exist when the read ends
    least = np.full(len(index), prompt, np.int64)  # rows that exist when it begins
    appended = np.zeros(len(index), bool)
    if stores is not None:
        height = np.concatenate([[0], np.maximum.accumulate(stores.top)])
        most = np.maximum(most, height[np.searchsorted(stores.begin, table["seq"][index], side="left")])
        last = np.searchsorted(stores.end, table["begin_seq"][index], side="left") - 1
        # Only where stores come one after the other, a row at a time, is the last one the length.
        single = (stores.count == 1) & ~stores.draft
        plain = bool(single.all() and (np.diff(stores.end) > 0).all() and (np.diff(stores.top) >= 0).all())
        if plain:
            appended = last >= 0
            least[appended] = np.maximum(least[appended], stores.top[last[appended]])
    told = accepted >= 0
    exist = np.where(rows > most, most, np.where(rows < least, least, rows))
    if not agreed:
        exist = np.where(rows < least, rows, exist)
    exist = np.where(told, accepted, exist)
    wrong = rows != exist
    # Less than was stored, but not less than the prompt: only where every such read is short by the same.
    short = wrong & ~told & (rows < exist) & (rows >= prompt)
    if short.any():
        same = np.unique((rows - exist)[appended & ~told])
        if len(same) != 1 or int((appended & ~told).sum()) < 2:
            wrong &= ~short
    if not wrong.any():
        return None
    hit = np.flatnonzero(wrong)
    return LengthCase(
        process=key[0],
        request=key[1],
        buffer=key[2],
        reads=index[hit],
        rows=rows[hit],
        exist=exist[hit],
        told=told[hit],
        drafted=table["drafted"][index[hit]].astype(np.int64),
        judged=len(index),
    )
