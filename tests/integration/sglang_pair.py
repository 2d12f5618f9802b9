"""The tests' side of ``sglang_host``: where SGLang is, one host for many pairs, and pairs as two
objects with methods.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
HOST = Path(__file__).with_name("sglang_host.py")

#: Where ``make`` puts SGLang: one folder a version and one with what it imports.
ENVIRONMENT = Path(os.environ.get("SGLANG_TEST_ENVIRONMENT", ROOT / ".venv" / "sglang"))


def python_path(version: str) -> str:
    """``PYTHONPATH`` for a process that imports this version."""
    return os.pathsep.join(str(path) for path in (ROOT, ENVIRONMENT / version, ENVIRONMENT / "deps"))


def why_not(version: str) -> str:
    """Why tests with this version cannot run; "" if they can."""
    if not (ENVIRONMENT / version / "sglang").is_dir():
        return (
            f"SGLang {version} is not in {ENVIRONMENT} (make test puts it there where it can be downloaded)"
        )
    return ""


def environment(version: str, **more: str) -> dict[str, str]:
    """Environment of a process that imports this version."""
    return (
        os.environ
        | {"PYTHONPATH": python_path(version), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        | more
    )


class Remote:
    """One endpoint: its commands are methods."""

    def __init__(self, role: str, link: Connection, log: Path) -> None:
        self.role, self._link, self.log = role, link, log

    def _answer(self, seconds: float) -> Any:
        if not self._link.poll(seconds):
            raise TimeoutError(f"{self.role} does not answer; its log: {self.log.read_text()[-2000:]}")
        kind, value = self._link.recv()
        if kind != "ok":
            raise RuntimeError(f"{self.role}: {value}\n{self.log.read_text()[-2000:]}")
        return value

    def __getattr__(self, name: str) -> Any:
        def call(seconds: float = 60.0, **keywords: Any) -> Any:
            self._link.send((name, keywords))
            return self._answer(seconds)

        return call


class Pair:
    """A prefill and a decode endpoint that are there, ready to be told what to do."""

    def __init__(self, host: Host, folder: Path, environ: dict[str, str], **options: Any) -> None:
        both = {k: v for k, v in options.items() if not k.startswith(("prefill_", "decode_"))}
        own = {
            role: {k.removeprefix(f"{role}_"): v for k, v in options.items() if k.startswith(f"{role}_")}
            for role in ("prefill", "decode")
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        defaults = {"prefill": {"pages": 24}, "decode": {"pages": 40}}
        ends = {
            role: host.fork(
                role, {"port": port} | defaults[role] | both | own[role], environ, folder / f"{role}.log"
            )
            for role in ("prefill", "decode")
        }
        self.prefill, self.decode = ends["prefill"], ends["decode"]
        for end in ends.values():
            end._answer(120)

    def transfer(
        self, room: int, source: list[int], destination: list[int], tokens: int, *cuts: int
    ) -> tuple[int, int]:
        """One request from begin to success, in chunks that end at pages ``cuts``; the statuses of both sides."""
        self.decode.receive(room=room, pages=destination)
        assert self.prefill.open(room=room, pages=len(source)) == 2
        begin = 0
        for cut in (*cuts, len(source)):
            last = cut == len(source)
            self.prefill.send(
                room=room, pages=source[begin:cut], tokens=(tokens if last else cut * 256) - begin * 256
            )
            begin = cut
        return self.prefill.wait(room=room), self.decode.wait(room=room)

    def looked(self) -> None:
        """Wait until the later looks at what has arrived, or was written, have been taken."""
        assert self.prefill.looked()
        assert self.decode.looked()

    def clear(self, room: int) -> None:
        """Both sides are done with the room."""
        self.prefill.clear(room=room)
        self.decode.clear(room=room)

    def close(self) -> None:
        """End both processes in an orderly way."""
        for end in (self.decode, self.prefill):
            with contextlib.suppress(Exception):
                end.exit(seconds=30)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Host:
    """The process that has SGLang imported."""

    def __init__(self, version: str = "0.5.23") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvr")
        self._count = 0
        path = Path(self._folder.name)
        self.log = path / "host.log"
        with Listener(str(path / "host")) as listener, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HOST), str(path / "host")],
                env=environment(version),
                stdout=log,
                stderr=log,
            )
            self._link = self._accept(listener, 120)
        if not self._link.poll(240):
            self._process.kill()
            raise TimeoutError(f"SGLang is not imported after 240 s: {self.log.read_text()[-3000:]}")
        try:
            self.threads = self._link.recv()[1]
        except EOFError:
            raise RuntimeError(f"SGLang cannot be imported: {self.log.read_text()[-3000:]}") from None

    @staticmethod
    def _accept(listener: Listener, seconds: float) -> Connection:
        listener._listener._socket.settimeout(seconds)  # type: ignore[attr-defined]
        return listener.accept()

    def fork(self, role: str, options: dict[str, Any], environ: dict[str, str], log: Path) -> Remote:
        """A new endpoint; it has not answered yet."""
        self._count += 1
        address = str(Path(self._folder.name) / f"e{self._count}")
        with Listener(address) as listener:
            self._link.send(("fork", role, options, environ, str(log), address))
            link = self._accept(listener, 60)
        assert self._link.recv()[0] == "forked"
        return Remote(role, link, log)

    def pair(self, folder: Path, environ: dict[str, str] | None = None, **options: Any) -> Pair:
        """A pair that captures into ``folder/capture``."""
        capture = {
            "KV_REPLAY_CAPTURE": str(folder / "capture"),
            "KV_REPLAY_SEAL": "0",
            "KV_REPLAY_MODE": "full",
        }
        return Pair(self, folder, capture | (environ or {}), **options)

    def close(self) -> None:
        """End the process; endpoints that still run end with their links."""
        self._link.close()
        end = time.monotonic() + 5
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
