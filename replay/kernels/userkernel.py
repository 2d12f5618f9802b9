"""Run a user's store or read kernel, named ``module:function``, in a child process (``kernel_child.py``).

The child protects this process: a kernel that reads outside its buffers kills its process on the interpreter, and
one that hangs never returns. Arrays go through ``.npy`` files in a temporary folder (no pickle); the module is
found in the current folder and on ``PYTHONPATH``. Signatures are those of `replay.kernels.read.read` and
`replay.kernels.store.store` (``docs/kernels.md``). This side needs numpy only; the child imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import layout
from replay.words import counted

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

DEFAULT_TIMEOUT = 120.0
RESULT = "result.json"
TAIL = 3000  #: characters of the child's output, or of a traceback, that are worth showing
_LOOK = 0.05  # seconds between two looks at the child
_OUTPUT = "output.txt"
_ROOT = Path(__file__).resolve().parents[2]


class UserKernelError(Exception):
    """The kernel could not be run: not found, raised, died, took too long, or returned something else.

    ``reason`` is one sentence, ``detail`` its traceback or what it printed ("" where there is neither).
    """

    def __init__(self, spec: str, reason: str, detail: str = "") -> None:
        super().__init__(f"kernel {spec}: {reason}")
        self.reason, self.detail = reason, detail


class NotJudgedError(UserKernelError):
    """The kernel ran, and what it computed says nothing about it: it used what Triton's interpreter does wrongly."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a kernel: what to call, its arrays by name, and dtype and shape of each output."""

    request: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    shapes: dict[str, tuple[str, tuple[int, ...]]]


def parse_spec(spec: str) -> tuple[str, str]:
    """``module:function`` in two parts; ``ValueError`` with the nearest right form otherwise."""
    module, colon, function = spec.partition(":")
    names = [*module.split("."), function]
    if not colon or names[-2] == "py" or not all(name.isidentifier() for name in names):
        raise ValueError(f"{spec!r} does not name a kernel: write module:function, such as {_nearest(spec)}")
    return module, function


def _nearest(spec: str) -> str:
    """``spec`` in the right form, as far as it can be guessed."""
    module, colon, function = spec.strip().partition(":")
    if module.endswith(".py") or "/" in module:
        module = module.removesuffix(".py").lstrip("./").replace("/", ".")
    elif not colon:
        module, _, function = module.rpartition(".")
    names = [*module.split("."), function]
    return f"{module}:{function}" if all(name.isidentifier() for name in names) else "my_kernels:read"


def find_kernels(specs: Sequence[str], timeout: float = DEFAULT_TIMEOUT) -> list[UserKernelError | None]:
    """What is wrong with the names of kernels, found out in one child before anything is judged with them.

    Each module is imported as it will be for a call; ``None`` where the function is there and can be called.
    Raises ``ValueError`` for text that is no name.
    """
    for spec in specs:
        parse_spec(spec)
    jobs = [Job({"kind": "find", "spec": spec}, {}, {}) for spec in specs]
    return [found if isinstance(found, UserKernelError) else None for found in run_jobs(jobs, timeout)]


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
            f"table[{request}, {entry}] is {table[request, entry]}; the cache has {counted(len(cache), 'page')}"
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
        raise ValueError(
            f"slots[{index}] is {slots[index]}, not one of the {limit} rows of {counted(len(pages), 'page')}"
        )
    return Job(
        {"kind": "store", "spec": spec, "layout": layout_name, "epsilon": epsilon},
        {"cache": pages, "slots": slots, "keys": keys, "rope": rope, "norm_weight": norm_weight},
        {"cache": ("|u1", pages.shape)},
    )


def _run(job: Job, timeout: float) -> dict[str, npt.NDArray[Any]]:
    (found,) = run_jobs([job], timeout)
    if isinstance(found, UserKernelError):
        raise found
    return found


def run_jobs(
    jobs: Sequence[Job], timeout: float = DEFAULT_TIMEOUT
) -> list[dict[str, npt.NDArray[Any]] | UserKernelError]:
    """Run several calls in one child, for its start takes seconds.

    Returns for each job its outputs (and "seconds", the time of the call), or what went wrong. When the child dies,
    the job that it was at gets the reason and those after it a note that they were not reached. ``timeout`` is for
    each call; the first one's includes the start of the child.
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
        death = _child_process(Path(name), folders, timeout)
        printed = _tail(Path(name) / _OUTPUT)
        found: list[dict[str, npt.NDArray[Any]] | UserKernelError] = []
        for job, folder in zip(jobs, folders, strict=True):
            if (folder / RESULT).exists():
                found.append(_outputs(job, folder))
                continue
            reason = death or "its process ended without a result"
            found.append(UserKernelError(job.request["spec"], reason, printed))
            death, printed = "not reached: its process had ended", ""
        return found


def _outputs(job: Job, folder: Path) -> dict[str, npt.NDArray[Any]] | UserKernelError:
    spec, result = job.request["spec"], json.loads((folder / RESULT).read_text())
    if "error" in result:
        return UserKernelError(spec, result["error"], result["detail"])
    if result["not_judged"]:
        return NotJudgedError(spec, result["not_judged"])
    outputs = {}
    for key, (dtype, shape) in job.shapes.items():
        found = _load(folder / f"out_{key}.npy", key, dtype, shape)
        if isinstance(found, str):
            return UserKernelError(spec, found)
        outputs[key] = found
    outputs["seconds"] = np.asarray(float(result["seconds"]))
    return outputs


def _child_process(folder: Path, jobs: Sequence[Path], timeout: float) -> str:
    """Run the child; why it died ("" = it did not). Whatever the child started ends with it."""
    paths = [p for p in (os.environ.get("PYTHONPATH", ""), str(_ROOT)) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / _OUTPUT).open("wb") as stream:
        # -P: the current folder must not shadow the modules that the child itself needs
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "replay.kernels.kernel_child", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            left, since = list(reversed(jobs)), time.monotonic()
            while (code := process.poll()) is None:
                if left and (left[-1] / RESULT).exists():
                    left.pop()
                    since = time.monotonic()
                elif time.monotonic() - since > timeout:
                    return f"not done after {timeout:g} s; its process was ended"
                else:
                    time.sleep(_LOOK)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return ""
    if code > 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}{_CAUSES.get(name, '')}"


_CAUSES = {
    "SIGSEGV": ": an address outside its buffer is the usual cause",
    "SIGBUS": ": an address outside its buffer is the usual cause",
    "SIGABRT": ": a write outside its buffer is the usual cause",
    "SIGKILL": ": too little memory is the usual cause",
    "SIGXFSZ": ": it wrote a file that is far too large",
}


def _tail(output: Path) -> str:
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - TAIL))
        text = stream.read(TAIL).decode("utf-8", "replace").strip()
    return f"it printed:\n{text}" if text else ""


def _load(file: Path, key: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any] | str:
    """An output of the child, or what is wrong with it; its size is checked before it is read."""
    wanted = f"{np.dtype(dtype)}{list(shape)}"
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not file.exists() or file.stat().st_size > expected + 4096:
        return f"the {key} that it returned is missing or larger than {wanted}"
    array = np.load(file, allow_pickle=False)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        return f"it returned {key} {array.dtype}{list(array.shape)}, not {wanted}"
    return np.asarray(array)
