"""Page formats: where each row's values and scales lie inside one page.

One declarative entry a format. Everything that needs to know where a byte belongs (taps, digests, the
reference, the bisect) asks this module, so a new format is one new entry here.

Sources of the formats: the index-K pool of SGLang's DeepSeek-V4 support (``fp8``, ``fp4``; planar, all
values of the page first, then all scales) and the bf16 variant of it without scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

ValueType = Literal["e4m3", "bf16", "e2m1"]
ScaleType = Literal["fp32", "ue8m0", "none"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One page format.

    A page is planar: ``rows`` value rows of ``value_bytes`` each from byte 0, then ``rows`` scale rows of
    ``scale_bytes`` each. ``scale_block`` is the number of elements that share one scale.
    """

    name: str
    rows: int
    head_dim: int
    value_type: ValueType
    value_bytes: int
    scale_type: ScaleType
    scale_bytes: int
    scale_block: int

    @property
    def page_bytes(self) -> int:
        """Size of one page in bytes."""
        return self.rows * (self.value_bytes + self.scale_bytes)

    @property
    def scale_base(self) -> int:
        """Byte offset of the first scale in the page (= the end of the values)."""
        return self.rows * self.value_bytes

    def value_range(self, first: int, last: int) -> tuple[int, int]:
        """Half-open byte range of the values of rows ``first..last`` (closed)."""
        return first * self.value_bytes, (last + 1) * self.value_bytes

    def scale_range(self, first: int, last: int) -> tuple[int, int]:
        """Half-open byte range of the scales of rows ``first..last`` (closed); empty without scales."""
        return (
            self.scale_base + first * self.scale_bytes,
            self.scale_base + (last + 1) * self.scale_bytes,
        )

    def values(self, pages: U8) -> U8:
        """View of the values: ``uint8[n, rows, value_bytes]`` of ``uint8[n, page_bytes]``."""
        return pages[:, : self.scale_base].reshape(len(pages), self.rows, self.value_bytes)

    def scales(self, pages: U8) -> U8:
        """View of the scales: ``uint8[n, rows, scale_bytes]`` of ``uint8[n, page_bytes]``."""
        return pages[:, self.scale_base : self.page_bytes].reshape(len(pages), self.rows, self.scale_bytes)

    def scale_words(self, pages: U8) -> npt.NDArray[np.uint32]:
        """The scale bytes of each row as one little-endian word: ``uint32[n, rows]``; zeros without scales."""
        if self.scale_bytes == 0:
            return np.zeros((len(pages), self.rows), np.uint32)
        return np.ascontiguousarray(self.scales(pages)).view("<u4")[..., 0]


#: Format of a buffer whose pages nobody looks into: known to be there, and where, but never judged.
OPAQUE = "opaque"

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        # DeepSeek-V4 index-K, fp8: 64 x 128 e4m3, then 64 x fp32. 8,448 bytes.
        Layout("fp8", 64, 128, "e4m3", 128, "fp32", 4, 128),
        # The same keys kept in bf16, no scales. 16,384 bytes.
        Layout("bf16", 64, 128, "bf16", 256, "none", 0, 128),
        # DeepSeek-V4 index-K, fp4: 64 x 64 bytes of e2m1 pairs (low nibble = even element), then 64 x 4
        # ue8m0 exponents, one per 32 elements. 4,352 bytes.
        Layout("fp4", 64, 128, "e2m1", 64, "ue8m0", 4, 32),
    )
}


def layout(name: str) -> Layout:
    """The layout called ``name``; ``ValueError`` names the known ones otherwise."""
    try:
        return LAYOUTS[name]
    except KeyError:
        known = ", ".join(sorted(LAYOUTS))
        raise ValueError(f"unknown page format {name!r}; known formats: {known}") from None
