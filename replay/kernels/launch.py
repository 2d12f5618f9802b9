"""How Triton kernels are launched here: on a GPU, or by the interpreter under one lock.

Triton decides at import between compiling and interpreting (``TRITON_INTERPRET``), so `prepare` must run before
anything imports triton. Interpreted launches from several threads at once give wrong results: the
interpreter patches ``triton.language`` for the time of a launch. One lock for the whole process prevents that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_TRUE = ("1", "true", "yes", "on", "y")
_LOCK = threading.RLock()


def interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in _TRUE


def prepare() -> str:
    """Choose the device for Triton kernels: "cuda" where there is a GPU, else "cpu" with the interpreter on.

    Raises:
        RuntimeError: there is no GPU and triton was imported as a compiler before.
    """
    import torch

    if interpreted():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if "triton" in sys.modules:
        raise RuntimeError(
            "no GPU here, and triton was imported without its interpreter: set TRITON_INTERPRET=1 before the start"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


@contextlib.contextmanager
def launching(device_type: str, compiled: bool) -> Iterator[None]:
    """Around every launch: one at a time when interpreted.

    Args:
        device_type: where the tensors are, "cpu" or "cuda".
        compiled: whether the kernel was compiled (False: interpreted).

    Raises:
        ValueError: a compiled kernel was given tensors on the CPU.
    """
    if compiled:
        if device_type == "cpu":
            raise ValueError(
                "a compiled Triton kernel cannot take tensors on the CPU: "
                "move them to the GPU, or set TRITON_INTERPRET=1 before triton is imported"
            )
        yield
        return
    with _LOCK:
        yield
