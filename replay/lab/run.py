"""Run a prefill/decode pair: start the two processes, be their clients, collect what happened.

One :class:`Pair` can run many rounds; each has its own configuration and, if wished, its own capture folder.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from replay.lab import audit, barriers, transports
from replay.lab.config import Job, LabConfig
from replay.lab.control import Channel, Listener, Message

ROLES = ("prefill", "decode")
_LAST_LINES = 15
_MOST_LINES = 200
#: Seconds within which a process that is alive begins to tell its stacks, on a busy machine too.
_STACKS_S = 20.0


class LabError(Exception):
    """The pair could not run to its end; the message has the last lines that the process wrote."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one round left behind.

    ``outcomes`` maps each room to "finish", "abort" or "fail". ``stats`` has the seconds of the round, both engines'
    counters, and the barriers whose flag never came (``timeouts``).
    """

    config: LabConfig
    folder: Path | None
    outcomes: dict[int, str]
    truth: audit.Truth | None
    stats: dict[str, Any]
    died: str = ""  #: the role that was killed during the round


@dataclass(eq=False)
class _Child:
    role: str
    process: subprocess.Popen[bytes]
    errors: Path
    channel: Channel | None = None


@dataclass
class Pair:
    """Two processes. Use as a context manager; leaving it ends both.

    Args:
        environ: variables for both processes besides the current ones (``KV_REPLAY_CAPTURE`` among them).
        transport: "auto", "nixl" or "tcp".
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    transport: str = "auto"
    note: str = ""

    def __post_init__(self) -> None:
        """Choose the transport; nothing is started yet."""
        self.transport, self.note = transports.choose(self.transport)
        self._children: dict[str, _Child] = {}
        self._events: queue.Queue[tuple[str, Message]] = queue.Queue()
        self._scratch = tempfile.TemporaryDirectory(prefix="kv-replay-lab-")
        self._rounds = 0
        self._broken = False

    def __enter__(self) -> Pair:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=kind is None)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both processes and wait until they have called back."""
        token = secrets.token_hex(16)
        listener = Listener(token)
        try:
            for role in ROLES:
                self._spawn(role, listener.port, token)
            for _ in ROLES:
                channel = self._called_back(listener)
                role = channel.expect("here")["role"]
                self._children[role].channel = channel
                self._listen(role, channel)
        finally:
            listener.close()

    def _spawn(self, role: str, port: int, token: str) -> None:
        errors = Path(self._scratch.name) / f"{role}.stderr"
        environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **self.environ}
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "replay.lab.process", role],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                env=environ,
                start_new_session=True,  # Ctrl-C is for the runner, which ends its children itself
            )
        self._children[role] = _Child(role, process, errors)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"port": port, "token": token}).encode() + b"\n")
        process.stdin.flush()

    def _called_back(self, listener: Listener) -> Channel:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return listener.accept(timeout=0.5)
            for child in self._children.values():
                if child.process.poll() is not None:
                    raise LabError(self._report(child.role))
        raise LabError("the lab's processes did not call back within 120 s")

    def _listen(self, role: str, channel: Channel) -> None:
        events = self._events  # of these processes: those after them get another queue

        def loop() -> None:
            while (message := channel.receive()) is not None:
                events.put((role, message))
            events.put((role, {"kind": "gone"}))

        threading.Thread(target=loop, name=f"runner-{role}", daemon=True).start()

    def stacks(self) -> str:
        """What every thread of both processes is doing, for a round that does not end."""
        asked = [child for child in self._children.values() if child.process.poll() is None]
        before = {child.role: child.errors.stat().st_size for child in asked}
        for child in asked:
            child.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _STACKS_S
        while time.monotonic() < end and any(c.errors.stat().st_size == before[c.role] for c in asked):
            time.sleep(0.02)
        time.sleep(1.0)  # for the rest of what they have begun to write
        told = []
        for child in self._children.values():
            lines = child.errors.read_text(errors="replace").splitlines()
            code = child.process.poll()
            state = "alive" if code is None else f"ended with code {code}"
            told += [f"--- {child.role}, {state} ---", *lines[-_MOST_LINES:]]
        return "\n".join(told)

    def _report(self, role: str) -> str:
        child = self._children[role]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=2)
        lines = child.errors.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        code = child.process.returncode
        return "\n".join([f"the {role} process ended unexpectedly (exit code {code})", *lines])

    def kill(self, role: str) -> None:
        """SIGKILL one process."""
        self._children[role].process.send_signal(signal.SIGKILL)

    def close(self, graceful: bool = True) -> None:
        """End both processes."""
        self._end(graceful)
        self._scratch.cleanup()

    def _end(self, graceful: bool) -> None:
        for child in self._children.values():
            if graceful and child.channel is not None:
                with contextlib.suppress(OSError):
                    child.channel.send("stop")
        for child in self._children.values():
            try:
                child.process.wait(timeout=20 if graceful else 0.1)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.channel is not None:
                child.channel.close()
            if child.process.stdin is not None:
                child.process.stdin.close()
        self._children.clear()

    # -- one round -----------------------------------------------------------------------------------------------

    def run(
        self,
        config: LabConfig,
        capture: Path | None = None,
        options: Mapping[str, str] | None = None,
        *,
        truth: bool = True,
        keep: bool = True,
        kill: tuple[str, float] | None = None,
    ) -> RunResult:
        """Run one round.

        Args:
            config: what to run.
            capture: capture into this folder in this round; ``None`` leaves it to the processes' environment.
            options: further ``KV_REPLAY_*`` values for this round.
            truth: keep the lab's own record and compare it.
            keep: have the ring of page bytes written out at the end of the round.
            kill: (role, seconds after the first request) to SIGKILL a process.

        A round after one that failed, or in which a process was killed, starts new processes.

        Raises:
            LabError: a process failed or the round did not end in time.
        """
        if self._broken:
            # The processes are still in the round that failed: they would take this one's messages for its own.
            self._end(graceful=False)
            self._events = queue.Queue()
            self.start()
            self._broken = False
        self._rounds += 1
        self._broken = True
        result = self._round(config, capture, options, truth, keep, kill)
        self._broken = bool(result.died)
        return result

    def _round(
        self,
        config: LabConfig,
        capture: Path | None,
        options: Mapping[str, str] | None,
        truth: bool,
        keep: bool,
        kill: tuple[str, float] | None,
    ) -> RunResult:
        folder = Path(self._scratch.name) / f"round-{self._rounds}"
        folder.mkdir()
        if truth and not config.audit:
            config = replace(config, audit=str(folder / "audit"))
        environ = None
        if capture is not None:
            environ = {"KV_REPLAY_CAPTURE": str(capture), **(options or {})}
        started = time.monotonic()
        for role in ROLES:
            self._send(
                role,
                "round",
                config=config.to_json(),
                environ=environ,
                transport=self.transport,
                keep=keep,
            )
        port = self._await("prefill", "listening")["port"]
        self._send("decode", "connect", port=port)
        for role in ROLES:
            self._await(role, "ready")
        ready = time.monotonic()
        clients = _Clients(self, config, kill)
        died = clients.serve()
        served = time.monotonic()
        stats: dict[str, Any] = {"seconds": served - ready, "setup_seconds": ready - started}
        if not died:
            for role in ("decode", "prefill"):
                self._send(role, "finish")
                stats[role] = self._await(role, "finished", config.timeout_s + 30)["stats"]
                if stats[role]["error"] or stats[role]["left"]:
                    raise LabError(f"the {role} engine failed: {stats[role]}")
            self._send("decode", "close")
            if capture is not None or self.environ.get("KV_REPLAY_CAPTURE"):
                for role in ROLES:
                    stats[f"{role}_capture"] = self._await(role, "captured")
        stats["timeouts"] = barriers.timeouts(Path(config.flags)) if config.flags else []
        found = audit.load(Path(config.audit)) if config.audit and not died else None
        return RunResult(config, capture, clients.outcomes, found, stats, died)

    def _send(self, role: str, kind: str, **body: Any) -> None:
        channel = self._children[role].channel
        assert channel is not None
        try:
            channel.send(kind, **body)
        except OSError:
            raise LabError(self._report(role)) from None

    def _await(self, role: str, kind: str, timeout: float = 60.0) -> Message:
        """The next ``kind`` message of ``role``; other messages of the round are late and dropped."""
        end = time.monotonic() + timeout
        held = []
        try:
            while True:
                who, message = self._next(end - time.monotonic(), f"{role} to say {kind!r}")
                if who == role and message["kind"] == kind:
                    return message
                held.append((who, message))
        finally:
            for item in held:
                self._events.put(item)

    def _next(self, timeout: float, purpose: str) -> tuple[str, Message]:
        try:
            who, message = self._events.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            raise LabError(f"waited in vain for {purpose}\n{self.stacks()}") from None
        if message["kind"] == "gone":
            raise LabError(self._report(who))
        if message["kind"] == "error":
            raise LabError(f"{who}: {message['error']}")
        return who, message


class _Clients:
    """The clients of one round: they ask, wait, and sometimes go away."""

    def __init__(self, pair: Pair, config: LabConfig, kill: tuple[str, float] | None) -> None:
        self._pair = pair
        self._config = config
        self._kill = kill
        self._flags = barriers.Barriers(config.flags)
        self._todo = list(reversed(config.clients()))
        self._active: dict[int, Job] = {}
        self._leaving: list[tuple[float, int]] = []
        self.outcomes: dict[int, str] = {}

    def serve(self) -> str:
        """Run all jobs; returns the role that was killed, if one was."""
        start = time.monotonic()
        end = start + self._config.timeout_s
        while self._todo or self._active:
            now = time.monotonic()
            if now > end:
                raise LabError(
                    f"rooms {sorted(self._active)} did not end within {self._config.timeout_s:g} s\n"
                    f"{self._pair.stacks()}"
                )
            if self._kill is not None and now - start >= self._kill[1]:
                self._pair.kill(self._kill[0])
                return self._kill[0]
            self._ask()
            self._go_away(now)
            self._hear(self._pause(now, start))
        return ""

    def _ask(self) -> None:
        while self._todo and len(self._active) < self._config.concurrency:
            job = self._todo[-1]
            if job.after and not self._flags.up(job.after):
                return
            self._todo.pop()
            self._active[job.room] = job
            for role in ROLES:
                self._pair._send(role, "submit", job=asdict(job))
            if job.patience_ms is not None:
                heapq.heappush(self._leaving, (time.monotonic() + job.patience_ms / 1000, job.room))

    def _go_away(self, now: float) -> None:
        while self._leaving and self._leaving[0][0] <= now:
            _, room = heapq.heappop(self._leaving)
            if room in self._active:
                self._pair._send("decode", "cancel", room=room, attempt=0)
        for room, job in list(self._active.items()):
            if job.abort_when and self._flags.up(job.abort_when):
                self._active[room] = replace(job, abort_when="")
                self._pair._send("decode", "cancel", room=room, attempt=0)

    def _pause(self, now: float, start: float) -> float:
        pause = 0.002 if self._config.flags else 0.2
        if self._leaving:
            pause = min(pause, self._leaving[0][0] - now)
        if self._kill is not None:
            pause = min(pause, start + self._kill[1] - now)
        return max(pause, 0.0005)

    def _hear(self, timeout: float) -> None:
        try:
            who, message = self._pair._events.get(timeout=timeout)
        except queue.Empty:
            return
        if message["kind"] == "gone":
            raise LabError(self._pair._report(who))
        if message["kind"] == "error":
            raise LabError(f"{who}: {message['error']}")
        if message["kind"] == "done":
            self._active.pop(message["room"], None)
            self.outcomes[message["room"]] = message["outcome"]


def run_pair(
    config: LabConfig, capture: Path | None = None, options: Mapping[str, str] | None = None
) -> RunResult:
    """Start a pair, run one round, end it. With ``capture`` the variables are set for the whole processes."""
    environ = dict(options or {})
    if capture is not None:
        environ["KV_REPLAY_CAPTURE"] = str(capture)
    with Pair(environ, config.transport) as pair:
        result = pair.run(config)
    return replace(result, folder=capture)
