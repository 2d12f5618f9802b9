"""A copy of a trace for strangers: every text is on a list of what may stay, and numbers that say where are offsets.

What stays, and how the rest is written, is decided for each column of text in :data:`TEXTS`. A text that is not on
its column's list becomes ``other``, a letter, or nothing. Addresses become offsets from the lowest one of their
process, times from the first of their host, threads and streams are numbered. Page bytes, keys, queries and logits
stay as they are: the verdict stands on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import LAYOUTS, OPAQUE
from capture_hooks.options import OPTIONS
from replay.descriptors import DescriptorMap
from replay.order_keys import request_key
from replay.timeline import Timeline
from replay.trace.file import ProcessInfo
from replay.trace.merge import Rewrite
from replay.trace.reader import Table, Trace
from replay.trace.schema import TABLES
from replay.verdict import STAGES

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

OTHER = "other"
#: Caches whose names say nothing of anybody's.
CACHES = frozenset({"index_k", "main_kv", "kv", "k", "v", "state", "swa", "c4_indexer_kv_pool", "c4_kv_pool"})
ENGINES = ("lab", "scene", "by hand", "sglang", "vllm")
TRANSPORTS = frozenset({"nixl", "nixl/UCX", "mooncake", "tcp", "hand"})
KERNELS = frozenset({"triton", "torch", "numpy", "reference"})
MODES = frozenset({"digest", "pages", "full"})
_COVERS = frozenset(
    {"store", "alloc", "send", "receive", "completion", "read", "top-k", "copy", "metadata", "mapping"}
)
_VERSION = re.compile(
    r"\d{1,4}(\.\d{1,4}){0,4}((a|b|rc|\.post|\.dev)\d{1,4})?(\+(cpu|cu\d{2,3}|rocm\d\.\d))?"
)
_NUMBER_FORMAT = re.compile(
    r"(e4m3(fn|fnuz)?|e5m2(fnuz)?|e2m1|ue8m0|bf16|fp16|fp32|fp8|fp4|none)"
    r"(/(ue8m0|bf16|fp16|fp32|none))?"
)
_RUN = re.compile(r"[0-9a-f]{8,32}")
#: Packages whose versions may be told, and what a version of each looks like.
PACKAGES = frozenset(
    {"kv-replay", "numpy", "torch", "triton", "nixl", "mooncake-transfer-engine", "sglang", "vllm", "python"}
)
_PLATFORM = {"machine": ("x86_64", "aarch64", "arm64"), "system": ("Linux", "Darwin", "Windows")}
_DEVICE_WORDS = re.compile(
    r"NVIDIA|AMD|Intel|Instinct|Gaudi|SXM\d?|PCIe|NVL|HBM\d?e?|\d{1,3}GB|[ABGHLRTVM]{1,2}I?\d{1,4}[SX]?L?"
)

#: Where the lowest address of a process lies in the copy, so that none of its memory begins at 0; and no address.
_BASE, _FAR = np.uint64(1 << 32), np.uint64(1 << 62)

Policy = Callable[["Scrub", str, str], str]


def _one_of(*allowed: Iterable[str]) -> Policy:
    known = frozenset({"", *(text for some in allowed for text in some)})
    return lambda scrub, place, text: text if text in known else OTHER


def _nothing(scrub: Scrub, place: str, text: str) -> str:
    return ""


def _letters(name: str) -> Policy:
    """Texts that only have to be told apart: ``name-A``, ``name-B``."""
    return lambda scrub, place, text: scrub.alias(name, text)


def _kernel(scrub: Scrub, place: str, text: str) -> str:
    # The reference allows for what DeepGEMM's tensor cores round.
    return "deep_gemm" if text.startswith("deep_gemm") else text if text in KERNELS | {""} else OTHER


def _number_format(scrub: Scrub, place: str, text: str) -> str:
    return text if not text or _NUMBER_FORMAT.fullmatch(text) else OTHER


def _cache(scrub: Scrub, place: str, text: str) -> str:
    return text if text in CACHES else scrub.alias("cache", text)


def _key(scrub: Scrub, place: str, text: str) -> str:
    key = request_key(text)
    return str(replace(key, who=scrub.alias("who", key.who))) if key else scrub.alias("key", text)


def _run(scrub: Scrub, place: str, text: str) -> str:
    return scrub.alias("run", text)


def _stages(scrub: Scrub, place: str, text: str) -> str:
    return ",".join(stage for stage in text.split(",") if stage in STAGES)


#: What may stay of each column of text. A column that is not listed is left empty.
TEXTS: dict[str, Policy] = {
    "hook.name": _letters("hook"),
    "hook.covers": _one_of(_COVERS),
    "hook.state": _one_of(("attached", "missing", "refused", "detached")),
    "hook.note": _nothing,
    "buffer.name": _cache,
    "buffer.format": _one_of(LAYOUTS, (OPAQUE,)),
    "buffer.memory": _one_of(("DRAM", "VRAM")),
    "registration.agent": _letters("agent"),
    "registration.memory": _one_of(("DRAM", "VRAM")),
    "request.phase": _one_of(("start", "arrived", "finish", "abort", "fail")),
    "request.rid": _nothing,
    "request.mark": _one_of(("warmup", "health", "fake")),
    "free.reason": _one_of(("finish", "abort", "evict")),
    "snapshot.stage": _one_of(("ST", "SE", "RC", "LT", "RD")),
    "snapshot.moment": _one_of(("before", "after", "copied", "end")),
    "send.agent": _letters("agent"),
    "send.peer": _letters("agent"),
    "send.operation": _one_of(("WRITE", "READ")),
    "transfer_state.state": _one_of(
        ("posted", "done", "error", "released", "arrived", "aborted", "acknowledged")
    ),
    "transfer_state.agent": _letters("agent"),
    "transfer_state.detail": _nothing,
    "order.what": _one_of(("announce", "status", "abort", "ack", "queue", "sync")),
    "order.key": _key,
    "order.end": _one_of(("tail", "head")),
    "read.kernel": _kernel,
    "read.number_format": _number_format,
    "loss.stage": _one_of(("hook", "queue", "disk", "ring", "journal", "trim")),
    "loss.what": _one_of(TABLES),
    "loss.reason": _nothing,
    "trigger.reason": _nothing,
    "trigger.rid": _nothing,
    "clock.moment": _one_of(("start", "alive", "end")),
    "content.format": _one_of(LAYOUTS, (OPAQUE,)),
    "copy.operation": _one_of(("offload", "load-back", "move", "clear")),
    "copy.unit": _one_of(("page", "row")),
    "metadata.moment": _one_of(("given", "written", "sent", "read", "freed")),
    "trim.run": _run,
    "trim.stages": _stages,
    "trim.choice": _nothing,
}


class Scrub(Rewrite):
    """Rewrites one trace. The same text becomes the same letter wherever it stands."""

    def __init__(self, trace: Trace) -> None:
        """Look at ``trace`` for its lowest addresses and first times."""
        self._trace = trace
        self._aliases: dict[str, dict[str, str]] = {}
        self._peers: I64 = DescriptorMap(Timeline(trace)).peers
        self._lowest, self._highest = self._bounds()
        self._first = self._first_times()
        self._numbered: dict[tuple[str, int], I64] = {}

    def alias(self, kind: str, text: str) -> str:
        """``kind-A`` for the first text of a kind, ``kind-B`` for the next; nothing for none."""
        known = self._aliases.setdefault(kind, {})
        return known.setdefault(text, f"{kind}-{_letter(len(known))}") if text else ""

    def buffer_name(self, name: str) -> str:
        """What a cache is called in the copy."""
        return _cache(self, "buffer.name", name)

    def text(self, place: str, text: str) -> str:
        """``text`` as far as it may stay."""
        return TEXTS.get(place, _nothing)(self, place, text)

    def process(self, number: int, info: ProcessInfo) -> ProcessInfo:
        """What strangers may know of a process."""
        return replace(
            info,
            role=info.role if info.role in ("prefill", "decode", "server") else OTHER,
            run=self.alias("run", info.run),
            host=self.alias("host", info.host),
            engine=_engine(info.engine),
            mode=info.mode if info.mode in MODES else OTHER if info.mode else "",
            transport=info.transport if info.transport in TRANSPORTS else OTHER if info.transport else "",
            options=_options(info.options),
            environment=_environment(info.environment),
            cut="a part of its journal could not be read" if info.cut else "",
        )

    def numbers(self, table: Table, column: str, rows: I64, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Addresses as offsets, times from the first, threads and streams as small numbers."""
        place = f"{table.name}.{column}"
        process = table["process"][rows].astype(np.int64)
        if column in ("begin_ns", "end_ns") or place == "clock.monotonic_ns":
            return np.asarray(values - self._first[process], values.dtype)
        if place == "clock.wall_ns":
            return np.zeros_like(values)
        if column in ("thread", "stream"):
            return self._small(column, process, values)
        if place in ("buffer.address", "registration.address"):
            return self._offsets(values, process)
        if place in ("send.source", "send.destination"):
            owner = process if column == "source" else self._peers[rows]
            lengths = table.ragged(column).lengths[rows]
            moved = values.copy()
            moved[:, 0] = self._offsets(values[:, 0], np.repeat(owner, lengths))
            return moved
        return values

    def _small(self, column: str, process: I64, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Numbers of a process's threads or streams in ascending order; negative ones (none) stay."""
        found = values.copy()
        for number in np.unique(process).tolist():
            key = (column, number)
            if key not in self._numbered:
                tables = [self._trace.table(name) for name in TABLES]
                seen = [t[column][t["process"] == number].astype(np.int64) for t in tables]
                known = np.unique(np.concatenate([np.zeros(0, np.int64), *seen]))
                self._numbered[key] = known[known >= 0]
            mine = (process == number) & (values >= 0)
            found[mine] = np.searchsorted(self._numbered[key], values[mine])
        return found

    def _offsets(self, addresses: npt.NDArray[Any], owner: I64) -> npt.NDArray[Any]:
        """Addresses from the lowest of their process on; those near none of its memory are all the same one."""
        given = addresses.astype(np.uint64)
        low, high = self._lowest[owner], self._highest[owner]
        # What a wrong descriptor misses by less than this still shows by how much.
        near = (given + _BASE >= low) & (given <= high + _BASE)
        with np.errstate(over="ignore"):
            moved = given - low + _BASE
        return np.where(given == 0, np.uint64(0), np.where(near, moved, np.uint64(1))).astype(addresses.dtype)

    def _bounds(self) -> tuple[U64, U64]:
        """Lowest and highest address of each process's memory; the last entry is for those that cannot be told."""
        count = len(self._trace.processes) + 1
        low, high = np.full(count, _FAR, np.uint64), np.zeros(count, np.uint64)
        for name in ("buffer", "registration"):
            table = self._trace.table(name)
            # 0 stands for an address that was not told.
            told = np.flatnonzero((table["address"] > 0) & (table["address"] < int(_FAR)))
            address = table["address"][told].astype(np.uint64)
            size = table["pages"] * table["pitch"] if name == "buffer" else table["length"]
            end = address + np.clip(size[told], 0, int(_FAR)).astype(np.uint64)
            np.minimum.at(low, table["process"][told], address)
            np.maximum.at(high, table["process"][told], end)
        return np.where(high == 0, np.uint64(0), low), high

    def _first_times(self) -> I64:
        """First time of each process's host."""
        hosts = [process.host for process in self._trace.processes]
        first: dict[str, int] = {}
        for name in TABLES:
            table = self._trace.table(name)
            for number, host in enumerate(hosts):
                times = table["begin_ns"][table["process"] == number]
                if len(times):
                    first[host] = min(first.get(host, int(times.min())), int(times.min()))
        return np.array([first.get(host, 0) for host in hosts], np.int64)


def _letter(number: int) -> str:
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def _engine(text: str) -> str:
    for engine in ENGINES:
        version = text.removeprefix(engine).strip()
        if text == engine or (text.startswith(f"{engine} ") and _VERSION.fullmatch(version)):
            return text
    return OTHER if text else ""


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Declared options that hold numbers, flags or one of their own words."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        value = options.get(option.name)
        if option.type == "mode":
            kept = isinstance(value, str) and value in MODES
        elif option.type == "taps":
            kept = isinstance(value, list) and all(
                tap in ("store", "send", "receive", "read") for tap in value
            )
        else:
            kept = option.type != "folder" and isinstance(value, (bool, int, float))
        if kept:
            found[option.name] = value
    return found


def _environment(environment: dict[str, Any]) -> dict[str, Any]:
    """Versions of known packages, architecture, and the model of a device."""
    found: dict[str, Any] = {}
    for key, value in environment.items():
        if not isinstance(value, str):
            continue
        if (key in PACKAGES and _VERSION.fullmatch(value)) or value in _PLATFORM.get(key, ()):
            found[key] = value
        elif key == "device" and len(value) < 60:
            words = [word for word in value.split() if _DEVICE_WORDS.fullmatch(word)]
            found.update({key: " ".join(words)} if len(words) == len(value.split()) else {})
    return found
