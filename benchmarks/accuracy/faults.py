"""All kinds of fault that the world can have, by code and variant."""

from __future__ import annotations

from benchmarks.accuracy import arrival_faults, descriptor_faults, page_faults, read_faults, store_faults
from benchmarks.accuracy.fault import Fault

#: (code, variant) -> the class that makes it.
FAULTS: dict[tuple[str, str], type[Fault]] = {}


def _collect() -> None:
    for module in (descriptor_faults, arrival_faults, store_faults, page_faults, read_faults):
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, Fault) and found.code:
                for variant in found.variants:
                    FAULTS[(found.code, variant)] = found


_collect()
CODES = sorted({code for code, _ in FAULTS})


def variants(code: str) -> list[str]:
    """The variants of a kind, in their order."""
    return [variant for known, variant in FAULTS if known == code]
