"""Imports what one side of the pair imports, as on a machine with an H200: no GPU is needed to see whether it can.

    python tests/gpu/stages/pretend.py      (SGLang on PYTHONPATH)

SGLang asks torch for a GPU when its modules are imported, and imports others where there is one. Prints what SGLang
says of CUDA in the end. Nothing can be run behind such an answer.
"""

from __future__ import annotations

import os
import types

import torch


def pretend() -> None:
    """Let torch tell of one H200 that is not there."""
    about = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30, multi_processor_count=132
    )
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": about.name, "get_device_properties": about, "mem_get_info": (130 * 2**30, 139 * 2**30),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.version.cuda = "13.0"  # type: ignore[attr-defined,unused-ignore]


def main() -> None:
    pretend()
    import end

    end.prepare()
    from sglang.srt.utils import is_cuda

    print(f"everything is imported; CUDA: {is_cuda()}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
