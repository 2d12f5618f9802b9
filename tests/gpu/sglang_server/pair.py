"""A real SGLang prefill/decode pair on one GPU with kv-replay in it: rates with capture on and off, and faults.

    python tests/gpu/sglang_server/pair.py rates  --site SITE --nixl NIXL --out OUT [--graphs] [--rounds 3]
    python tests/gpu/sglang_server/pair.py faults --site SITE --nixl NIXL --out OUT
    python tests/gpu/sglang_server/pair.py races  --site SITE --nixl NIXL --out OUT
    python tests/gpu/sglang_server/pair.py long   --site SITE --nixl NIXL --out OUT

SITE holds SGLang 0.5.16 and what it needs, NIXL the nixl packages; neither need be installed. The model is a tiny
DeepSeek-V4 with dummy weights (``config.json``). kv-replay is installed as an entry point and ``KV_REPLAY_CAPTURE``
is set: nothing else differs between the pair with capture and the one without. ``rates`` runs both pairs at once and
puts the load on one, then on the other. The last line is one JSON object; OUT gets it and the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent)]
import faults  # noqa: E402
import plug  # noqa: E402

WORK = Path(os.environ.get("PAIR_WORK", Path(tempfile.gettempdir()) / "kv-replay-pair"))
SERVER = [
    "--load-format", "dummy", "--skip-tokenizer-init", "--host", "127.0.0.1", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--cuda-graph-max-bs-decode", "64", "--max-running-requests", "64",
    "--context-length", "32768", "--random-seed", "1", "--mem-fraction-static", "0.5",
    "--disaggregation-transfer-backend", "nixl",
]  # fmt: skip
SETTINGS = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_DSV4_FP4_EXPERTS": "0", "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f}] {line}", flush=True)


BEGAN = time.monotonic()


def plug_ins(with_faults: bool) -> Path:
    """A folder with the entry points of the stand-ins and of kv-replay as its project file declares it."""
    folder = WORK / ("plug-faults" if with_faults else "plug")
    folder.mkdir(parents=True, exist_ok=True)
    plug.kv_replay(folder)
    plug.entry_points(folder, "pair_shim", "pair_shim = shim:register")
    if with_faults:
        plug.entry_points(folder, "pair_faults", "pair_faults = faults:register")
    return folder


class Server:
    """One server process and its children."""

    def __init__(
        self, options: argparse.Namespace, name: str, role: str, port: int, bootstrap: int, extra: dict[str, str],
        more: list[str],
    ) -> None:  # fmt: skip
        self.name, self.port = name, port
        self.log = Path(options.out) / f"{name}.log"
        caches = {
            "TVM_FFI_CACHE_DIR": "tvm", "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "dg",
            "SGLANG_DG_CACHE_DIR": "dg", "TORCHINDUCTOR_CACHE_DIR": "inductor",
        }  # fmt: skip
        environment = (
            os.environ | SETTINGS | {k: str(Path(options.cache) / v) for k, v in caches.items()} | extra
        )
        environment.setdefault("CUDA_HOME", "/usr/local/cuda")
        environment["PYTHONPATH"] = ":".join(
            map(str, (plug_ins(options.what == "faults"), HERE, ROOT, options.site, options.nixl))
        )
        model = WORK / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text((HERE / "config.json").read_text())
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port),
            "--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(bootstrap), *SERVER,
            "--chunked-prefill-size", "16384" if options.what == "long" else "4096", *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            start_new_session=True, cwd=WORK,
        )  # fmt: skip

    def up(self, until: float) -> bool:
        """Wait until the server answers."""
        while time.monotonic() < until:
            if self.process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return True
            except OSError:
                pass
            time.sleep(0.5)
        return False

    def tail(self, lines: int = 25) -> str:
        text = [
            line for line in self.log.read_text(errors="replace").splitlines() if "Ignore import" not in line
        ]
        return "\n".join(line[:300] for line in text[-lines:])

    def notable(self) -> list[str]:
        """Lines of the log that somebody should look at."""
        words = ("kv-replay", "Traceback", "Error", "rror:", "exception")
        quiet = ("Ignore import", "GET /health", "server_args=", "mismatched with")
        lines = self.log.read_text(errors="replace").splitlines()
        return [
            line[:400]
            for line in lines
            if any(w in line for w in words) and not any(w in line for w in quiet)
        ][:40]

    def stop(self) -> None:
        """End the whole group as a service manager does."""
        for number, seconds in ((signal.SIGTERM, 12.0), (signal.SIGKILL, 3.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.process.poll()
                try:
                    os.killpg(self.process.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.1)


class Pair:
    """A prefill and a decode server."""

    def __init__(
        self, options: argparse.Namespace, name: str, first_port: int, capture: Path | None, more: list[str],
        extra: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.options, self.name, self.first_port, self.capture = options, name, first_port, capture
        environment = dict(extra or {})
        if capture is not None:
            capture.mkdir(parents=True, exist_ok=True)
            environment["KV_REPLAY_CAPTURE"] = str(capture)
        graphs = [] if options.graphs else ["--disable-cuda-graph"]
        self.servers: dict[str, Server | None] = {}
        self._make = {
            role: lambda role=role, number=number: Server(
                options, f"{name}-{role}", role, first_port + 100 * number, first_port + 50, environment,
                more + graphs if role == "decode" else ["--max-total-tokens", "400000"],
            )
            for number, role in enumerate(("prefill", "decode"))
        }  # fmt: skip
        if not options.cold:
            self.servers = {role: make() for role, make in self._make.items()}

    def up(self, seconds: float) -> bool:
        """Wait for both; where nothing is compiled yet the second one starts when the first one is done with that."""
        for role, make in self._make.items():
            server = self.servers.setdefault(role, None) or make()
            self.servers[role] = server
            if not server.up(time.monotonic() + seconds):
                say(f"{server.name} is not up\n{server.tail(40)}")
                return False
        say(f"{self.name} is up")
        return True

    def load(self, **more: int) -> dict[str, Any]:
        """Run the load and return what it measured."""
        arguments = {
            "prefill": self.first_port,
            "decode": self.first_port + 100,
            "bootstrap": self.first_port + 50,
        }
        command = [sys.executable, str(HERE / "load.py")]
        for key, value in (arguments | more).items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        if done.returncode:
            return {
                "failed": -1,
                "requests": 0,
                "first_failures": [done.stderr[-500:]],
                "requests_per_second": 0.0,
            }
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def trigger(self, room: int) -> None:
        """Have the bytes of the last seconds kept."""
        done = command_line(self.options, "trigger", str(self.capture), "--room", str(room), seconds=60)
        if done.returncode:
            say(f"trigger: {done.stderr[-300:]}")

    def stop(self) -> None:
        for server in filter(None, self.servers.values()):
            server.stop()

    def notable(self) -> dict[str, list[str]]:
        return {name: server.notable() for name, server in self.servers.items() if server}


def command_line(
    options: argparse.Namespace, *arguments: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{options.extra}" if options.extra else str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "replay", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


def replay(options: argparse.Namespace, folder: Path, *arguments: str, seconds: float = 200) -> Any:
    """Run the command line of kv-replay on a folder; parsed JSON, or what it said."""
    began = time.monotonic()
    try:
        done = command_line(options, *arguments, str(folder), "--json", seconds=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:g} s"}
    say(f"replay {' '.join(arguments)} took {time.monotonic() - began:.1f} s, exit code {done.returncode}")
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {
            "error": f"exit {done.returncode}",
            "stderr": done.stderr[-1500:],
            "stdout": done.stdout[-500:],
        }


def fresh(name: str) -> Path:
    """A folder of this run alone: traces of two runs do not belong together."""
    folder = WORK / f"{name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    return folder


def gaps(folder: Path) -> list[str]:
    """Hooks of the traces of a folder that do not see everything, and why; and what was lost."""
    from replay.trace.reader import open_trace

    found: dict[tuple[int, str], str] = {}
    with open_trace(folder) as trace:
        hooks, losses = trace.table("hook"), trace.table("loss")
        for row in range(len(hooks)):
            key = (int(hooks["process"][row]), str(hooks["name"][row]))
            whole = bool(hooks["complete"][row]) and str(hooks["state"][row]) == "attached"
            found[key] = "" if whole else f"{hooks['state'][row]}: {hooks['note'][row]}"
        lines = [f"{trace.processes[p].role} {name}: {why}" for (p, name), why in found.items() if why]
        for row in range(len(losses)):
            role = trace.processes[int(losses["process"][row])].role
            lines.append(f"{role} lost {losses['count'][row]} {losses['what'][row]}: {losses['reason'][row]}")
    return lines[:60]


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def brief(verdict: Any) -> Any:
    """A verdict without what is long."""
    if not isinstance(verdict, dict) or "verdict" not in verdict:
        return verdict
    found = {k: v for k, v in verdict.items() if k not in ("findings", "environment", "hazards")}
    found["hazards"] = {"count": len(verdict["hazards"]), "first": verdict["hazards"][:5]}
    found["findings"] = [
        {k: f[k] for k in ("code", "kind", "stage", "confidence", "role", "layer")}
        | {"room": f["request"]["room"], "pages": len(f["pages"]), "evidence": f["evidence"][:3]}
        for f in verdict["findings"][:40]
    ]
    found["findings_total"] = len(verdict["findings"])
    return found


def rates(options: argparse.Namespace) -> dict[str, Any]:
    """Load on a pair with capture and on one without, in turn."""
    folder = fresh("capture")
    more = ["--max-total-tokens", "400000"]
    with_capture = Pair(options, "on", 30100, folder, more)
    pairs = {"on": with_capture}
    if options.cold and not with_capture.up(options.start):
        return {"error": "the pair is not up", "notable": with_capture.notable()}
    if not options.alone:
        pairs["off"] = Pair(options, "off", 30500, None, more)
    result: dict[str, Any] = {"graphs": options.graphs, "loads": {name: [] for name in pairs}}
    try:
        if not all(pair.up(options.start) for pair in pairs.values()):
            return result | {"error": "not up", "notable": {n: p.notable() for n, p in pairs.items()}}
        for pair in pairs.values():
            say(f"warm-up {pair.name}: {pair.load(requests=24, at_once=24, seed=99, first_room=10)}")
        for number in range(options.rounds):
            for name, pair in pairs.items() if number % 2 == 0 else reversed(pairs.items()):
                found = pair.load(
                    requests=options.requests, at_once=60, seed=1 + number, first_room=1000 + 10_000 * number
                )
                result["loads"][name].append(found)
                say(f"round {number}, capture {name}: {json.dumps(found)}")
                if name == "on" and number == options.rounds - 1:
                    pair.trigger(1000 + 10_000 * number)
        time.sleep(2)
    finally:
        for pair in pairs.values():
            pair.stop()
    result["notable"] = {name: pair.notable() for name, pair in pairs.items()}
    result["files"] = sizes(folder)
    medians = {
        name: statistics.median(load["requests_per_second"] for load in loads)
        for name, loads in result["loads"].items() if loads
    }  # fmt: skip
    result["requests_per_second"] = medians
    if "off" in medians:
        result["ratio"] = round(medians["on"] / max(medians["off"], 1e-9), 3)
    result["verdict"] = replay(options, folder)
    result["gaps"] = gaps(folder)
    return result


def by_itself(
    options: argparse.Namespace, name: str, work: Callable[[Pair], dict[str, Any]], tokens: int = 400_000,
    extra: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A pair with capture alone on the machine: what ``work`` measured on it, and the verdict on what was recorded.

    ``tokens`` are those that decode has memory for. ``work`` ends with the trigger that has page bytes kept.
    """
    folder = fresh(f"capture-{name}")
    pair = Pair(options, name, 30100, folder, ["--max-total-tokens", str(tokens)], extra)
    try:
        if not pair.up(options.start):
            return {"error": "not up", "notable": pair.notable()}
        result = work(pair)
        time.sleep(2)
    finally:
        pair.stop()
    result |= {"notable": pair.notable(), "files": sizes(folder), "reads": reads(folder)}
    return result | {"verdict": replay(options, folder), "gaps": gaps(folder)}


