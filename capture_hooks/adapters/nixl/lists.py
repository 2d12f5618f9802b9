"""Descriptor lists: addresses and lengths of every form that NIXL takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.events import I64
from capture_hooks.regions import Pieces, Regions

U64 = npt.NDArray[np.uint64]

NONE: U64 = np.zeros((0, 2), np.uint64)


@dataclass(eq=False, slots=True)
class Prepared:
    """A prepared descriptor list: its agent ("" = the initiator) and its blocks, as runs of equal ones.

    ``runs`` is ``uint64[n, 3]``: the first block's address, the length of each, the stride. Blocks are numbered on
    through all runs; ``first`` (``int64[n + 1]``) is the number of each run's first one, and how many there are. An
    engine prepares a list of every slot of a cache once, which can be millions.
    """

    agent: str
    runs: U64
    first: I64

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.runs.nbytes + self.first.nbytes


def moved(descriptors: U64, regions: Regions) -> Pieces:
    """Which pages the descriptors ``uint64[n, 2]`` (address, length) of one side are, by that side's map."""
    return regions.resolve_many(
        np.ascontiguousarray(descriptors[:, 0]), np.ascontiguousarray(descriptors[:, 1])
    )


def prepared(agent: str, given: Any) -> Prepared:
    """The list that ``prep_xfer_dlist`` was given, in any of the forms of :func:`descriptors`, or as a strided array
    ``[n, 5]``: address, length, device, stride, count.
    """
    if isinstance(given, np.ndarray) and given.ndim == 2 and given.shape[1] == 5:
        table = given.astype(np.uint64, copy=False)
        counts = table[:, 4].astype(np.int64)
        return Prepared(agent, table[:, [0, 1, 3]], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    table = descriptors(given)
    address, length = table[:, 0], table[:, 1]
    joined = (address[1:] == address[:-1] + length[:-1]) & (length[1:] == length[:-1])
    at = np.flatnonzero(np.concatenate([np.ones(min(len(table), 1), np.bool_), ~joined]))
    return Prepared(agent, table[at][:, [0, 1, 1]], np.append(at, len(table)).astype(np.int64))


def descriptors(given: Any) -> U64:
    """Addresses and lengths of any form of descriptor list that NIXL takes: ``uint64[n, 2]``.

    Forms: ``nixlXferDList``, list of tuples (address, length, device), array ``[n, 3]``, tensor, list of tensors.
    """
    if given is None:
        return NONE
    if isinstance(given, np.ndarray):
        return np.array(given[:, :2], np.uint64)
    if hasattr(given, "descCount"):
        return _from_list(given)
    if hasattr(given, "data_ptr"):
        given = [given]
    rows = [
        (item.data_ptr(), item.numel() * item.element_size()) if hasattr(item, "data_ptr") else item[:2]
        for item in given
    ]
    return np.array(rows, np.uint64).reshape(-1, 2)


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


def chosen(listed: Prepared | None, indices: Any) -> U64:
    """The descriptors of a prepared list at ``indices``; none where the list is not known.

    Raises:
        IndexError: an index lies outside the list.
    """
    if listed is None:
        return NONE
    wanted = np.asarray(indices, np.int64)
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < listed.first[-1]:
        raise IndexError(
            f"a prepared list of {listed.first[-1]} has no block {wanted.min()} or {wanted.max()}"
        )
    run = np.searchsorted(listed.first, wanted, side="right") - 1
    address = listed.runs[run, 0] + (wanted - listed.first[run]).astype(np.uint64) * listed.runs[run, 2]
    return np.stack([address, listed.runs[run, 1]], axis=1)
