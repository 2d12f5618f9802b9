"""Run a user's store or read kernel, named ``module:function``, in a child process.

The child protects this process: a kernel that reads outside its buffers kills its process on the interpreter, and
one that hangs never returns. Arrays go through ``.npy`` files in a temporary folder (no pickle); the module is
found in the current folder and on ``PYTHONPATH``. Signatures are those of `replay.kernels.read.read` and
`replay.kernels.store.store` (``docs/kernels.md``). This side needs numpy only; the child imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import layout

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

DEFAULT_TIMEOUT = 120.0
_RESULT = "result.json"
_TAIL = 3000  # characters of the child's output that are worth showing
_FILE_LIMIT = 16 << 30  # bytes of one file that the child writes
_ROOT = Path(__file__).resolve().parents[2]


class UserKernelError(Exception):
    """The kernel could not be run: not found, raised, died, took too long, or returned something else."""


class NotJudgedError(UserKernelError):
    """The kernel ran, and what it computed says nothing about it: it used what Triton's interpreter does wrongly."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a kernel: what to call, its arrays by name, and dtype and shape of each output."""

    request: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    shapes: dict[str, tuple[str, tuple[int, ...]]]


def parse_spec(spec: str) -> tuple[str, str]:
    """``module:function`` in two parts; ``ValueError`` otherwise."""
    module, colon, function = spec.partition(":")
    names = [*module.split("."), function]
    if not colon or not all(name.isidentifier() for name in names):
        raise ValueError(f"{spec!r} does not name a kernel: write module:function, such as my_kernels:read")
    return module, function


