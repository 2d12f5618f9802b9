"""The buffers of one process: their records, their memory where the host can see it, and the map of their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture_hooks.events import Buffer, Event
from capture_hooks.layouts import Layout
from capture_hooks.layouts import layout as layout_named
from capture_hooks.regions import Regions

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Held:
    """One buffer. ``view`` is its live memory as ``uint8[pages, pitch]``, ``None`` where the host cannot read it."""

    event: Buffer
    layout: Layout
    view: U8 | None


class Inventory:
    """The buffers known so far."""

    def __init__(self, emit: Callable[[Event], int]) -> None:
        self._emit = emit
        self._held: dict[int, Held] = {}
        self.regions = Regions()  #: who owns which byte

    def add(self, event: Buffer, view: U8 | None = None) -> Held:
        """Make a buffer known, with its live memory ``uint8[pages, pitch]``, and emit its record.

        Raises ``ValueError`` for an id that is taken, an unknown format or a view that does not fit.
        """
        layout = layout_named(event.format)
        if view is not None:
            wide_enough = (
                view.ndim == 2 and view.shape[0] == event.pages and view.shape[1] >= layout.page_bytes
            )
            if view.dtype != np.uint8 or not wide_enough:
                raise ValueError(
                    f"buffer {event.buffer}: expected a view uint8[{event.pages}, {layout.page_bytes} or more], "
                    f"not {view.dtype}{list(view.shape)}"
                )
        self.regions.add(
            event.buffer, event.layer, event.name, layout, event.address, event.pages, event.pitch
        )
        held = self._held[event.buffer] = Held(event, layout, view)
        self._emit(event)
        return held

    def buffer(self, buffer: int) -> Held:
        """The buffer with this id; ``KeyError`` if there is none."""
        return self._held[buffer]

    def __len__(self) -> int:
        return len(self._held)
