"""What goes beside the pages: one small slot a request, which says whose it is."""

from __future__ import annotations

import threading

import numpy as np

from capture_hooks.events import U8

#: Bytes of a slot; its first eight are the room id.
SLOT_BYTES = 64
_EMPTY = -1


class MetadataSlots:
    """``count`` slots of one side in one block of host memory, handed out last in, first out; any thread."""

    def __init__(self, count: int) -> None:
        self.memory: U8 = np.zeros((max(count, 1), SLOT_BYTES), np.uint8)
        self._rooms = self.memory.view("<i8")[:, 0]
        self._rooms[:] = _EMPTY
        self._free = list(range(count - 1, -1, -1))
        self._lock = threading.Lock()

    def address(self, slot: int) -> int:
        """Address of the first byte of ``slot``."""
        return int(self.memory.ctypes.data) + slot * SLOT_BYTES

    def take(self, room: int, attempt: int) -> int:
        """A slot for a request; ``RuntimeError`` where none is left."""
        with self._lock:
            if not self._free:
                raise RuntimeError(
                    "no metadata slot is left; LabConfig.metadata_slots is too small for the load"
                )
            return self._free.pop()

    def give_back(self, room: int, attempt: int, slot: int) -> None:
        """The request does not need its slot any more. What is in it stays until the next one writes."""
        with self._lock:
            self._free.append(slot)

    def write(self, room: int, attempt: int, slot: int) -> None:
        """Fill the slot for its request."""
        self._rooms[slot] = room

    def read(self, room: int, attempt: int, slot: int) -> int:
        """The room that the slot is about, as the request that takes it finds it; -1 if it was never written."""
        return self.holds(slot)

    def holds(self, slot: int) -> int:
        """As :meth:`read`, for those who only look on."""
        return int(self._rooms[slot])
