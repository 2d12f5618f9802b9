"""Tensors of a device, taken in stream order without waiting, and handed to the host once they have arrived.

A :class:`Job` gathers tensors on the current stream. ``submit`` packs them on the device into one, has it copied to
pinned memory on a stream of its own and returns; a thread of the tap waits for the copy and calls ``finish`` with
numpy arrays, in the order of the submits. The calling thread only launches work: it never synchronises, and it
allocates no pinned memory after the start. What finds no place in the pinned memory is counted as lost.

On a CPU the same code runs with plain memory and without streams. Imported only where torch is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capture_hooks.recorder import Recorder

Array = npt.NDArray[Any]
Finish = Callable[[list[Array]], None]

_DTYPES: dict[torch.dtype, str] = {
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.bool: "|u1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",  # the codes; numpy has no bfloat16
    torch.float8_e4m3fn: "|u1",
}
_JOIN_SECONDS = 0.5
_STAGED = 2**16  #: most bytes of one copy that CUDA stages


class PinnedRing:
    """Places in one buffer, given back in the order in which they were taken. All sizes are in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._head = self._tail = 0  # next free byte, first byte in use
        self._live: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Offset of ``size`` adjacent bytes (a multiple of 64), None where there are none."""
        size = max(64, -(-size // 64) * 64)
        with self._lock:
            if not self._live:
                self._head = self._tail = 0
            if size > self.size:
                return None
            at = self._head
            if self._live and self._head <= self._tail:  # wrapped: free is head .. tail
                if at + size > self._tail:
                    return None
            elif at + size > self.size:
                if size > self._tail:
                    return None
                at = 0
            self._head = at + size
            self._live.append((at, size))
            return at

    def give(self) -> None:
        """Give the oldest place back."""
        with self._lock:
            self._live.pop(0)
            self._tail = self._live[0][0] if self._live else self._head

    @property
    def free(self) -> int:
        """About how many bytes can be taken now."""
        with self._lock:
            return self.size - sum(size for _, size in self._live)


@dataclass(slots=True)
class Job:
    """Tensors that are taken together. Their device memory is held until they have arrived."""

    parts: list[torch.Tensor] = field(default_factory=list)

    def take(self, tensor: torch.Tensor) -> int:
        """Add a tensor (any shape); returns its place in the list that ``finish`` gets.

        The tensor is read when the job is submitted: pass a copy of what may be overwritten before.
        """
        self.parts.append(tensor.contiguous())
        return len(self.parts) - 1

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for part in self.parts)


@dataclass(slots=True)
class _Flying:
    size: int
    at: int
    packed: torch.Tensor | None  # kept alive until the copy is over
    done: Any  # torch.cuda.Event, None on a CPU
    shapes: list[tuple[str, tuple[int, ...]]]
    finish: Finish


class DeviceTap:
    """The tap of one device. Thread-safe; ``submit`` never waits and never raises."""

    def __init__(self, recorder: Recorder, device: torch.device, pinned: int) -> None:
        """Allocate ``pinned`` bytes of host memory and start the thread. Not to be called while a graph is captured."""
        self.recorder = recorder
        self.device = device
        self.cuda = device.type == "cuda"
        self._memory = torch.empty(pinned, dtype=torch.uint8, pin_memory=self.cuda)
        self._host = self._memory.numpy()
        self._ring = PinnedRing(pinned)
        self._flying: queue.SimpleQueue[_Flying | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()  # one order of copies, and the count of pending ones
        self._lines: dict[int, int] = {}
        self.aside: Any = None  #: stream for looks that must not wait for the engine's streams
        self._side: Any = None
        if self.cuda:
            with torch.cuda.device(device):
                self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self.aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-replay-device", daemon=True)
        self._thread.start()

    # -- streams -----------------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: nothing may be taken then."""
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def line(self) -> int:
        """Number of the current stream, for ``Stamp.stream``."""
        if not self.cuda:
            return 0
        pointer = torch.cuda.current_stream(self.device).cuda_stream
        return self._lines.setdefault(pointer, len(self._lines))

    def event(self) -> Any:
        """An event recorded on the current stream; None on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def upload(self, values: Array) -> torch.Tensor:
        """A small array on the device, in pieces of at most 64 KiB: CUDA stages such copies and waits for no stream."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if not self.cuda:
            return tensor
        if tensor.nbytes <= _STAGED:
            return tensor.to(self.device, non_blocking=True)
        found = torch.empty_like(tensor, device=self.device)
        step = max(1, _STAGED * len(tensor) // tensor.nbytes)
        for start in range(0, len(tensor), step):
            found[start : start + step].copy_(tensor[start : start + step], non_blocking=True)
        return found

    # -- jobs --------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """About how many bytes of pinned memory are free."""
        return self._ring.free

    def submit(self, job: Job, finish: Finish, tables: Iterable[tuple[str, int]] = ()) -> bool:
        """Have ``finish`` called with the job's arrays on the tap's thread; they are valid during that call only.

        ``tables`` says what is lost, and how many records of it, if there is no place. Returns whether there was.
        """
        with self.recorder.guard("device-tap"):
            if not self._closed and self._launch(job, finish):
                return True
        for table, count in tables:
            self.recorder.lose("queue", table, "no place in the pinned memory of the device tap", count=count)
        return False

    def _launch(self, job: Job, finish: Finish) -> bool:
        shapes = [(_DTYPES[part.dtype], tuple(part.shape)) for part in job.parts]
        flat = [part.reshape(-1).view(torch.uint8) for part in job.parts if part.numel()]
        size = job.size
        if self.cuda and flat:
            packed = torch.cat(flat) if len(flat) > 1 else flat[0]
            here = torch.cuda.current_stream(self.device)
            with self._lock:
                at = self._ring.take(size)
                if at is None:
                    return False
                self._side.wait_stream(here)
                with torch.cuda.stream(self._side):
                    self._memory[at : at + size].copy_(packed, non_blocking=True)
                    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    done.record(self._side)
                self._pending += 1
                self._flying.put(_Flying(size, at, packed, done, shapes, finish))
            return True
        with self._lock:
            at = self._ring.take(size)
            if at is None:
                return False
            if flat:
                torch.cat(flat, out=self._memory[at : at + size])
            self._pending += 1
            self._flying.put(_Flying(size, at, None, None, shapes, finish))
        return True

    def _run(self) -> None:
        if self.cuda:
            torch.cuda.set_device(self.device)
        while (item := self._flying.get()) is not None:
            with self.recorder.guard("device-tap"):
                if item.done is not None:
                    item.done.synchronize()
                item.packed = None
                item.finish(self._arrays(item))
            self._ring.give()
            with self._lock:
                self._pending -= 1

    def _arrays(self, item: _Flying) -> list[Array]:
        arrays: list[Array] = []
        at = item.at
        for dtype, shape in item.shapes:
            count = int(np.prod(shape, dtype=np.int64)) if shape else 1
            raw = self._host[at : at + count * np.dtype(dtype).itemsize]
            at += raw.nbytes
            arrays.append(np.frombuffer(raw.data, dtype, count).reshape(shape))
        return arrays

    def flush(self, seconds: float) -> bool:
        """Wait until everything submitted has been handed over, at most ``seconds``. For the end of a capture."""
        end = time.monotonic() + seconds
        while self._pending and time.monotonic() < end:
            time.sleep(0.005)
        return not self._pending

    def close(self, seconds: float = 5.0) -> None:
        """Hand over what is on its way and end the thread."""
        if self._closed:
            return
        self.flush(seconds)
        self._closed = True
        self._flying.put(None)
        self._thread.join(_JOIN_SECONDS)


def gather(pool: torch.Tensor, pages: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """``uint8[n, page_bytes]`` of pages of ``uint8[pages, pitch]``, on the current stream.

    Page ids that are not in the pool are replaced by its first or last page: the kernel would end the process.
    """
    inside = pages.clamp(0, pool.shape[0] - 1)
    return pool.index_select(0, inside)[:, :page_bytes]
