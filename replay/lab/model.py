"""The lab's model: keys, queries and constants that follow from (seed, room, layer, row) alone.

Real keys are not needed, but their spread is: rows differ in how their energy is shared among dimensions, so
that scales differ from row to row as they do in a real cache.
"""

from __future__ import annotations

import functools

import numpy as np

from capture_hooks.events import F32, I64, U32
from replay.lab.config import TOKENS_PER_ROW

HEAD_DIM = 128
ROPE_DIM = 64
EPSILON = 1e-6
_THETA = 10_000.0
_GOLDEN = 0x9E3779B1

F64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _mix(x: U32) -> U32:
    """Integer hash of each element (32 bits)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _base(*parts: int) -> int:
    """One 32-bit start value for all of ``parts``."""
    value = 0x243F6A88
    for part in parts:
        value = ((value ^ (part & 0xFFFFFFFF)) * 0x01000193 + 0x7F4A7C15) & 0xFFFFFFFF
        value ^= value >> 15
    return value


def _uniform(rows: U32, width: int) -> F32:
    """``float32[n, width]`` in [-1, 1) from one hash a row."""
    spread = np.arange(width, dtype=np.uint32) * np.uint32(0x85EBCA77)
    bits = _mix(rows[:, None] ^ spread[None, :])
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)


def keys(seed: int, room: int, layer: int, rows: I64) -> F32:
    """The store's input for the rows ``rows`` (index within the request): ``float32[n, 128]``."""
    start = np.uint32(_base(1, seed, room, layer))
    hashes = _mix(rows.astype(np.uint32) * np.uint32(_GOLDEN) + start)
    values = _uniform(hashes, HEAD_DIM)
    # A common offset survives the Hadamard transform as one large coefficient: scales vary by a factor of four.
    offset = (hashes >> np.uint32(5) & np.uint32(7)).astype(np.float32) * np.float32(0.25)
    values += offset[:, None]
    return values


def queries(seed: int, rooms: I64, layer: int, tokens: I64, heads: int) -> tuple[F32, F32]:
    """The indexer's query of one token of each request.

    ``rooms`` and ``tokens`` (position of the token) are int64[batch]. Returns ``float32[batch, heads, 128]`` and the
    weight of each head, ``float32[batch, heads]``, positive.
    """
    start = _mix(rooms.astype(np.uint32) * np.uint32(_GOLDEN) ^ tokens.astype(np.uint32))
    start = start + np.uint32(_base(2, seed, layer))
    hashes = _mix(start[:, None] + np.arange(heads, dtype=np.uint32)[None, :] * np.uint32(_GOLDEN))
    vectors = _uniform(hashes.reshape(-1), HEAD_DIM).reshape(len(rooms), heads, HEAD_DIM)
    bits = (_mix(hashes) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    weights: F32 = (bits + np.float32(0.5)) / np.float32(heads)
    return vectors, weights


@functools.cache
def norm_weight() -> F32:
    """RMSNorm weight: ``float32[128]`` between 0.5 and 1.5."""
    found: F32 = _uniform(np.array([_base(4)], np.uint32), HEAD_DIM)[0] * np.float32(0.5) + np.float32(1.0)
    return found


@functools.cache
def _frequencies() -> F64:
    pairs = np.arange(ROPE_DIM // 2, dtype=np.float64)
    found: F64 = _THETA ** (-2.0 * pairs / ROPE_DIM)
    return found


def rope(positions: I64) -> F32:
    """(cos, sin) of each of the 32 pairs at ``positions``, interleaved: ``float32[n, 64]``."""
    angles = positions.astype(np.float64)[:, None] * _frequencies()[None, :]
    table = np.empty((len(positions), ROPE_DIM), np.float32)
    table[:, 0::2] = np.cos(angles)
    table[:, 1::2] = np.sin(angles)
    return table


def position(rows: I64) -> I64:
    """The token position that belongs to row ``rows`` of a request: its first token."""
    return rows * TOKENS_PER_ROW
