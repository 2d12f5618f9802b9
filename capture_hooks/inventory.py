"""The buffers of one process: their records, their memory where the host can see it, and the map of their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Buffer
from capture_hooks.layouts import Layout
from capture_hooks.layouts import layout as layout_named
from capture_hooks.records import Event
from capture_hooks.regions import Regions

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Held:
    """One buffer. ``view`` is its live memory as ``uint8[pages, pitch]``, ``None`` where the host cannot read it.

    ``tensor`` is the same memory on a device (a ``torch.Tensor``), ``None`` where the host reads it or nobody can.
    """

    event: Buffer
    layout: Layout
    view: U8 | None
    tensor: Any = None


class Inventory:
    """The buffers known so far."""

    def __init__(self, emit: Callable[[Event], int]) -> None:
        self._emit = emit
        self._held: dict[int, Held] = {}
        self.regions = Regions()  #: who owns which byte

    def add(self, event: Buffer, view: U8 | None = None, tensor: Any = None) -> Held:
        """Make a buffer known, with its live memory ``uint8[pages, pitch]``, and emit its record.

        The memory is a ``view`` where the host can read it and a ``tensor`` on a device. Of the event, ``address``,
        ``pages`` and ``pitch`` may be left out (0) where it is given: they are those of the memory.

        Raises ``ValueError`` for an id that is taken, an unknown format or memory that does not fit.
        """
        layout = layout_named(event.format)
        event = _placed(event, view, tensor)
        for memory in (view, tensor):
            if memory is None:
                continue
            shape, dtype = tuple(memory.shape), str(memory.dtype).removeprefix("torch.")
            if dtype != "uint8" or len(shape) != 2 or shape[0] != event.pages or shape[1] < layout.page_bytes:
                raise ValueError(
                    f"buffer {event.buffer}: expected memory uint8[{event.pages}, {layout.page_bytes} or more], "
                    f"not {dtype}{list(shape)}"
                )
        self.regions.add(
            event.buffer, event.layer, event.name, layout, event.address, event.pages, event.pitch
        )
        held = self._held[event.buffer] = Held(event, layout, view, tensor)
        self._emit(event)
        return held

    def buffer(self, buffer: int) -> Held:
        """The buffer with this id; ``KeyError`` if there is none."""
        return self._held[buffer]

    def __len__(self) -> int:
        return len(self._held)


def _placed(event: Buffer, view: U8 | None, tensor: Any) -> Buffer:
    """``event`` with the address, pages and pitch of its memory where it does not tell them."""
    memory: Any = view if view is not None else tensor
    if memory is None or memory.ndim != 2 or all((event.address, event.pages, event.pitch)):
        return event
    if view is not None:
        address, pitch = view.ctypes.data, view.strides[0]
    else:
        address, pitch = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
    return replace(
        event,
        address=event.address or address,
        pages=event.pages or int(memory.shape[0]),
        pitch=event.pitch or pitch,
    )
