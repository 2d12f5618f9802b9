"""What was the last thing that happened to something before a moment, and the spans in which it was away.

Things have keys (integers of at least 0), moments are sequence numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


class Last:
    """Finds the last of many rows, each with a key and a sequence number, before a moment."""

    def __init__(self, key: I64, seq: I64) -> None:
        """``seq`` tells the rows of one key apart."""
        self._keys, number = np.unique(key, return_inverse=True)
        self._times = np.unique(seq)
        # By key and then by time, as one number that cannot overflow: both are ranks.
        place = number.reshape(-1) * (len(self._times) + 1) + np.searchsorted(self._times, seq)
        self._rows = np.argsort(place, kind="stable")
        self._places = place[self._rows]

    def before(self, key: I64, seq: I64) -> I64:
        """The last row of each ``key`` before each ``seq``, -1 where there is none."""
        if not len(self._rows):
            return np.full(len(key), -1, np.int64)
        number = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        first = number * (len(self._times) + 1)
        at = np.searchsorted(self._places, first + np.searchsorted(self._times, seq)) - 1
        here = np.maximum(at, 0)
        known = (at >= 0) & (self._keys[number] == key) & (self._places[here] >= first)
        return np.where(known, self._rows[here], -1)


class Spans:
    """When many things were away, each with its own sequence of losses and gains.

    A span begins after a loss and lasts to the next gain of the same key; with none it never ends. What happened
    before the first loss of a key is outside every span.
    """

    def __init__(self, key: I64, seq: I64, lost: Bool) -> None:
        """One row a loss (``lost``) or a gain, in any order; ``seq`` tells the rows of one key apart."""
        rows = np.lexsort((seq, key))
        key, seq, lost = key[rows], seq[rows], lost[rows]
        new = np.ones(len(key), bool)
        new[1:] = key[1:] != key[:-1]
        begins = lost.copy()
        begins[1:] &= new[1:] | ~lost[:-1]
        gains = np.flatnonzero(~lost)
        begin = np.flatnonzero(begins)
        after = np.searchsorted(gains, begin)
        known = after < len(gains)
        gain = gains[np.minimum(after, max(0, len(gains) - 1))] if len(gains) else begin
        known &= key[gain] == key[begin]
        self._end = np.where(known, seq[gain], np.iinfo(np.int64).max)
        self._begins = Last(key[begin], seq[begin])

    def inside(self, key: I64, seq: I64) -> Bool:
        """Whether each ``seq`` lies in a span of its ``key``: after its begin, before its end."""
        at = self._begins.before(key, seq)
        if not len(self._end):
            return np.zeros(len(key), bool)
        found: Bool = (at >= 0) & (seq < self._end[np.maximum(at, 0)])
        return found
