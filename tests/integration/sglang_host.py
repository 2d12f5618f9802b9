"""Runs with SGLang on its path: imports it once, then forks one process for each endpoint that a test asks for.

An endpoint is what an SGLang scheduler process is to its peer, without the scheduler: the real pool, the real
manager, real senders and receivers, over real NIXL in host memory, driven by the commands of a test. The plug-in
comes in as it does in a server: ``load_plugins()`` finds its entry point.

What differs from a server: no scheduler (the test names pages and cuts chunks); the pool lies in host memory, so
buffers are told as "DRAM" and NIXL's "VRAM" label of the state list is relabelled at the agent; everything on
the loopback.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Client, Connection
from typing import Any

PAGE = 256
RATIOS = [0, 0, 4, 128, 4, 128, 4]  # layers 2, 4 and 6 have an indexer

#: What an endpoint imports, and what the plug-in hooks.
MODULES = tuple(
    f"sglang.srt.{name}"
    for name in (
        "disaggregation.decode",
        "disaggregation.fake.conn",
        "disaggregation.mooncake.conn",
        "disaggregation.nixl.conn",
        "disaggregation.prefill",
        "disaggregation.utils",
        "kv_canary.runner.violation_reporter",
        "managers.scheduler",
        "mem_cache.deepseek_v4_memory_pool",
        "model_executor.model_runner",
        "plugins",
    )
)


#: Packages that SGLang imports names from and that nothing here uses: no build of torchvision goes with this torch,
#: and 0.5.16 imports a grammar library and a sound library at its start.
STUBS = ("torchvision", "xgrammar", "soundfile")


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of these packages, with any name in it: a class that does nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Modes if name == "InterpolationMode" else type(name, (Anything,), {})

        module.__dict__.update(__version__="0.28.0", __getattr__=missing)


class Anything:
    """What a stub's names are; as a field of a pydantic model it may be anything."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class Modes(enum.Enum):
    """Of torchvision: the keys of a table."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def let_configs_be_known() -> None:
    """A newer transformers knows some models that SGLang 0.5.16 registers itself, and would refuse them."""
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = staticmethod(
        lambda name, config, exist_ok=False: register(name, config, exist_ok=True)
    )


def preload() -> None:
    """Everything that an endpoint needs, imported before any fork: no context, socket or thread comes of it."""
    sys.meta_path.append(Stub())
    let_configs_be_known()
    for name in MODULES:
        importlib.import_module(name)


def relabel_vram() -> None:
    """Host memory under the label "VRAM" is refused by NIXL; the state list has that label fixed."""
    from nixl._api import nixl_agent

    def relabelled(method: Any) -> Any:
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            args = tuple("DRAM" if isinstance(a, str) and a == "VRAM" else a for a in args)
            keywords = {k: "DRAM" if isinstance(v, str) and v == "VRAM" else v for k, v in keywords.items()}
            return method(self, *args, **keywords)

        return call

    for name in ("register_memory", "get_xfer_descs", "get_reg_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, relabelled(getattr(nixl_agent, name)))


class Event:
    """What a CUDA event is to its users."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait(10)

    def wait(self, *_: Any) -> None:
        self.done.wait(10)


