"""The model of the simulated engine: keys and queries that follow from (seed, stream, layer, row) alone.

A *stream* stands for a text: requests that share a prefix share its rows. The store is RMSNorm, rotation, Hadamard and
quantisation in fp32, in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.numbers import quantise
from capture_hooks.layouts import Layout

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

DIM = 128
HEADS = 4
EPSILON = 1e-6
TOKENS_PER_ROW = 4


def _mix(x: U32) -> U32:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def _start(*parts: int) -> np.uint32:
    value = 0x9E3779B9
    for part in parts:
        value = ((value ^ (part & 0xFFFFFFFF)) * 0x85EBCA6B + 0x27D4EB2F) & 0xFFFFFFFF
        value ^= value >> 13
    return np.uint32(value)


def _uniform(rows: U32, width: int) -> F32:
    """float32[n, width] in [-1, 1)."""
    spread = np.arange(1, width + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits = _mix(rows[:, None] + spread[None, :])
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a store of n rows takes, and what it writes."""

    keys: F32
    rope: F32
    values: U8
    scales: U8


class Model:
    """One model of one format."""

    def __init__(self, seed: int, layout: Layout, *, powers: bool) -> None:
        self.seed, self.layout, self.powers = seed, layout, powers
        self.norm_weight = (_uniform(np.array([_start(seed, 7)], np.uint32), DIM)[0] * 0.4 + 1).astype(
            np.float32
        )
        pairs = np.arange(32, dtype=np.float64)
        self._frequency = 10_000.0 ** (-pairs / 32)

    def keys(self, streams: I64, layer: int, rows: I64) -> F32:
        """The store's input: ``float32[n, 128]`` of row ``rows[i]`` of stream ``streams[i]``."""
        start = _mix(streams.astype(np.uint32) * np.uint32(0x9E3779B1) + _start(self.seed, 1, layer))
        found = _uniform(_mix(start + rows.astype(np.uint32) * np.uint32(0x85EBCA6B)), DIM)
        # Rows differ in how their energy is shared, so that their scales differ.
        found += ((rows % 7).astype(np.float32) * np.float32(0.2))[:, None]
        return found

    def rope(self, rows: I64) -> F32:
        """(cos, sin) of each pair at the rows' positions."""
        angle = (rows * TOKENS_PER_ROW).astype(np.float64)[:, None] * self._frequency
        return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(len(rows), 64).astype(np.float32)

    def store(self, keys: F32, rope: F32) -> tuple[U8, U8]:
        """A right store of these inputs."""
        x = keys / np.sqrt((keys * keys).mean(1, keepdims=True, dtype=np.float32) + np.float32(EPSILON))
        x = (x * self.norm_weight).astype(np.float32)
        tail = x[:, 64:]
        even, odd, cos, sin = tail[:, 0::2].copy(), tail[:, 1::2].copy(), rope[:, 0::2], rope[:, 1::2]
        tail[:, 0::2] = even * cos - odd * sin
        tail[:, 1::2] = even * sin + odd * cos
        for width in (1, 2, 4, 8, 16, 32, 64):
            pair = x.reshape(len(x), DIM // (2 * width), 2, width)
            x = np.stack([pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]], 2).reshape(
                len(x), DIM
            )
        x = x * np.float32(128**-0.5)
        return quantise(self.layout, x, powers=self.powers)

    def rows(self, streams: I64, layer: int, rows: I64) -> Rows:
        """Everything about some rows."""
        keys, rope = self.keys(streams, layer, rows), self.rope(rows)
        return Rows(keys, rope, *self.store(keys, rope))

    def query(self, stream: int, layer: int, row: int) -> tuple[F32, F32]:
        """The indexer's query of one row and the weights of its heads."""
        start = _start(self.seed, 2, stream, layer, row)
        heads = _mix(np.arange(HEADS, dtype=np.uint32) * np.uint32(0x9E3779B1) + start)
        weights = (_mix(heads) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) + np.float32(0.1)
        return _uniform(heads, DIM), weights


def logits(keys: F32, query: F32, weights: F32) -> F32:
    """What a right read kernel computes of decoded keys float32[n, 128]."""
    with np.errstate(all="ignore"):
        dots = np.maximum(keys @ query.T, np.float32(0))
        return (dots @ weights).astype(np.float32)


def top_k(scores: F32, k: int) -> npt.NDArray[np.int32]:
    """Rows with the largest scores, padded with -1."""
    found = np.full(k, -1, np.int32)
    best = np.argsort(-scores, kind="stable")[:k]
    found[: len(best)] = best
    return found
