"""Snapshots of pages that the host can read: a copy under an interval stamp, digested on the writer's thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from capture_hooks.codec import Encoded, StampTuple, encode
from capture_hooks.digest import digest_pages
from capture_hooks.events import Snapshot
from capture_hooks.layouts import Layout
from capture_hooks.recorder import Mark, Recorder

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: The tap (``options.TAPS``) that each stage belongs to.
TAP_OF_STAGE = {"ST": "store", "SE": "send", "RC": "receive", "LT": "receive", "RD": "read"}

#: A larger snapshot becomes several records.
MAX_BYTES = 16 * 2**20


def snapshot(
    recorder: Recorder,
    stage: str,
    moment: str,
    buffer_id: int,
    pages: Sequence[int] | I64,
    logical: Sequence[int] | I64,
    *,
    room: int,
    attempt: int = 0,
    transfer: int = -1,
    step: int = -1,
    rows: int = -1,
    mark: Mark | None = None,
    tap: str = "",
) -> int:
    """Copy ``pages`` of a buffer and record them as they were at ``stage``; emits Snapshot records.

    The caller pays for the copy alone; digests are made from it on the writer's thread, and the bytes are kept as
    the mode says. The stamp's interval runs from ``mark`` (default: just before the copy) to just after it. Nothing is
    done if the stage's tap (or ``tap``) is off or the buffer has no memory that the host can read.

    If the copy does not fit in the queue (a quarter of ``KV_REPLAY_HOST_LIMIT``) the snapshot is dropped and counted:
    the caller is never made to digest. Never raises; a wrong page id is counted as a failure of hook "host-tap".

    Returns the sequence number of the (first) record, -1 if there is none.
    """
    if recorder.closed or not recorder.options.tap(tap or TAP_OF_STAGE.get(stage, "read")):
        return -1
    first_seq = -1
    with recorder.guard("host-tap"):
        held = recorder.inventory.buffer(buffer_id)
        if held.view is None:
            return -1
        # Copies: the record is made later, and the caller's lists may be live tables.
        ids, places = np.array(pages, np.int64), np.array(logical, np.int64)
        if ids.shape != places.shape or ids.ndim != 1:
            raise ValueError("pages and logical must be lists of one length")
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(held.view)):
            raise ValueError(f"page {int(ids.max())} is not in buffer {buffer_id}")
        most = max(1, MAX_BYTES // held.layout.page_bytes)
        for start in range(0, len(ids), most):
            part = slice(start, start + most)
            seq = _one(
                recorder, held.layout, held.view, mark or recorder.mark(),
                Snapshot(stage, moment, room, attempt, buffer_id, transfer, step, rows, places[part], ids[part]),
            )  # fmt: skip
            first_seq = seq if first_seq < 0 else first_seq
    return first_seq


def _one(recorder: Recorder, layout: Layout, view: U8, mark: Mark, bare: Snapshot) -> int:
    size = len(bare.pages) * layout.page_bytes
    if not recorder.reserve(size, Snapshot.TABLE, mark.seq):
        return -1
    copied = view[:, : layout.page_bytes][bare.pages]
    return record(recorder, layout, copied, bare, recorder.stamp(mark))


def record(recorder: Recorder, layout: Layout, copied: U8, bare: Snapshot, stamp: StampTuple) -> int:
    """Queue the record of page bytes for which the queue's bytes are reserved. Returns its sequence number or -1."""

    def finish() -> Encoded:
        found = digest_pages(layout, copied)
        recorder.keep(layout.name, found.digests, copied, stamp[5])
        event = Snapshot(
            bare.stage, bare.moment, bare.room, bare.attempt, bare.buffer, bare.transfer, bare.step, bare.rows,
            bare.logical, bare.pages, found.digests, found.row_values, found.row_scales,
        )  # fmt: skip
        return encode(event, stamp)

    return recorder.defer(copied.nbytes, finish, Snapshot.TABLE, stamp[0])