def faulty(pair: Pair) -> dict[str, Any]:
    """Faults in a running pair; each has rooms of its own."""
    pair.load(requests=8, at_once=8, low=300, high=2000, first_room=10, seed=99)
    abort, loads = abort_and_reuse(pair), {}
    for fault in (faults.FLIPPED, faults.SHORT, faults.LENGTH, faults.OVERWRITTEN):
        first = faults.BASE + 1000 * fault
        loads[str(fault)] = pair.load(
            requests=3, at_once=3, low=1200, high=3000, first_room=first, seed=10 + fault
        )
        loads[f"{fault} beside"] = pair.load(
            requests=8, at_once=8, low=300, high=3000, first_room=2000 + 100 * fault, seed=20 + fault
        )
    time.sleep(1)
    pair.trigger(faults.BASE)
    return {"loads": loads, "abort": abort}


def abort_and_reuse(pair: Pair) -> dict[str, Any]:
    """A request whose transfer is held back is given up; its pages go to others, and then its bytes arrive."""
    held = faults.BASE + 1000 * faults.HELD
    ports = {
        "prefill": pair.first_port, "decode": pair.first_port + 100, "bootstrap": pair.first_port + 50,
        "requests": 1, "at-once": 1, "low": 2900, "high": 3000, "first-room": held, "seed": 77,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "load.py")] + [f"--{k}={v}" for k, v in ports.items()]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    body = json.dumps({"rid": f"request-{held}"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{pair.first_port + 100}/abort_request", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            aborted = str(reply.status)
    except OSError as error:
        aborted = str(error)
    # The others have rooms that another worker sends. The first two waves use the free pages up, so that the last
    # one is given those that were given back.
    waves = [
        pair.load(
            requests=requests, at_once=12, low=2700, high=3000, out=out, stride=4, seed=30 + wave,
            first_room=3001 + 400 * wave,
        )
        for wave, (requests, out) in enumerate(((9, 4), (9, 4), (12, 420)))
    ]  # fmt: skip
    return {"aborted": aborted, "others": waves, "victim": victim.communicate(timeout=100)[0][-300:]}


def races(pair: Pair) -> dict[str, Any]:
    """Shared prefixes with the early send on: does the trace show pages that were sent before they were written?"""
    loads = []
    for number, groups in enumerate((4, 12)):
        found = pair.load(
            requests=80, at_once=48, low=2000, high=12000, groups=groups, seed=40 + number,
            first_room=1000 + 10_000 * number,
        )  # fmt: skip
        loads.append(found | {"groups": groups})
    pair.trigger(1000)
    return {"loads": loads}


def long(pair: Pair) -> dict[str, Any]:
    """Prompts of more than 8,192 tokens in one chunk: a prefill of one alone gathers its keys before it reads them."""
    loads = []
    # Every room is one of those whose prefill reads are recorded. One at a time is alone; of several, some are.
    for number, (requests, at_once) in enumerate(((8, 1), (16, 6))):
        found = pair.load(
            requests=requests, at_once=at_once, low=8300, high=12000, seed=60 + number, stride=8,
            first_room=8000 * (1 + number),
        )  # fmt: skip
        loads.append(found | {"at_once": at_once})
    pair.trigger(8000)
    return {"loads": loads}


def reads(folder: Path) -> dict[str, dict[str, int]]:
    """Role and kernel -> reads in the traces of a folder, those with logits, and most rows."""
    from replay.trace.reader import open_trace

    found: dict[str, dict[str, int]] = {}
    with open_trace(folder) as trace:
        table = trace.table("read")
        scored = table.bulk_size("logits")
        for n in range(len(table)):
            name = f"{trace.processes[int(table['process'][n])].role}: {table['kernel'][n]}"
            entry = found.setdefault(name, {"reads": 0, "with_logits": 0, "most_rows": 0})
            entry["reads"] += 1
            entry["with_logits"] += int(scored[n] > 0)
            entry["most_rows"] = max(entry["most_rows"], int(table["rows"][n]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rates", "faults", "races", "long"))
    parser.add_argument("--site", required=True, help="folder of SGLang 0.5.16 and what it imports")
    parser.add_argument("--nixl", required=True, help="folder of the nixl packages")
    parser.add_argument("--extra", default="", help="folders for kv-replay's own imports (zstandard, ...)")
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache", default=str(WORK / "cache"), help="compiled kernels")
    parser.add_argument("--graphs", action="store_true", help="decode with CUDA graphs")
    parser.add_argument("--alone", action="store_true", help="rates: only the pair with capture")
    parser.add_argument(
        "--cold", action="store_true", help="nothing is compiled yet: one pair after the other"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=220)
    parser.add_argument("--start", type=float, default=180.0, help="seconds a server may take to come up")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    if options.what == "rates":
        result = rates(options)
    elif options.what == "faults":
        seen = {"KV_REPLAY_MODE": "full", "KV_REPLAY_READ_EVERY": "16"}
        result = by_itself(options, "faults", faulty, 65_536, seen)
    else:
        result = by_itself(options, options.what, {"races": races, "long": long}[options.what])
    name = f"{options.what}{'-graphs' if options.graphs else ''}"
    (Path(options.out) / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({k: brief(v) if k == "verdict" else v for k, v in result.items()})[-9000:], flush=True)


if __name__ == "__main__":
    main()
