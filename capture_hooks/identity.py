"""What a journal says about the process that wrote it: nothing that names a machine, a person or a path."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from capture_hooks.events import Process
from capture_hooks.options import Options

_VERSIONS = ("kv-replay", "numpy", "torch", "triton", "nixl", "mooncake-transfer-engine", "sglang", "vllm")


def describe(process: Process, options: Options) -> Process:
    """``process`` with what its caller left out: run id, host, mode, options and environment."""
    return replace(
        process,
        run=process.run or secrets.token_hex(6),
        host=process.host or host_digest(),
        mode=options.mode,
        options=process.options or json.dumps(options.public(), sort_keys=True),
        environment=process.environment or json.dumps(environment(), sort_keys=True),
    )


def file_name(process: Process) -> str:
    """``<role>-<rank>-<run id>.journal``."""
    role = re.sub(r"[^A-Za-z0-9_]+", "_", process.role) or "server"
    run = re.sub(r"[^A-Za-z0-9_]+", "_", process.run)
    return f"{role}-{process.rank}-{run}.journal"


def host_digest() -> str:
    """One-way digest of this boot (and time namespace): equal iff monotonic clocks are comparable. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/time")
        clock = str(namespace.readlink()) if namespace.is_symlink() else ""
    except OSError:
        return ""
    return hashlib.sha256(f"kv-replay host {boot} {clock}".encode()).hexdigest()[:16]


def environment() -> dict[str, str]:
    """Versions and architecture."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except Exception:  # not installed, or its metadata is broken: neither is our business
            continue
    return found
