"""What kernels inside a CUDA graph were given, put by where the host can take it after each replay.

No Python of the engine runs when a graph is replayed, and what its nodes hand to each other lies in memory that later
nodes use again. So a hook that runs while the graph is captured launches copies behind the kernel, on the kernel's own
stream: they become nodes of the graph and run at every replay. They copy into places that are taken before the capture,
in the warm-up runs, for what is allocated during a capture belongs to the graph. All graphs of a process share the
places: one graph is replayed at a time, and what a pass left is taken behind it on the same stream.

Each place has a counter on the device that a node adds one to. Counters that moved by one say that this pass filled the
places: a graph that was captured without the copies, or a pass that nobody followed, is told from it.

Imported only where torch is; works on a CPU, where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MOST = 256  #: places of one process, one a layer


@dataclass(slots=True)
class Place:
    """One place: ``number`` is that of its counter, ``parts`` tensors of the largest sizes, ``about`` what the hook was
    told when a graph was captured last.
    """

    number: int
    parts: dict[str, torch.Tensor]
    about: Any = None


class GraphPlaces:
    """The places of one process, by key. Not thread-safe: the thread that runs the engine's passes uses it alone."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated until the first :meth:`reserve`."""
        self.device = device
        self.places: dict[Any, Place] = {}
        self._counters: torch.Tensor | None = None

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def reserve(self, key: Any, parts: Mapping[str, torch.Tensor]) -> None:
        """Make room for tensors as large as these (first dimension). Not to be called while capturing.

        A place that a graph copies into keeps its memory: what is larger later on finds none.
        """
        found = self.places.get(key)
        if found is not None:
            if found.about is not None or all(len(t) <= len(found.parts[name]) for name, t in parts.items()):
                return
        elif len(self.places) >= MOST:
            return
        if self._counters is None:
            self._counters = torch.zeros(MOST, dtype=torch.int64, device=self.device)
        number = found.number if found is not None else len(self.places)
        self.places[key] = Place(number, {name: torch.zeros_like(t) for name, t in parts.items()})

    def put(self, key: Any, parts: Mapping[str, torch.Tensor], about: Any) -> bool:
        """While capturing: launch the copies of these tensors and the counter. False, and nothing, where no place is
        large enough.
        """
        found = self.places.get(key)
        if found is None or self._counters is None:
            return False
        if any(len(t) > len(found.parts[name]) for name, t in parts.items()):
            return False
        found.about = about
        for name, tensor in parts.items():
            found.parts[name][: len(tensor)].copy_(tensor)
        self._counters[found.number : found.number + 1].add_(1)
        return True

    @property
    def captured(self) -> bool:
        """Whether a graph copies into any place."""
        return any(place.about is not None for place in self.places.values())

    def counters(self) -> torch.Tensor:
        """``int64[places]`` as it is when the current stream comes here."""
        if self._counters is None:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return self._counters[: len(self.places)].clone()
