"""The lab's own record of what truly happened, kept outside the capture.

Each process hashes its rows at a few fixed moments and writes them to a file of its own. The runner compares
the two sides, so tests can hold a verdict against the truth. Nothing in ``replay`` reads these files.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capture_hooks.events import I64, U8, U64
from capture_hooks.layouts import Layout

#: Moments of the decode side.
MOMENTS = ("arrived", "read", "end")


def row_hashes(layout: Layout, memory: U8, pages: I64, rows: int) -> U64:
    """One number for the bytes of each row: ``uint64[layers, rows]`` of ``memory`` ``uint8[layers, pages,
    pitch]``.
    """
    layers = len(memory)
    taken = np.ascontiguousarray(memory[:, pages, : layout.page_bytes])
    flat = taken.reshape(-1, layout.page_bytes)
    words = np.ascontiguousarray(layout.values(flat)).view("<u8")
    odd = (np.arange(words.shape[-1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
    hashes = (words * odd).sum(axis=-1, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(29)
    hashes += layout.scale_words(flat).astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    found: U64 = hashes.reshape(layers, -1)[:, :rows]
    return found


class Audit:
    """Notes of one process; safe to call from any thread."""

    def __init__(self, folder: str, role: str) -> None:
        self._folder = Path(folder) if folder else None
        self._role = role
        self._lock = threading.Lock()
        self._arrays: dict[str, U64] = {}
        self._notes: list[list[int | str]] = []

    @property
    def on(self) -> bool:
        """Whether anything is to be kept."""
        return self._folder is not None

    def rows(self, moment: str, room: int, attempt: int, first_row: int, hashes: U64) -> None:
        """Row hashes of a request at ``moment``, from ``first_row`` on."""
        with self._lock:
            self._arrays[f"{moment} {room} {attempt} {first_row}"] = hashes

    def note(self, what: str, *ids: int) -> None:
        """Something that a hash cannot show: "position", "table", "kernel" or "metadata"."""
        if self.on:
            with self._lock:
                self._notes.append([what, *ids])

    def write(self) -> None:
        """Write the files."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            np.savez(self._folder / f"{self._role}.npz", **self._arrays)  # type: ignore[arg-type]
            (self._folder / f"{self._role}.json").write_text(json.dumps(self._notes))


@dataclass(frozen=True, slots=True)
class Truth:
    """What both sides' audits say together. A place is (room, layer, logical page)."""

    rooms: frozenset[int]  #: requests that were read at least once
    bad_at: dict[
        str, frozenset[tuple[int, int, int]]
    ]  #: moment -> places whose bytes differ from the stored ones
    torn_tables: frozenset[
        tuple[int, int, int]
    ]  #: (room, layer, step) that were read through another's table
    wrong_positions: frozenset[tuple[int, int]]  #: (room, logical page) stored with wrong positions
    wrong_metadata: frozenset[tuple[int, int]]  #: (room, room that its metadata slot was about)
    wrong_reads: frozenset[int]  #: rooms whose read or top-k is wrong by the kernel or by its length

    @property
    def hit(self) -> frozenset[int]:
        """Requests whose reply is wrong: they read wrong bytes, wrong pages, or with a wrong kernel."""
        bytes_wrong = {place[0] for moment in ("read", "end") for place in self.bad_at[moment]}
        tables = {place[0] for place in self.torn_tables}
        stored = {place[0] for place in self.wrong_positions}
        beside = {place[0] for place in self.wrong_metadata}
        return frozenset(bytes_wrong | tables | stored | beside | self.wrong_reads) & self.rooms


def _load(folder: Path, role: str) -> tuple[dict[tuple[str, int, int, int], U64], list[list[int | str]]]:
    arrays: dict[tuple[str, int, int, int], U64] = {}
    with np.load(folder / f"{role}.npz", allow_pickle=False) as stored:
        for name in stored.files:
            moment, room, attempt, first = name.split()
            arrays[moment, int(room), int(attempt), int(first)] = stored[name]
    return arrays, json.loads((folder / f"{role}.json").read_text())


def load(folder: Path, page_rows: int = 64) -> Truth:
    """Compare what the two sides wrote into ``folder``."""
    stored, prefill_notes = _load(folder, "prefill")
    seen, decode_notes = _load(folder, "decode")
    expected: dict[tuple[int, int], dict[int, U64]] = {}
    for (_, room, attempt, first), hashes in stored.items():
        expected.setdefault((room, attempt), {})[first] = hashes
    bad: dict[str, set[tuple[int, int, int]]] = {moment: set() for moment in MOMENTS}
    read = set()
    for (moment, room, attempt, _), hashes in seen.items():
        pieces = expected.get((room, attempt), {})
        whole = np.zeros_like(hashes)
        for first, part in pieces.items():
            whole[:, first : first + part.shape[1]] = part
        for layer, row in np.argwhere(hashes != whole).tolist():
            bad[moment].add((room, layer, row // page_rows))
        if moment == "read":
            read.add(room)
    notes = [*prefill_notes, *decode_notes]

    def picked(what: str) -> list[tuple[int, ...]]:
        return [tuple(int(i) for i in note[1:]) for note in notes if note[0] == what]

    return Truth(
        frozenset(read),
        {moment: frozenset(places) for moment, places in bad.items()},
        frozenset((n[0], n[1], n[2]) for n in picked("table")),
        frozenset((n[0], n[1]) for n in picked("position")),
        frozenset((n[0], n[1]) for n in picked("metadata")),
        frozenset(n[0] for n in picked("kernel")),
    )
