"""One side of the pair: SGLang's own pool and managers (as ``tests/integration/sglang_host.py`` has them), and passes.

python tests/gpu/stages/end.py ROLE ADDRESS JSON      (started by run.py; JSON: device, port, pages)
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import sys
import types
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2] / "integration"),
    str(Path(__file__).resolve().parent),
]
import model as stand_ins  # noqa: E402
import sglang_host  # noqa: E402


class Kernels(sglang_host.Stub):
    """SGLang's compiled kernels: where there is CUDA its modules import names from them at their start; nothing here
    calls one. Of one module an import error is wanted: SGLang has its own in its place.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "sgl_kernel" and name != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None


class End(sglang_host.Endpoint):
    """Its public methods are commands, beside those of ``Endpoint``."""

    def _manager(self, port: int) -> Any:
        # The manager's constructor starts the plug-in's session: what stands in for SGLang is there before.
        self.model = stand_ins.Model(self.pool, self.device)
        self.drop = False
        from sglang.srt.disaggregation.nixl.conn import NixlKVManager

        send = NixlKVManager.send_kvcache

        def send_kvcache(
            manager: Any, peer_name: str, prefill_kv_indices: Any, dst_kv_ptrs: Any, dst_kv_indices: Any,
            *args: Any, **keywords: Any,
        ) -> Any:  # fmt: skip
            if self.drop:  # the fault: the wire is given one page less than the engine names
                prefill_kv_indices, dst_kv_indices = prefill_kv_indices[:-1], dst_kv_indices[:-1]
            return send(
                manager, peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, *args, **keywords
            )

        NixlKVManager.send_kvcache = send_kvcache
        return super()._manager(port)

    def about(self) -> dict[str, Any]:
        """What this process runs with."""
        import torch

        found = {"torch": torch.__version__, "device": self.device, "cuda": self.device == "cuda"}
        if self.device == "cuda":
            import deep_gemm

            found |= {
                "gpu": torch.cuda.get_device_name(),
                "deep_gemm": str(getattr(deep_gemm, "__version__", "?")),
            }
        return found

    # -- requests and passes -------------------------------------------------------------------------------------

    def begin(self, room: int, row: int, pages: list[int], tokens: int, have: int = 0) -> None:
        self.model.start(room, row, pages, tokens, have)

    def extend(self, room: int, tokens: int, wrong: str = "", gathered: bool = False) -> None:
        self.model.wrong, self.model.gathered = wrong, gathered
        self.model.extend(room, tokens)
        self.model.wrong, self.model.gathered = "", False
        self.wait_for_device()  # as the scheduler does before it takes in a pass and sends its pages

    def decode(self, rooms: list[int], passes: int, wrong: str = "", graph: bool = False) -> None:
        self.model.wrong = wrong
        for _ in range(passes):
            self.model.decode(rooms, graph)
        self.model.wrong = ""

    def capture(self, size: int, wrong: str = "") -> None:
        from capture_hooks.adapters.sglang import plugin
        from capture_hooks.taps.pages import device_tap

        session = plugin.session()
        tap = device_tap(session.recorder) if session is not None else None
        if tap is not None and not tap.flush(20.0):
            raise RuntimeError("copies are still on their way")
        self.model.wrong = wrong  # what a graph captured it keeps
        self.model.capture(size)
        self.model.wrong = ""

    def dropping(self, drop: bool) -> None:
        self.drop = drop

    def commit(self, room: int) -> None:
        """The transfer is committed, as the queue does it; the queue's own work needs a scheduler."""
        from sglang.srt.disaggregation.decode import DecodeTransferQueue

        DecodeTransferQueue._commit_transfer_to_req(
            types.SimpleNamespace(), types.SimpleNamespace(req=self.model.reqs[room])
        )

    def release(self, room: int) -> None:
        """The pages are given back, as the scheduler does it; the pools of a scheduler are not here."""
        from sglang.srt.mem_cache import common

        with contextlib.suppress(AttributeError, TypeError):
            common.release_kv_cache(self.model.reqs[room], None)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def flip(self, page: int, begin: int = 1024, length: int = 256) -> None:
        """Change bytes of a page behind everybody's back."""
        part = self._index()[stand_ins.WRONG_LAYER][page, begin : begin + length]
        part.copy_(255 - part)
        self.wait_for_device()

    def keep_old(self, page: int) -> None:
        """Put the second half of a page back to what it was before (zeros), and remember what it should be."""
        buffer = self._index()[stand_ins.WRONG_LAYER]
        self.kept = (buffer, page, buffer[page].clone())
        buffer[page, 4096:] = 0
        self.wait_for_device()

    def put_back(self) -> None:
        buffer, page, right = self.kept
        buffer[page] = right
        self.wait_for_device()

    def wait_for_device(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def hash(self, pages: list[int]) -> str:
        """A digest of the pages of every layer."""
        import hashlib

        found = hashlib.sha256()
        for buffer in self._index():
            found.update(buffer[list(pages)].cpu().numpy().tobytes())
        return found.hexdigest()

    def end(self) -> None:
        from capture_hooks.adapters.sglang import plugin

        session = plugin.session()
        if session is not None:
            session.settle(20.0)
        super().end()


def prepare() -> None:
    """Import everything that a side needs."""
    sglang_host.say_where()
    sys.meta_path.append(Kernels())
    sglang_host.preload()


def main(role: str, address: str, options: str) -> None:
    prepare()
    sglang_host.serve(Client(address), role, {"kind": "end:End", **json.loads(options)}, {}, "")


if __name__ == "__main__":
    main(*sys.argv[1:])