class Endpoint:
    """One side. Its public methods are the commands of a test."""

    layers = len(RATIOS)

    def __init__(
        self, role: str, port: int, pages: int, leave_out: int = -1, fp4: bool = False, state: bool = False,
        device: str = "cpu", engine_device: str = "cpu",
    ) -> None:  # fmt: skip
        import torch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        torch.set_num_threads(1)
        self.role, self.address, self.device = role, f"127.0.0.1:{port}", device
        load_plugins()  # as every process of SGLang does, first of all
        if device == "cpu":
            relabel_vram()
        self.arguments = ServerArgs(
            model_path="dummy", device=engine_device, host="127.0.0.1", disaggregation_mode=role,
            disaggregation_transfer_backend="nixl", disaggregation_bootstrap_port=port,
        )  # fmt: skip
        publish(self.arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        get_parallel().override_permanently(pp_group=None)  # made with the distributed groups; there are none
        self.pool = self._pool(pages * PAGE, fp4)
        self.args = self._arguments(leave_out, state)
        self.manager = self._manager(port)
        self.ends: dict[int, Any] = {}
        self.events: dict[int, Event] = {}

    def _pool(self, tokens: int, fp4: bool) -> Any:
        import torch
        from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

        plain = pools.DeepSeekV4IndexerPool.__init__
        if fp4:  # normally a flag of the server, refused for this device

            def fp4_init(self: Any, *args: Any, **keywords: Any) -> None:
                plain(self, *args, **{**keywords, "use_fp4_indexer": True})

            pools.DeepSeekV4IndexerPool.__init__ = fp4_init
        try:
            return pools.DeepSeekV4TokenToKVPool(
                max_num_reqs=4, swa_size=1024, c4_size=tokens // 4, c128_size=tokens // 128, c4_state_pool_size=64,
                c128_state_pool_size=512, page_size=PAGE, swa_page_size=PAGE, dtype=torch.float8_e4m3fn,
                c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448,
                qk_rope_head_dim=64, indexer_head_dim=128, layer_num=len(RATIOS), device=self.device,
                enable_memory_saver=False, compression_ratios=RATIOS,
            )  # fmt: skip
        finally:
            pools.DeepSeekV4IndexerPool.__init__ = plain

    def _arguments(self, leave_out: int, state: bool) -> Any:
        """Filled by the functions that a scheduler uses."""
        import torch
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import (
            MetadataBuffers,
            build_kv_layer_ids,
            get_kv_transfer_buf_infos,
            get_pd_kv_layout,
            setup_state_kv_args,
        )

        pool, k = self.pool, KVArgs()
        k.engine_rank, k.pp_rank, k.system_dp_rank, k.rust_http_port = 0, 0, None, None
        k.kv_cache_dtype_str = "fp8_e4m3"
        k.kv_layout = get_pd_kv_layout(pool)
        k.prefill_start_layer, k.prefill_end_layer = 0, self.layers
        lists = [list(values) for values in get_kv_transfer_buf_infos(pool)]
        if leave_out >= 0:  # the fault: one index-K buffer is not told to the transfer
            at = lists[0].index(self._index()[leave_out].data_ptr())
            for values in lists:
                del values[at]
        k.kv_data_ptrs, k.kv_data_lens, k.kv_item_lens = lists
        k.num_draft_entries = 0
        k.kv_layer_ids = build_kv_layer_ids(
            token_to_kv_pool=pool,
            draft_token_to_kv_pool=None,
            num_draft_entries=0,
            num_hidden_layers=self.layers,
        )
        k.page_size = pool.page_size
        self.meta = MetadataBuffers(16, 64, torch.float32, 1)
        k.aux_data_ptrs, k.aux_data_lens, k.aux_item_lens = self.meta.get_buf_infos()
        k.ib_device, k.gpu_id = None, 0
        setup_state_kv_args(k, pool, None, total_kv_layers=self.layers, req_to_token_pool=None)
        if self.device == "cpu":
            k.kv_data_mem_kinds = ["DRAM"] * len(lists[0])
        if not state:
            for name in list(vars(k)):
                if name.startswith("state_"):
                    setattr(k, name, [])
        return k

    def _manager(self, port: int) -> Any:
        from sglang.srt.disaggregation.nixl import conn
        from sglang.srt.disaggregation.utils import DisaggregationMode, is_mla_backend

        self.conn = conn
        if self.role == "prefill":
            self.server = conn.NixlKVBootstrapServer("127.0.0.1", port)
            for _ in range(200):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
                    break
                time.sleep(0.02)
        mode = DisaggregationMode.PREFILL if self.role == "prefill" else DisaggregationMode.DECODE
        return conn.NixlKVManager(self.args, mode, self.arguments, is_mla_backend(self.pool))

    # -- both sides ----------------------------------------------------------------------------------------------

    def _index(self) -> list[Any]:
        return list(self.pool.c4_indexer_kv_pool.contiguous_page_row_buffers())

    def write(self, pages: list[int], seed: int) -> None:
        """New keys and scales into pages of every index-K buffer (any bytes do: nothing here computes with them)."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for buffer in self._index():
            shape = (len(pages), buffer.shape[1])
            buffer[torch.tensor(pages)] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def read(self, pages: list[int]) -> list[bytes]:
        """Bytes of the pages, one string a layer."""
        return [buffer[list(pages)].numpy().tobytes() for buffer in self._index()]

    def wait(self, room: int, seconds: float = 20.0) -> int:
        """Poll as the scheduler does, until the end; returns the status (4: success, 0: failed)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = int(self.ends[room].poll())
            if status in (0, 4):
                return status
            time.sleep(0.001)
        return int(self.ends[room].poll())

    def clear(self, room: int) -> None:
        self.ends.pop(room).clear()

    def failed(self, room: int) -> str:
        """As the scheduler ends a request that failed; returns the reason."""
        try:
            self.ends.pop(room).failure_exception()
        except Exception as error:
            return str(error)
        return ""

    def abort(self, room: int) -> None:
        self.ends[room].abort()

    def buffers(self) -> dict[str, list[tuple[int, int]]]:
        """(address, item length) of everything that the pool tells a transfer, and (address, length) registered."""
        pointers, _, items = self.pool.get_contiguous_buf_infos()
        state, _, state_items = self.pool.get_state_buf_infos()
        request, _, request_items = self.pool.get_request_state_buf_infos()
        return {
            "kv": list(zip(pointers, items, strict=True)),
            "state": [*zip(state, state_items, strict=True), *zip(request, request_items, strict=True)],
            "registered": list(zip(self.args.kv_data_ptrs, self.args.kv_data_lens, strict=True)),
        }

    def hooks(self) -> dict[str, Any]:
        """What the plug-in says of itself."""
        from capture_hooks.adapters.sglang import plugin

        found = plugin.session()
        if found is None:
            return {}
        return {"summary": found.patches.summary(), "fired": found.patches.fired, "version": found.version}

    def looked(self, seconds: float = 20.0) -> bool:
        """Wait until every later look that was asked for so far (30 ms) has been taken: they run in turn."""
        from capture_hooks.adapters.sglang import plugin

        done, found = threading.Event(), plugin.session()
        if found is not None:
            found.looks.later(0.1, done.set)
        return found is None or done.wait(seconds)

    def end(self) -> None:
        """What an orderly end of the process does to the capture."""
        import capture_hooks

        capture_hooks.stop()

    def fake(self, room: int) -> None:
        """The end of a request that moves nothing, as warm-ups and health checks have it."""
        from sglang.srt.disaggregation.fake import conn

        kind = conn.FakeKVSender if self.role == "prefill" else conn.FakeKVReceiver
        self.ends[room] = kind(self.manager, self.address, room)

    def canary(self, violations: int) -> str:
        """SGLang's kv-canary reports as many violations as its device ring says; returns what it raised."""
        import torch
        from sglang.srt.kv_canary.config import CanaryMode
        from sglang.srt.kv_canary.runner.violation_reporter import ViolationReporter

        log = types.SimpleNamespace(
            violation_write_index=torch.tensor(violations),
            violation_ring=torch.zeros(4, 8, dtype=torch.int64),
        )
        reporter = ViolationReporter(
            config=types.SimpleNamespace(mode=CanaryMode.RAISE),
            device_state=types.SimpleNamespace(violation_log=log),
        )
        try:
            reporter.log_or_raise_violation(outer_step_counter=3)
        except Exception as error:
            return type(error).__name__
        return ""

    def checksum_differs(self, room: int) -> None:
        """SGLang's own checksum of a request differs at admission; what follows needs a scheduler."""
        from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin

        req = types.SimpleNamespace(bootstrap_room=room, rid="x")
        with contextlib.suppress(AttributeError):
            SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch(
                types.SimpleNamespace(), req, "differs"
            )

    def endpoint(self, room: int) -> None:
        """A sender or receiver that has not told the other side anything yet."""
        kind = self.conn.NixlKVSender if self.role == "prefill" else self.conn.NixlKVReceiver
        self.ends[room] = kind(self.manager, self.address, room)

    # -- prefill -------------------------------------------------------------------------------------------------

    def open(self, room: int, pages: int) -> int:
        """A sender that waits for its receiver; returns its status (2: the destination is known)."""
        sender = self.ends[room] = self.conn.NixlKVSender(self.manager, self.address, room)
        end = time.monotonic() + 20
        while int(sender.poll()) < 2 and time.monotonic() < end:
            time.sleep(0.001)
        self.meta.bootstrap_room[0].fill_(room)
        sender.init(pages, 0)
        return int(sender.poll())

    def heard(self, room: int, pages: list[int], seconds: float = 20.0) -> bool:
        """Wait until the announcement of these pages has been read; what decode said before it has been, too."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            infos = self.manager.transfer_infos.get(room, {})
            if any(info.dst_kv_indices.tolist() == pages for info in list(infos.values())):
                return True
            time.sleep(0.001)
        return False

    def send(
        self, room: int, pages: list[int], tokens: int, event: bool = False, happened: bool = False
    ) -> None:
        import numpy as np

        sender = self.ends[room]
        if event:
            sender._early_send_wait_event = self.events[room] = Event()
            if happened:
                self.happen(room)
        sender.send(np.array(pages, np.int32), None, num_kv_tokens=tokens)

    def happen(self, room: int) -> None:
        """What the event of the room stands for is over."""
        self.events[room].done.set()

    def own_methods(self, room: int) -> bool:
        """Whether nothing of the room's event is replaced."""
        return set(vars(self.events[room])) == {"done"}

    def silent(self) -> None:
        """From now on this side acknowledges no abort."""
        self.manager._send_abort_ack = lambda *_: None

    def drained(self, room: int, seconds: float = 20.0) -> bool:
        """Wait until every chunk so far has been taken by a worker and its transfer is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.manager._staging_outstanding.get(room, -1) == 0:
                return True
            time.sleep(0.001)
        return False

    # -- decode --------------------------------------------------------------------------------------------------

    def receive(self, room: int, pages: list[int]) -> None:
        """A receiver that announces its pages."""
        import numpy as np

        end = time.monotonic() + 20
        while not self.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > end:
                raise RuntimeError("the prefill side does not answer")
            time.sleep(0.02)
        receiver = self.ends[room] = self.conn.NixlKVReceiver(self.manager, self.address, room)
        receiver.init(0)
        receiver.send_metadata(np.array(pages, np.int32), 0, None, 0)

    def admit(self, room: int) -> None:
        """The request is about to enter its first batch."""
        from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin

        scheduler = types.SimpleNamespace(kv_checksum_computer=None)
        batch = types.SimpleNamespace(reqs=[types.SimpleNamespace(bootstrap_room=room)])
        SchedulerDisaggregationDecodeMixin._verify_kv_checksums(scheduler, batch)

    def give_up(self, room: int) -> None:
        """The queue holds the pages of a failed request for a while and gives them back then."""
        from sglang.srt.disaggregation.decode import DecodeTransferQueue
        from sglang.srt.mem_cache import common

        req = types.SimpleNamespace(bootstrap_room=room, rid="x", kv=types.SimpleNamespace(req_pool_idx=3))
        decode_req = types.SimpleNamespace(
            req=req, kv_receiver=self.ends[room], metadata_buffer_index=0, destination=None
        )

        def release(_: Any) -> None:
            with contextlib.suppress(AttributeError):  # the pools of a scheduler are not here
                common.release_kv_cache(req, None, checkpoint=False)

        queue = types.SimpleNamespace(
            deferred_kv_release_timeout=0.0, _deferred_releases=[], enable_staging=False, _release_request=release,
            _is_host_destination=lambda _: False, metadata_buffers=types.SimpleNamespace(clear_slot=lambda _: None),
            req_to_metadata_buffer_idx_allocator=types.SimpleNamespace(free=lambda _: None),
        )  # fmt: skip
        DecodeTransferQueue._defer_release(queue, decode_req)
        DecodeTransferQueue._do_release(queue, decode_req, 0)

    def released(self, room: int, seconds: float = 10.0) -> bool:
        """Whether every prefill rank has acknowledged the abort within the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.manager.is_abort_release_safe(room, 1):
                return True
            time.sleep(0.002)
        return False


def serve(link: Connection, role: str, options: dict[str, Any], environ: dict[str, str], log: str) -> None:
    """The life of one endpoint; never returns."""
    if log:
        handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    os.environ.update(environ)
    try:
        endpoint = _kind(options.pop("kind", ""))(role, **options)
        link.send(("ok", os.getpid()))
        while True:
            name, keywords = link.recv()
            if name == "exit":
                endpoint.end()
                link.send(("ok", None))
                break
            try:
                link.send(("ok", getattr(endpoint, name)(**keywords)))
            except Exception:
                link.send(("error", traceback.format_exc()))
    except EOFError:
        pass
    except BaseException:
        link.send(("error", traceback.format_exc()))
    os._exit(0)  # the manager's threads are no daemons


def _kind(name: str) -> type[Endpoint]:
    """``Endpoint``, or the class of it that ``"module:Class"`` names."""
    if not name:
        return Endpoint
    module, _, attribute = name.partition(":")
    found: type[Endpoint] = getattr(importlib.import_module(module), attribute)
    return found


def say_where() -> None:
    """Everything on the loopback."""
    os.environ |= {"SGLANG_HOST_IP": "127.0.0.1", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}


def main(address: str) -> None:
    """Commands on the link: ("fork", role, options, environ, log, address of the endpoint's own link)."""
    say_where()
    link = Client(address)
    preload()
    link.send(("ready", len(threading.enumerate())))
    while True:
        try:
            _, role, options, environ, log, own = link.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            link.close()
            serve(Client(own), role, options, environ, log)
        threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
        link.send(("forked", child))


if __name__ == "__main__":
    main(sys.argv[1])
