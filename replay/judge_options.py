"""How much a replay does again."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.scope import Scope


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """How much is done again.

    Attributes:
        exhaustive: run the Triton kernels on everything, not on suspects and a sample.
        sample: how many stores and how many reads the Triton kernels do again.
        read_kernel: the user's read kernel, "module:function".
        store_kernel: the user's store kernel, "module:function".
        reexecute: False runs no kernel; the numpy reference still does stores and reads again.
        timeout: seconds for one run of a user's kernel.
        scope: limits of the verdict, besides those of the trace itself.
    """

    exhaustive: bool = False
    sample: int = 8
    read_kernel: str | None = None
    store_kernel: str | None = None
    reexecute: bool = True
    timeout: float = 60.0
    scope: Scope = field(default_factory=Scope)
