"""Requests as the decode side sees them: replies that grow token by token, and the steps that make them grow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from capture_hooks.events import I64
from replay.lab import model
from replay.lab.config import TOKENS_PER_ROW, LabConfig, pages_for, rows_for
from replay.lab.pool import ReadBatch, StorePart


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on the decode side."""

    room: int
    attempt: int
    tokens: int
    new_tokens: int
    prefix_of: int = -1  #: room whose prompt begins alike
    prefix_pages: int = 0
    shared: int = 0  #: first pages that are another's
    slot: int = -1  #: metadata slot, -1 without metadata
    pages: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    state: str = "waiting"  #: waiting, announced, aborting, running, over
    produced: int = 0  #: tokens whose step was launched
    last_step: int = 0  #: last step that was launched with it
    outcome: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """(room, attempt)."""
        return self.room, self.attempt

    @property
    def prompt_pages(self) -> I64:
        """The pages that prefill fills."""
        return self.pages[: pages_for(self.tokens)]

    @property
    def prompt_rows(self) -> int:
        """Complete rows of the prompt."""
        return rows_for(self.tokens)


@dataclass(eq=False, slots=True)
class Step:
    """One decode step as it was launched. ``table`` is a view of a step buffer, the rest belongs to the step."""

    number: int
    sequences: tuple[Sequence, ...]
    tokens: I64  #: length of each request, with this step's token
    table: I64

    @property
    def rows(self) -> I64:
        """Length of each request in rows."""
        return self.tokens // TOKENS_PER_ROW


def appended(step: Step, layer: int, page_rows: int, seed: int) -> tuple[StorePart, ...]:
    """The rows that ``step`` completes: one for every request whose length is a multiple of four tokens."""
    parts = []
    for sequence, tokens in zip(step.sequences, step.tokens.tolist(), strict=True):
        if tokens % TOKENS_PER_ROW:
            continue
        row = np.array([tokens // TOKENS_PER_ROW - 1], np.int64)
        slots = sequence.pages[row // page_rows] * page_rows + row % page_rows
        keys = model.keys(seed, sequence.room, layer, row)
        parts.append(StorePart(sequence.room, sequence.attempt, slots, model.position(row), row, keys))
    return tuple(parts)


def padded(parts: tuple[StorePart, ...], layer: int, size: int, seed: int) -> tuple[StorePart, ...]:
    """``parts`` and the padding that makes their rows a multiple of ``size`` (0 = none): what the batch held before."""
    missing = -sum(len(part.slots) for part in parts) % size if size else 0
    if not missing:
        return parts
    nobody, rows = np.full(missing, -1, np.int64), np.arange(missing, dtype=np.int64)
    keys = model.keys(seed, -1, layer, rows)
    return (*parts, StorePart(-1, 0, nobody, np.zeros(missing, np.int64), nobody, keys))


def read_batch(step: Step, layer: int, page_rows: int, config: LabConfig, extra_rows: int = 0) -> ReadBatch:
    """The read of one layer; its table is the step buffer itself. ``extra_rows`` are added to every length."""
    rooms = np.array([sequence.room for sequence in step.sequences], np.int64)
    query, weights = model.queries(config.seed, rooms, layer, step.tokens, config.heads)
    keys = tuple(sequence.key for sequence in step.sequences)
    rows = np.minimum(step.rows + extra_rows, step.table.shape[1] * page_rows)
    width = int(-(-rows.max() // page_rows))
    return ReadBatch(layer, step.number, keys, step.table[:, :width], rows, query, weights, config.top_k)
