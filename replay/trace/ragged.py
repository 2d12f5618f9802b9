"""Arrays of different lengths in one column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]

#: Rows whose arrays are taken at once.
_BLOCK = 16_384


@dataclass(frozen=True, slots=True)
class Ragged:
    """Arrays of different lengths, one a row: ``values[offsets[i]:offsets[i + 1]]`` is row i.

    ``values`` is one-dimensional, or ``[n, 2]`` for pairs such as the (address, length) of a descriptor.
    """

    values: Array
    offsets: I64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> I64:
        """Number of values of each row, ``int64[rows]``."""
        return np.diff(self.offsets)

    def owner(self) -> I64:
        """Row of each value, ``int64[len(values)]``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def take(self, rows: I64) -> Ragged:
        """The arrays of ``rows``, in their order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.empty((int(offsets[-1]), *self.values.shape[1:]), self.values.dtype)
        shift = self.offsets[:-1][rows] - offsets[:-1]
        # The index of all values at once would be as large as they are.
        for low in range(0, len(rows), _BLOCK):
            high = min(low + _BLOCK, len(rows))
            first, last = int(offsets[low]), int(offsets[high])
            # Value i of the new row r lies i places after the start of the old row.
            source = np.repeat(shift[low:high], lengths[low:high])
            source += np.arange(first, last)
            values[first:last] = self.values[source]
        return Ragged(values, offsets)
