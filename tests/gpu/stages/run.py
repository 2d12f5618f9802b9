"""Every stage with SGLang's own store, transfer and read: recorded, replayed, and one fault a stage named.

    python tests/gpu/stages/run.py --site SITE [--site NIXL ...] --out OUT [--cache CACHE] [--device cuda|cpu]

SITE and NIXL are folders that go on ``PYTHONPATH``: SGLang 0.5.23 and what it imports, sgl-deep-gemm, the nixl
packages. None of them need be installed; kv-replay comes in by its entry point. OUT gets the logs, the traces and
``stages.json``, which is also the last line. Exit code 0: everything as expected; 1: something was not; 2: it could
not run, and why.

Two processes on one device, a prefill and a decode side (``end.py``), each with SGLang's pool, NIXL manager and the
model of ``model.py`` around its own kernels. Two runs of the pair:

* ``eager``: some requests without a fault, whose stores, pages and logits must all be reproduced, and one request for
  each stage of the ladder with a fault put in there, which the verdict on that request must name, alone. The prefill of
  the last of both kinds reads gathered keys, as SGLang does for long prompts; its fault is in the logits of those;
* ``graph``: decode passes replay a CUDA graph. The stores inside it must be recorded and reproduced, once rightly and
  once with a wrong store; reads there are not covered, and the verdict has to say so.

``--device cpu`` goes the same way with torch twins of the two kernels and something like a graph: it shows that the
script works, and proves nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(ROOT / "tests" / "integration")]
import plug  # noqa: E402
from sglang_pair import Remote  # noqa: E402

from replay.verdict import STAGES  # noqa: E402

BEGAN = time.monotonic()
#: A prompt and its first chunk of the prefill; four pages, two in each chunk that is sent.
TOKENS, CHUNK = 1000, 600
PASSES = 24  #: decode passes of a request without a fault
CAPTURE = {
    "KV_REPLAY_MODE": "full", "KV_REPLAY_SEAL": "0", "KV_REPLAY_STORE_EVERY": "1", "KV_REPLAY_READ_EVERY": "4",
    "KV_REPLAY_LATER_MS": "30",
}  # fmt: skip


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f}] {line}", flush=True)


@dataclass(frozen=True)
class Case:
    """One request: where its pages are, and its fault ("" is none)."""

    room: int
    row: int
    fault: str
    source: tuple[int, ...]
    destination: tuple[int, ...]
    gathered: bool = False  # its prefill reads gathered keys


def cases(faults: Iterable[str]) -> list[Case]:
    """The requests of one run: rooms from 100 on, each on pages of its own; the first and the last have no fault."""
    found = []
    for number, fault in enumerate(["", *faults, ""]):
        first = 1 + 5 * number
        source = tuple(first + i for i in (2, 0, 3, 1))
        found.append(Case(100 + number, 1 + number, fault, source, tuple(first + i for i in (1, 3, 0, 2, 4))))
    return found


class Pair:
    """The two processes."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.folder = Path(options.out) / name
        self.folder.mkdir(parents=True, exist_ok=True)
        plug.kv_replay(self.folder / "plug")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        caches = {
            "TVM_FFI_CACHE_DIR": "tvm", "TRITON_CACHE_DIR": "triton",
            "DG_JIT_CACHE_DIR": "dg", "SGLANG_DG_CACHE_DIR": "dg",
        }  # fmt: skip
        cache = Path(options.cache or Path(options.out) / "cache")
        path = [str(ROOT), str(self.folder / "plug"), *options.site]
        environment = (
            os.environ
            | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
            # DeepGEMM is called by the model alone: what SGLang itself wants of it at its start is in other versions.
            | {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
            | {key: str(cache / value) for key, value in caches.items()}
            | CAPTURE
            | {"KV_REPLAY_CAPTURE": str(self.folder / "capture")}
        )
        environment.setdefault("CUDA_HOME", "/usr/local/cuda")
        if options.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        told = {"port": port, "pages": 96, "device": options.device}
        told |= {"engine_device": options.engine_device or options.device}
        self.processes, self.ends = [], {}
        self.sockets = Path(tempfile.mkdtemp(prefix="kvr"))  # the name of a socket has to be short
        listeners = []
        for role in ("prefill", "decode"):
            address = str(self.sockets / role)
            listener = Listener(address)
            log = self.folder / f"{role}.log"
            with log.open("wb") as handle:
                process = subprocess.Popen(
                    [sys.executable, str(HERE / "end.py"), role, address, json.dumps(told)],
                    env=environment, stdout=handle, stderr=handle, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)
            listeners.append((role, listener, process, log))
        try:
            for role, listener, process, log in listeners:
                self.ends[role] = Remote(role, self._accept(listener, process, log, options.start), log)
            for end in self.ends.values():
                end._answer(options.start)
        except BaseException:
            self.close()
            raise
        self.prefill, self.decode = self.ends["prefill"], self.ends["decode"]

    @staticmethod
    def _accept(listener: Listener, process: Any, log: Path, seconds: float) -> Any:
        until = time.monotonic() + seconds
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while time.monotonic() < until and process.poll() is None:
            try:
                return listener.accept()
            except TimeoutError:
                continue
        raise RuntimeError(f"a process did not come up:\n{log.read_text(errors='replace')[-4000:]}")

    def close(self) -> None:
        """End both, in an orderly way where they still answer."""
        for end in self.ends.values():
            try:
                end.exit(seconds=90)
            except Exception as error:
                say(f"{end.role} did not end by itself: {type(error).__name__}: {error}")
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.sockets, ignore_errors=True)


