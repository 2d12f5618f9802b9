"""Spans of sequence numbers in which something was away: lost, and not given again yet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


class Spans:
    """The spans of many things, each with a key (an integer of at least 0) and its own sequence of losses and gains.

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
        self._times = np.unique(seq[begin])
        self._keys, number = np.unique(key[begin], return_inverse=True)
        # Sorted by key and then by time, as one number that cannot overflow: both are ranks.
        self._begin = number.reshape(-1) * (len(self._times) + 1) + np.searchsorted(self._times, seq[begin])

    def inside(self, key: I64, seq: I64) -> Bool:
        """Whether each ``seq`` lies in a span of its ``key``: after its begin, before its end."""
        if not len(self._begin):
            return np.zeros(len(key), bool)
        number = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        earlier = np.searchsorted(self._times, seq)  # begins of any key before ``seq``
        at = np.searchsorted(self._begin, number * (len(self._times) + 1) + earlier) - 1
        here = np.maximum(at, 0)
        same = (at >= 0) & (self._keys[number] == key)
        same &= self._begin[here] // (len(self._times) + 1) == number
        found: Bool = same & (seq < self._end[here])
        return found
