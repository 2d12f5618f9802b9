"""Snapshots of pages, wherever they are: on the host at once, on a device without waiting for it.

A snapshot is an interval. One that was taken beside the engine's streams (a source at its post, a destination at
completion) lasts until its copy is known to be over, on the line of the thread that asked: whatever may have happened
until then may be in it. One that was taken *in order* of a stream is ordered by its launch there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_hooks.codec import StampTuple
from capture_hooks.events import Snapshot
from capture_hooks.inventory import Held
from capture_hooks.recorder import Mark, Recorder
from capture_hooks.taps.host import MAX_BYTES, TAP_OF_STAGE, record, snapshot

if TYPE_CHECKING:
    from capture_hooks.taps.device import DeviceTap

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

_PINNED = 2**28  #: most pinned memory of a tap; a quarter of ``KV_REPLAY_HOST_LIMIT`` where that is less
_taps: weakref.WeakKeyDictionary[Recorder, DeviceTap] = weakref.WeakKeyDictionary()


def device_tap(recorder: Recorder, device: Any = None) -> DeviceTap | None:
    """The recorder's device tap; made for ``device`` (a ``torch.device``) if there is none yet and one is given."""
    found = _taps.get(recorder)
    if found is None and device is not None:
        from capture_hooks.taps.device import DeviceTap

        found = _taps[recorder] = DeviceTap(recorder, device, min(_PINNED, recorder.options.host_limit // 4))
    return found


def look(
    recorder: Recorder,
    stage: str,
    moment: str,
    buffers: Sequence[int],
    pages: Sequence[int] | I64,
    logical: Sequence[int] | I64,
    *,
    room: int,
    attempt: int = 0,
    transfer: int = -1,
    step: int = -1,
    rows: int = -1,
    mark: Mark | None = None,
    aside: bool = False,
    tap: str = "",
) -> None:
    """Record ``pages`` of several buffers as they are at ``stage``: one Snapshot a buffer, as ``taps.host.snapshot``.

    On a device the copies are put on the current stream, so that they are ordered behind what the engine has put there,
    or with ``aside`` on the tap's own stream, where they wait for nothing and see the memory as it is. Nothing is done
    if the stage's tap (or ``tap``) is off. Never raises and never waits.
    """
    if not len(pages) or recorder.closed or not recorder.options.tap(tap or TAP_OF_STAGE.get(stage, "read")):
        return
    mark = mark or recorder.mark()
    on_device: list[Held] = []
    for number in buffers:
        with recorder.guard("look"):
            held = recorder.inventory.buffer(number)
            if held.view is not None:
                snapshot(
                    recorder, stage, moment, number, pages, logical, room=room, attempt=attempt,
                    transfer=transfer, step=step, rows=rows, mark=mark, tap=tap,
                )  # fmt: skip
            elif held.tensor is not None:
                on_device.append(held)
    if on_device:
        with recorder.guard("look"):
            bare = [
                Snapshot(stage, moment, room, attempt, held.event.buffer, transfer, step, rows)
                for held in on_device
            ]
            _look_at_device(recorder, on_device, bare, np.array(pages, np.int64), np.array(logical, np.int64),
                            mark, aside)  # fmt: skip


def _look_at_device(
    recorder: Recorder,
    buffers: list[Held],
    bare: list[Snapshot],
    pages: I64,
    logical: I64,
    mark: Mark,
    aside: bool,
) -> None:
    import torch

    from capture_hooks.taps.device import Job, gather

    tap = device_tap(recorder, buffers[0].tensor.device)
    if tap is None or tap.capturing():
        return
    if pages.shape != logical.shape or pages.ndim != 1:
        raise ValueError("pages and logical must be lists of one length")
    if pages.min() < 0 or pages.max() >= buffers[0].event.pages:
        raise ValueError(f"page {int(pages.max())} is not in buffer {buffers[0].event.buffer}")
    asked = recorder.stamp(mark)
    most = max(1, MAX_BYTES // (sum(held.layout.page_bytes for held in buffers)))
    with torch.cuda.stream(tap.aside) if aside and tap.cuda else contextlib.nullcontext():
        for start in range(0, len(pages), most):
            ids, places = pages[start : start + most], logical[start : start + most]
            on_device = tap.upload(ids)
            job = Job()
            for held in buffers:
                job.take(gather(held.tensor, on_device, held.layout.page_bytes))

            def finish(arrays: list[U8], ids: I64 = ids, places: I64 = places) -> None:
                over = recorder.mark()
                stamp = (over.seq, asked[1], asked[2], -1, asked[4], over.ns)
                for held, event, data in zip(buffers, bare, arrays, strict=True):
                    emit_snapshot(recorder, held, event, ids, places, data, stamp)

            tap.submit(job, finish, [(Snapshot.TABLE, len(buffers))])


def emit_snapshot(
    recorder: Recorder, held: Held, bare: Snapshot, pages: I64, logical: I64, data: U8, stamp: StampTuple
) -> None:
    """Queue a Snapshot record of page bytes ``uint8[n, page_bytes]``, which are copied."""
    event = Snapshot(
        bare.stage, bare.moment, bare.room, bare.attempt, bare.buffer, bare.transfer, bare.step, bare.rows,
        logical, pages,
    )  # fmt: skip
    if recorder.reserve(data.nbytes, Snapshot.TABLE, stamp[0]):
        record(recorder, held.layout, np.array(data), event, stamp)