def prefill_and_send(pair: Pair, case: Case) -> None:
    """Announce, compute in two chunks, send in two, until both sides have seen the end."""
    pair.decode.receive(room=case.room, pages=list(case.destination[:4]))
    if pair.prefill.open(room=case.room, pages=4) != 2:
        raise RuntimeError(f"room {case.room} was not bootstrapped")
    wrong = case.fault if case.fault == "store" or case.gathered else ""
    how = {"wrong": wrong, "gathered": case.gathered}
    pair.prefill.begin(room=case.room, row=case.row, pages=list(case.source), tokens=TOKENS)
    pair.prefill.extend(room=case.room, tokens=CHUNK, **how, seconds=240)
    pair.prefill.send(room=case.room, pages=list(case.source[:2]), tokens=512)
    pair.prefill.extend(room=case.room, tokens=TOKENS - CHUNK, **how)
    if case.fault == "source":
        pair.prefill.flip(page=case.source[2])
    pair.prefill.dropping(drop=case.fault == "descriptor")
    pair.prefill.send(room=case.room, pages=list(case.source[2:]), tokens=TOKENS - 512)
    if pair.prefill.wait(room=case.room) != 4:
        raise RuntimeError(f"the transfer of room {case.room} failed at prefill")
    pair.prefill.dropping(drop=False)
    if case.fault == "wire":
        pair.decode.flip(page=case.destination[1])
    elif case.fault == "completion":
        pair.decode.keep_old(page=case.destination[1])
    if pair.decode.wait(room=case.room) != 4:
        raise RuntimeError(f"the transfer of room {case.room} failed at decode")
    pair.decode.begin(room=case.room, row=case.row, pages=list(case.destination), tokens=TOKENS, have=TOKENS)
    pair.decode.commit(room=case.room)
    time.sleep(0.1)  # the later look
    pair.decode.admit(room=case.room)
    pair.decode.wait_for_device()
    if case.fault == "destination":
        pair.decode.flip(page=case.destination[1])


def eager(pair: Pair, faults: Iterable[str]) -> list[Case]:
    """Requests one after the other, those without a fault decoded together."""
    names = list(faults)
    requests = cases([*names, *(name for name in names if name == "read-kernel")])
    for number in {len(names) + 1 if "read-kernel" in names else -1, -1}:
        requests[number] = replace(requests[number], gathered=True)
    for case in requests:
        prefill_and_send(pair, case)
        if not case.fault:
            same = pair.prefill.hash(pages=list(case.source)) == pair.decode.hash(
                pages=list(case.destination[:4])
            )
            if not same:
                raise RuntimeError(
                    f"room {case.room}: the pages of both sides differ, without any fault put in"
                )
            continue
        wrong = case.fault if case.fault in ("table", "read-kernel", "top-k") and not case.gathered else ""
        pair.decode.decode(rooms=[case.room], passes=1, wrong=wrong, seconds=240)
        if case.fault == "completion":  # what was announced as complete arrives after the first read
            pair.decode.put_back()
        pair.decode.decode(rooms=[case.room], passes=7, wrong=wrong)
    clean = [case.room for case in requests if not case.fault]
    pair.decode.decode(rooms=clean, passes=PASSES, seconds=240)
    finish(pair, requests)
    return requests


def graph(pair: Pair, faults: Iterable[str]) -> list[Case]:
    """Decode passes that replay a CUDA graph, of two rows and of four; then one whose store is wrong."""
    requests = cases(faults)
    for case in requests:
        prefill_and_send(pair, replace(case, fault=""))
    clean = [case.room for case in requests if not case.fault]
    time.sleep(0.5)  # no look may be on its way while a graph is captured
    pair.decode.capture(size=4, seconds=240)
    pair.decode.decode(rooms=clean, passes=PASSES, graph=True)
    for case in requests:
        if case.fault:
            pair.decode.capture(size=2, wrong="store", seconds=240)
            pair.decode.decode(rooms=[case.room], passes=8, graph=True)
    finish(pair, requests)
    return requests


def finish(pair: Pair, requests: list[Case]) -> None:
    """Both sides give everything back."""
    for case in requests:
        pair.decode.release(room=case.room)
        pair.decode.clear(room=case.room)
        pair.prefill.clear(room=case.room)


