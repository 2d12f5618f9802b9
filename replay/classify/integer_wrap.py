"""F21: a 32-bit offset wrapped around at the read.

Signature: with the stride of the buffer, pages beyond ``floor((2**31 - 1) / stride)`` give exactly zero, or what lies
at the wrapped address, and every page up to that id is exact. The space is never allocated: addresses are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay.classify.base import Kind, claims
from replay.classify.hypotheses import Hypothesis, Keys, Question

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

KIND = Kind(
    code="F21",
    shows="wrong logits of exactly the pages whose offset in the buffer exceeds a 32-bit integer",
    certain=(
        "the logits beyond the boundary follow from known bytes, or from zeros where those of a page below it are "
        "exact; pages and table were the same before and after the kernel"
    ),
    best=claims(digest=None, pages="certain"),
    rivals=(
        ("F20", "every page below the boundary is exact"),
        ("F25", "the wrong pages are those beyond the boundary, whole"),
    ),
)


def misreadings(question: Question) -> Iterator[Hypothesis]:
    """Readers whose offsets wrap, of bytes or of elements; what they find there is zero, known, or open."""
    stride, physical = question.buffer.pitch, question.case.physical
    element = 2 if question.case.layout.value_type == "bf16" else 1
    for bits, kind in ((31, "signed"), (32, "unsigned")):
        for unit in sorted({1, element}):
            if stride < unit:
                continue
            limit = ((1 << bits) - 1) // (stride // unit)
            beyond = physical > limit
            if not beyond.any():
                continue
            between = f"from page {int(physical[beyond].min())} on"
            if not beyond.all():
                between = f"between pages {int(physical[~beyond].max())} and {int(physical[beyond].min())}"
            of = "bytes" if unit == 1 else f"elements of {unit} bytes"
            what = f"a {kind} 32-bit offset in {of} wraps {between} (stride {stride:,})"
            bare = bool(beyond.all())
            yield Hypothesis(
                "F21", f"{what}: zeros are read there", _beyond(question, beyond), zero=True, bare=bare
            )
            # 2**31 is -2**31 where the integer is signed; an unsigned one begins again at 0.
            wrapped = (physical * (stride // unit)) & 0xFFFFFFFF
            if bits == 31:
                wrapped = np.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped)
            address = question.buffer.address + wrapped * unit
            yield Hypothesis(
                "F21", f"{what}: the wrapped address is read there", _beyond(question, beyond, address)
            )
            if not beyond.all():
                yield Hypothesis(
                    "F21", f"{what}: other data is read there", _beyond(question, beyond, open_=True), True
                )


def _beyond(question: Question, beyond: Bool, address: I64 | None = None, *, open_: bool = False) -> Keys:
    """The right keys, and in the pages ``beyond`` zeros, the keys at an address, or what nobody knows."""

    def keys(pages: I64) -> tuple[F64, Bool]:
        found = question.keys(pages)
        known = np.ones(found.shape[:2], bool)
        hit = beyond[pages]
        found[hit] = 0.0
        if address is not None:
            found[hit], known[hit] = question.keys_at(address[pages[hit]])
        elif open_:
            known[hit] = False
        return found, known

    return keys
