"""Descriptor lists: addresses and lengths of every form that NIXL takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.regions import Pieces, Regions

U64 = npt.NDArray[np.uint64]

NONE: U64 = np.zeros((0, 2), np.uint64)


@dataclass(eq=False, slots=True)
class Prepared:
    """A prepared descriptor list: its agent ("" = the initiator) and its addresses and lengths."""

    agent: str
    descriptors: U64


def moved(descriptors: U64, regions: Regions) -> Pieces:
    """Which pages the descriptors ``uint64[n, 2]`` (address, length) of one side are, by that side's map."""
    return regions.resolve_many(
        np.ascontiguousarray(descriptors[:, 0]), np.ascontiguousarray(descriptors[:, 1])
    )


def descriptors(given: Any) -> U64:
    """Addresses and lengths of any form of descriptor list that NIXL takes: ``uint64[n, 2]``.

    Forms: ``nixlXferDList``, list of tuples (address, length, device), array ``[n, 3]``, strided array ``[n,
    5]`` (address, length, device, stride, count), tensor, list of tensors.
    """
    if given is None:
        return NONE
    if isinstance(given, np.ndarray):
        table = given.astype(np.uint64, copy=False)
        return _strided(table) if table.shape[1] == 5 else np.array(table[:, :2], np.uint64)
    if hasattr(given, "descCount"):
        return _from_list(given)
    if hasattr(given, "data_ptr"):
        given = [given]
    rows = [
        (item.data_ptr(), item.numel() * item.element_size()) if hasattr(item, "data_ptr") else item[:2]
        for item in given
    ]
    return np.array(rows, np.uint64).reshape(-1, 2)


def _strided(table: U64) -> U64:
    counts = table[:, 4].astype(np.int64)
    row = np.repeat(np.arange(len(table)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    address = table[row, 0] + index.astype(np.uint64) * table[row, 3]
    return np.stack([address, table[row, 1]], axis=1)


def _from_list(listed: Any) -> U64:
    """A library's list. The bytes that its ``__getstate__`` returns have all entries as one block, which is read as
    numbers: nothing is unpickled and no code in it runs. The block is believed only where its first, middle and last
    entry are what the list itself gives; otherwise every entry is asked for.
    """
    count = int(listed.descCount())
    if count == 0:
        return NONE
    if count > 8:
        state = listed.__getstate__()
        size = 24 * count
        if isinstance(state, bytes) and len(state) > size and state[-1:] == b"|":
            table = np.frombuffer(state, "<u8", 3 * count, len(state) - 1 - size).reshape(count, 3)
            if all(tuple(table[i].tolist()) == tuple(listed[i]) for i in (0, count // 2, count - 1)):
                return np.array(table[:, :2], np.uint64)
    return np.array([listed[i][:2] for i in range(count)], np.uint64)


def entries(registered: Any) -> list[tuple[int, int, int]]:
    """(address, length, device) of each region of the list that a registration returned."""
    return [tuple(map(int, registered[i][:3])) for i in range(int(registered.descCount()))]  # type: ignore[misc]


def memory_of(listed: Any) -> str:
    """Kind of memory that a library's list is of ("DRAM", "VRAM"), "" where it does not say."""
    name = getattr(listed.getType(), "name", "") if hasattr(listed, "getType") else ""
    return str(name).removesuffix("_SEG")


def chosen(prepared: Prepared | None, indices: Any) -> U64:
    """The descriptors of a prepared list at ``indices``; none where the list is not known."""
    if prepared is None:
        return NONE
    return prepared.descriptors[np.asarray(indices, np.int64)]