def run_read_kernel(
    spec: str,
    layout_name: str,
    cache: U8,
    table: I64,
    rows: I64,
    query: F32,
    weights: F32,
    k: int,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[F32, I32]:
    """Run a read kernel of the user.

    Args:
        spec: ``module:function``.
        layout_name: page format, a name of ``capture_hooks.layouts.LAYOUTS``.
        cache: uint8[n, page_bytes].
        table: int64[B, maxpages], page ids; entries past the length are not read.
        rows: int64[B], lengths in rows.
        query: float32[B, H, 128].
        weights: float32[B, H].
        k: of top-k.
        timeout: seconds, including the start of the child (2 to 4 s).

    Returns:
        ``(float32[B, max(rows)], int32[B, k])``; whatever the kernel left past a length is replaced by -inf.

    Raises:
        ValueError: the spec, a page id or a length cannot be right.
        NotJudgedError: see there.
        UserKernelError: see there.
    """
    job = read_job(spec, layout_name, cache, table, rows, query, weights, k)
    found = _run(job, timeout)
    return mask_past(found["logits"], rows), found["top_k"]


def read_job(
    spec: str, layout_name: str, cache: U8, table: I64, rows: I64, query: F32, weights: F32, k: int
) -> Job:
    """The job of `run_read_kernel`, for `run_jobs`."""
    parse_spec(spec)
    page = layout(layout_name)
    reached = np.arange(table.shape[1]) * page.rows < rows[:, None]
    if (rows < 0).any() or (rows > table.shape[1] * page.rows).any():
        raise ValueError(f"a length is outside 0..{table.shape[1] * page.rows}, the rows of the table")
    outside = reached & ((table < 0) | (table >= len(cache)))
    if outside.any():
        request, entry = (int(i) for i in np.argwhere(outside)[0])
        raise ValueError(
            f"table[{request}, {entry}] is {table[request, entry]}; the cache has {len(cache)} pages"
        )
    return Job(
        {"kind": "read", "spec": spec, "layout": layout_name, "k": k},
        {"cache": cache, "table": table, "rows": rows, "query": query, "weights": weights},
        {"logits": ("<f4", (len(rows), int(rows.max(initial=0)))), "top_k": ("<i4", (len(rows), k))},
    )


def mask_past(logits: F32, rows: I64) -> F32:
    """``logits`` float32[B, n] with -inf past each request's length."""
    here = np.arange(logits.shape[1]) < rows[:, None]
    return np.where(here, logits, np.float32(-np.inf)).astype(np.float32)


def run_store_kernel(
    spec: str,
    layout_name: str,
    pages: U8,
    slots: I64,
    keys: F32,
    rope: F32,
    norm_weight: F32,
    epsilon: float,
    timeout: float = DEFAULT_TIMEOUT,
) -> U8:
    """Run a store kernel of the user on a copy of ``pages`` and return the pages after it.

    Args:
        spec: ``module:function``.
        layout_name: page format, a name of ``capture_hooks.layouts.LAYOUTS``.
        pages: uint8[n, page_bytes], the cache before the store.
        slots: int64[m], ``page * rows + row`` of each row.
        keys: float32[m, 128] before RMSNorm.
        rope: float32[m, 64], cos of pair i at 2i, sin at 2i + 1.
        norm_weight: float32[128].
        epsilon: of RMSNorm.
        timeout: seconds, including the start of the child (2 to 4 s).

    Raises:
        ValueError: the spec or a slot cannot be right.
        NotJudgedError: see there.
        UserKernelError: see there.
    """
    job = store_job(spec, layout_name, pages, slots, keys, rope, norm_weight, epsilon)
    return _run(job, timeout)["cache"]


def store_job(
    spec: str,
    layout_name: str,
    pages: U8,
    slots: I64,
    keys: F32,
    rope: F32,
    norm_weight: F32,
    epsilon: float,
) -> Job:
    """The job of `run_store_kernel`, for `run_jobs`."""
    parse_spec(spec)
    limit = len(pages) * layout(layout_name).rows
    outside = (slots < 0) | (slots >= limit)
    if outside.any():
        index = int(np.argmax(outside))
        raise ValueError(f"slots[{index}] is {slots[index]}; {len(pages)} pages have {limit} rows")
    return Job(
        {"kind": "store", "spec": spec, "layout": layout_name, "epsilon": epsilon},
        {"cache": pages, "slots": slots, "keys": keys, "rope": rope, "norm_weight": norm_weight},
        {"cache": ("|u1", pages.shape)},
    )


def _run(job: Job, timeout: float) -> dict[str, npt.NDArray[Any]]:
    (found,) = run_jobs(job.request["spec"], [job], timeout)
    if isinstance(found, UserKernelError):
        raise found
    return found


def run_jobs(
    spec: str, jobs: list[Job], timeout: float = DEFAULT_TIMEOUT
) -> list[dict[str, npt.NDArray[Any]] | UserKernelError]:
    """Run several calls of one kernel in one child, for its start takes seconds.

    Returns for each job its outputs (and "seconds", the time of the call), or what went wrong. When the child dies,
    the job that it was at gets the reason and those after it a note that they were not reached.
    """
    with tempfile.TemporaryDirectory(prefix="kv-replay-kernel-") as name:
        folders = []
        for index, job in enumerate(jobs):
            folder = Path(name) / f"{index:04d}"
            folder.mkdir()
            folders.append(folder)
            for key, array in job.arrays.items():
                np.save(folder / f"{key}.npy", np.ascontiguousarray(array), allow_pickle=False)
            (folder / "request.json").write_text(json.dumps(job.request | {"arrays": sorted(job.arrays)}))
        death = _child_process(Path(name), timeout)
        found: list[dict[str, npt.NDArray[Any]] | UserKernelError] = []
        for job, folder in zip(jobs, folders, strict=True):
            try:
                if not (folder / _RESULT).exists():
                    reason, death = death, "not reached: its process had ended"
                    raise UserKernelError(reason or "its process ended without a result")
                found.append(_outputs(job, folder))
            except UserKernelError as error:
                found.append(type(error)(f"kernel {spec}: {error}"))
        return found


def _outputs(job: Job, folder: Path) -> dict[str, npt.NDArray[Any]]:
    result = json.loads((folder / _RESULT).read_text())
    if "error" in result:
        raise UserKernelError(result["error"])
    if result["not_judged"]:
        raise NotJudgedError(result["not_judged"])
    outputs = {key: _load(folder / f"out_{key}.npy", key, *want) for key, want in job.shapes.items()}
    outputs["seconds"] = np.asarray(float(result["seconds"]))
    return outputs


def _child_process(folder: Path, timeout: float) -> str:
    """Run the child; why it died ("" = it did not). Whatever the child started ends with it."""
    paths = [p for p in (os.environ.get("PYTHONPATH", ""), str(_ROOT)) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    output = folder / "output.txt"
    with output.open("wb") as stream:
        # -P: the current folder must not shadow the modules that the child itself needs
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "replay.kernels.userkernel", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} s; its process was ended{_tail(output)}"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return ""
    if code > 0:
        return f"its process ended with code {code}{_tail(output)}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}{_CAUSES.get(name, '')}{_tail(output)}"


_CAUSES = {
    "SIGSEGV": ": an address outside its buffer is the usual cause",
    "SIGBUS": ": an address outside its buffer is the usual cause",
    "SIGABRT": ": a write outside its buffer is the usual cause",
    "SIGKILL": ": too little memory is the usual cause",
    "SIGXFSZ": ": it wrote a file that is far too large",
}


def _tail(output: Path) -> str:
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - _TAIL))
        text = stream.read(_TAIL).decode("utf-8", "replace").strip()
    return f"\nit printed:\n{text}" if text else ""