def judged(pair: Pair, requests: list[Case]) -> dict[str, Any]:
    """The verdict on all, which stages it names for each request, and the verdict on those without a fault alone."""
    from replay.judge import judge
    from replay.judge_options import JudgeOptions
    from replay.scope import Scope
    from replay.trace.reader import open_trace

    began = time.monotonic()
    right = frozenset(case.room for case in requests if not case.fault)
    with open_trace(pair.folder / "capture") as trace:
        verdict = judge(trace)
        clean = judge(trace, JudgeOptions(scope=Scope(rooms=right)))
        reads = trace.table("read")
        kernels = Counter(
            f"{trace.processes[int(process)].role}: {kernel}"
            for process, kernel in zip(reads["process"], reads["kernel"], strict=True)
        )
    named: dict[int, dict[str, list[str]]] = {}
    for finding in verdict.findings:
        stages = named.setdefault(finding.request.room, {})
        stages.setdefault(finding.stage, []).append(
            f"{finding.code} {finding.confidence} layer {finding.layer}"
        )
    result = {
        "verdict": verdict.verdict,
        "requests": [{"room": c.room, "fault": c.fault, "named": named.get(c.room, {})} for c in requests],
        "stores": verdict.scope.get("stores"),
        "reads": verdict.scope.get("reads"),
        "reads_by_kernel": dict(kernels),
        "scope": {k: v for k, v in verdict.scope.items() if k not in ("stores", "reads")},
        "not_judged": [f"{item.what}: {item.why}" for item in verdict.not_judged],
        "hazards": [f"{item.where}: {item.what}" for item in verdict.hazards],
        "losses": verdict.losses,
        "coverage": verdict.coverage,
        "without_a_fault": {
            "verdict": clean.verdict,
            "stores": clean.scope.get("stores"),
            "reads": clean.scope.get("reads"),
            "not_judged": [f"{item.what}: {item.why}" for item in clean.not_judged],
        },
        "seconds": round(time.monotonic() - began, 1),
    }
    return json.loads(json.dumps(result, default=str))


def complaints(name: str, result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    for request in result["requests"]:
        stages, fault = set(request["named"]), request["fault"]
        if stages != ({fault} if fault else set()):
            found.append(
                f"{name}: room {request['room']} ({fault or 'no fault'}): named {sorted(stages) or 'nothing'}"
            )
    right = result["without_a_fault"]
    stores, reads = right["stores"] or {}, right["reads"] or {}
    for what, part in (("stored rows", stores), ("logits", reads)):
        rows, again = part.get("rows", 0), part.get("rows_reproduced", 0)
        if not rows or rows != again:
            found.append(f"{name}: {again} of {rows} {what} were reproduced where there was no fault")
    if result["losses"]:
        found.append(f"{name}: lost {result['losses']}")
    if name == "eager" and not result["reads_by_kernel"].get("prefill: deep_gemm.fp8_mqa_logits"):
        found.append(f"{name}: no read of gathered keys was recorded")
    if name == "eager" and right["verdict"] != "clean":
        found.append(f"{name}: {right['verdict']} where there was no fault: {right['not_judged']}")
    if name == "graph":  # reads inside a graph are not seen, and that has to be said; stores are
        said = [line for line in right["not_judged"] if line.startswith("decode rank 0: ")]
        if right["verdict"] != "inconclusive" or not said or len(right["not_judged"]) != len(said):
            found.append(f"{name}: {right['verdict']}, not judged: {right['not_judged']}")
        if "store" not in result["coverage"]["decode rank 0"]["covered"]:
            found.append(f"{name}: stores inside the graph are not covered")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--site", action="append", required=True, help="folder for PYTHONPATH; may be given again"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache", default="", help="compiled kernels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--faults", default=",".join(STAGES), help="stages, joined by commas")
    parser.add_argument("--runs", default="eager,graph", help="which of the two")
    parser.add_argument(
        "--engine-device", default="", help="what SGLang's own arguments say (default: --device)"
    )
    parser.add_argument("--start", type=float, default=240.0, help="seconds a process may take to come up")
    options = parser.parse_args()
    faults = [name for name in options.faults.split(",") if name]
    if unknown := set(faults) - set(STAGES):
        parser.error(f"no stage is called {', '.join(sorted(unknown))}")
    if unknown := set(options.runs.split(",")) - {"eager", "graph"}:
        parser.error(f"no run is called {', '.join(sorted(unknown))}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(
                "no CUDA device here; --device cpu goes the same way with twins of the kernels",
                file=sys.stderr,
            )
            return 2
    Path(options.out).mkdir(parents=True, exist_ok=True)
    runs = {"eager": (eager, faults), "graph": (graph, ["store"])}
    result: dict[str, Any] = {"device": options.device, "complaints": []}
    for name in options.runs.split(","):
        drive, wanted = runs[name]
        try:
            say(f"{name}: starting a pair")
            pair = Pair(options, name)
            try:
                say(f"{name}: running")
                result.setdefault("about", pair.prefill.about())
                requests = drive(pair, wanted)
                hooks = {role: end.hooks() for role, end in pair.ends.items()}
            finally:
                pair.close()
            say(f"{name}: judging")
            result[name] = judged(pair, requests) | {"hooks": hooks}
            result["complaints"] += complaints(name, result[name])
        except Exception as error:
            result["complaints"].append(f"{name}: {type(error).__name__}: {str(error)[-2000:]}")
        say(f"{name}: over; complaints so far: {result['complaints'] or 'none'}")
    (Path(options.out) / "stages.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
