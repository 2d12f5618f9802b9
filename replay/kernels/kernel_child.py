"""The child process of ``userkernel.py``: finds a user's kernel, calls it, and leaves its outputs in files.

    python -P -m replay.kernels.kernel_child FOLDER

Each folder in FOLDER is one job: ``request.json`` and an ``.npy`` file for each array. The child puts ``out_*.npy``
and ``result.json`` beside them.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_hooks.layouts import layout
from replay.kernels.userkernel import RESULT, TAIL, parse_spec

_FILE_LIMIT = 16 << 30  # bytes of one file that the child writes
_MESSAGE = 300  # characters of an exception's text that fit into a sentence
_SHOWN = 6  # names that are listed where none is near
#: Folders of installed packages: an error is the user's where it left the user's own code.
_LIBRARIES = frozenset(("site-packages", "dist-packages"))


class _RefusedError(Exception):
    """The kernel cannot be found or called, or returned something else: one sentence, and a traceback or ""."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


def main(folder: Path) -> None:
    """Do every job in ``folder`` in the order of their names."""
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
            result = {"error": str(error), "detail": error.detail}
        except Exception as error:
            result = {"error": f"it raised {_told(error)}", "detail": _traceback(error)}
        # Whole or not at all: the parent looks for it while the child runs.
        (job / "partial").write_text(json.dumps(result))
        (job / "partial").replace(job / RESULT)


def _call(request: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], folder: Path) -> dict[str, Any]:
    """Call the kernel, save what it made, and say how long it took and why it is not judged ("" = it is)."""
    import torch

    from replay.kernels import launch

    device = launch.prepare()
    # These decide at import whether they are interpreted, so they come after `prepare`.
    from replay.kernels.selfcheck import self_check, watching
    from replay.kernels.twins import top_k_torch

    if sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))
    function = _find(request["spec"])
    if request["kind"] == "find":
        return {"not_judged": "", "seconds": 0.0}
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


def _find(spec: str) -> Callable[..., Any]:
    """The function that ``spec`` names; otherwise what is wrong, and the nearest right name."""
    module_name, name = parse_spec(spec)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _RefusedError(
                f"module {module_name} cannot be imported: {_told(error)}", _traceback(error)
            ) from None
        raise _RefusedError(_no_module(module_name, error.name, name)) from None
    except (Exception, SystemExit) as error:
        raise _RefusedError(
            f"module {module_name} cannot be imported: {_told(error)}", _traceback(error)
        ) from None
    if not hasattr(module, name):
        near = _near(name, _functions(module), lambda found: f"{module_name}:{found}")
        raise _RefusedError(f"module {module_name} has no function {name}{near}")
    function = getattr(module, name)
    if not callable(function):
        near = _near(name, _functions(module), lambda found: f"{module_name}:{found}")
        raise _RefusedError(
            f"{name} in module {module_name} is {_article(type(function).__name__)}, not a function{near}"
        )
    if type(function).__module__.startswith("triton."):
        raise _RefusedError(
            f"{name} in module {module_name} is a Triton kernel: name the function that launches it"
        )
    found: Callable[..., Any] = function
    return found


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _functions(module: ModuleType) -> list[str]:
    """Public functions of a module, those that it defines itself before those that it imports."""
    public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    own = [name for name in public if getattr(vars(module)[name], "__module__", "") == module.__name__]
    return own or public


def _no_module(wanted: str, missing: str, function: str) -> str:
    """Sentence for a module that is not there; ``missing`` is the part of ``wanted`` where the search ended."""
    parent, _, last = missing.rpartition(".")
    if parent:
        paths: Sequence[str] = list(getattr(sys.modules[parent], "__path__", []))
        where = f"package {parent}" if paths else f"{parent}, which is no package"
    else:
        paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)[:-1])]
        where = "the current folder or on PYTHONPATH"
    names = [found.name for found in pkgutil.iter_modules(paths)]
    here = [found.name for found in pkgutil.iter_modules(paths[:1])]
    rest = wanted.removeprefix(missing)

    def whole(found: str) -> str:
        return f"{parent}{'.' if parent else ''}{found}{rest}:{function}"

    return f"there is no module {missing} in {where}{_near(last, names, whole, here)}"


def _near(
    wanted: str, names: Sequence[str], whole: Callable[[str], str], shown: Sequence[str] | None = None
) -> str:
    """The nearest of ``names``, else the first of ``shown`` (default: ``names``), as the end of a sentence."""
    near = difflib.get_close_matches(wanted, names, n=1)
    if near:
        return f"; did you mean {whole(near[0])}?"
    shown = names if shown is None else shown
    more = ", ..." if len(shown) > _SHOWN else ""
    return f"; there is {', '.join(shown[:_SHOWN])}{more}" if shown else ""


def _told(error: BaseException) -> str:
    """An exception in a few words, with its place in the user's own file."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MESSAGE else text[:_MESSAGE].rpartition(" ")[0] + " ..."
    frames = _frames(error)
    frames = [f for f in frames if not _LIBRARIES.intersection(Path(f.filename).parts)] or frames
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f" ({Path(error.filename).name}:{error.lineno})"
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the user's own: those of this module and of the import say nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_list(_frames(error)) + traceback.format_exception_only(error))
    return text[-TAIL:].rstrip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