def _load(file: Path, key: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An output of the child; its size is checked before it is read."""
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not file.exists() or file.stat().st_size > expected + 4096:
        raise UserKernelError(f"the kernel's {key} is missing or larger than {shape}")
    array = np.load(file, allow_pickle=False)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise UserKernelError(f"the kernel returned {key} {array.dtype}{array.shape}, not {dtype}{shape}")
    return np.asarray(array)


def _child(folder: Path) -> None:
    """The child: run the kernel on each job and leave outputs and ``result.json`` in the job's folder."""
    import faulthandler
    import resource

    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT, _FILE_LIMIT))
    for job in sorted(path for path in folder.iterdir() if path.is_dir()):
        request = json.loads((job / "request.json").read_text())
        arrays = {key: np.load(job / f"{key}.npy", allow_pickle=False) for key in request["arrays"]}
        try:
            result = _call(request, arrays, job)
        except _RefusedError as error:
            result = {"error": str(error)}
        except Exception as error:
            # Only the user's own frames: those of this module say nothing.
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            text = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
            result = {"error": f"it raised\n{text[-_TAIL:].rstrip()}"}
        (job / _RESULT).write_text(json.dumps(result))


class _RefusedError(Exception):
    """In the child: the function is not there or returned something else."""


def _call(request: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], folder: Path) -> dict[str, Any]:
    """Call the kernel, save what it made, and say how long it took and why it is not judged ("" = it is)."""
    import torch

    from replay.kernels import launch

    device = launch.prepare()
    # These decide at import whether they are interpreted, so they come after `prepare`.
    from replay.kernels.selfcheck import self_check, watching
    from replay.kernels.twins import top_k_torch

    sys.path.insert(0, str(Path.cwd()))
    module, name = parse_spec(request["spec"])
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise _RefusedError(f"module {module} has no function {name}")
    tensors = {key: torch.from_numpy(array).to(device) for key, array in arrays.items()}
    page = layout(request["layout"])
    began = time.perf_counter()
    with watching() as used:
        if request["kind"] == "store":
            order = ("cache", "slots", "keys", "rope", "norm_weight")
            function(page, *(tensors[key] for key in order), request["epsilon"])
            outputs = {"cache": tensors["cache"]}
        else:
            order = ("cache", "table", "rows", "query", "weights")
            found = function(page, *(tensors[key] for key in order), request["k"])
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise _RefusedError(f"a read kernel returns (logits, top_k), this one {type(found).__name__}")
            logits = torch.as_tensor(found[0]).to(torch.float32)
            longest = max(arrays["rows"].tolist(), default=0)
            if logits.ndim != 2 or logits.shape[1] < longest:
                raise _RefusedError(
                    f"its logits have shape {list(logits.shape)}, fewer than {longest} columns"
                )
            logits = logits[:, :longest]
            if found[1] is None:
                past = (
                    torch.arange(longest, device=logits.device) >= tensors["rows"].to(logits.device)[:, None]
                )
                top_k = top_k_torch(logits.masked_fill(past, -torch.inf), tensors["rows"], request["k"])
            else:
                top_k = torch.as_tensor(found[1]).to(torch.int32)
            outputs = {"logits": logits, "top_k": top_k}
    on_host = {key: tensor.detach().cpu().contiguous().numpy() for key, tensor in outputs.items()}
    seconds = time.perf_counter() - began
    for key, array in on_host.items():
        np.save(folder / f"out_{key}.npy", array, allow_pickle=False)
    why = ""
    if used:
        check = self_check(device)
        affected = check.affected(used)
        if affected:
            why = f"it uses {', '.join(affected)}, which the {check.engine} computes wrongly"
    return {"not_judged": why, "seconds": seconds}


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
