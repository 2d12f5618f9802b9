"""What both child processes do: take rounds from the runner, build the engine, run it, tear it down.

The runner starts it as ``python -m replay.lab.process ROLE``. The runner's port and token come over standard input,
everything else over the control connection. When standard input closes the runner is gone, and the process ends at
once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from replay.lab import kernels, nixl_transport
from replay.lab.config import LabConfig
from replay.lab.control import Channel, Listener, Message

SWITCH = "KV_REPLAY_CAPTURE"
#: On this signal a process writes the stacks of all its threads to standard error.
DUMP = signal.SIGUSR1


class _StoppedError(Exception):
    """The runner wants the process to end in the middle of a round."""


def run(role: str) -> int:
    """Serve the runner until it says stop."""
    faulthandler.register(DUMP, all_threads=True)
    start = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch, name="runner-watch", daemon=True).start()
    kernels.prepare()
    nixl_transport.prepare()
    router = Channel.connect(start["port"], start["token"])
    router.send("here", role=role)
    while (message := router.receive()) is not None:
        if message["kind"] == "stop":
            return 0
        if message["kind"] == "round":
            try:
                _round(role, router, message, start["token"])
            except _StoppedError:
                # The engine's threads may hang in a library whose peer is gone. The journal is closed by now.
                os._exit(0)
            except Exception as error:
                router.send("error", error=f"{type(error).__name__}: {error}")
                raise
    return 0


def _watch() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def _round(role: str, router: Channel, message: Message, token: str) -> None:
    environ: Mapping[str, str] = os.environ if message["environ"] is None else message["environ"]
    config = LabConfig.from_json(message["config"])
    if not environ.get(SWITCH):
        _play(role, router, config, message["transport"], token)
        return
    from replay.lab import capture

    attached = capture.attach(role, message["transport"], environ)
    try:
        _play(role, router, config, message["transport"], token)
    finally:
        if attached is not None:
            attached.detach(keep=bool(message["keep"]))
        with contextlib.suppress(OSError):
            router.send("captured")


def _play(role: str, router: Channel, config: LabConfig, transport: str, token: str) -> None:
    if role == "prefill":
        _prefill(router, config, transport, token)
    else:
        _decode(router, config, transport, token)


def _prefill(router: Channel, config: LabConfig, transport: str, token: str) -> None:
    from replay.lab.prefill import PrefillEngine
    from replay.lab.prompts import Sequence

    engine = PrefillEngine(config, transport, router)
    listener = Listener(token)
    router.send("listening", port=listener.port)
    peer = listener.accept()
    listener.close()
    engine.connect(peer)
    router.send("ready")
    while (message := _next(router))["kind"] != "finish":
        if message["kind"] == "submit":
            job = message["job"]
            more = {name: job[name] for name in ("prefix_of", "prefix_pages", "outage")}
            engine.submit(Sequence(job["room"], 0, job["tokens"], **more))
    _finished(router, engine.finish())
    peer.close()


def _decode(router: Channel, config: LabConfig, transport: str, token: str) -> None:
    from replay.lab.decode import DecodeEngine
    from replay.lab.replies import Sequence

    engine = DecodeEngine(config, transport, router)
    peer = Channel.connect(router.expect("connect")["port"], token)
    engine.connect(peer)
    router.send("ready")
    while (message := _next(router))["kind"] != "finish":
        if message["kind"] == "submit":
            job = message["job"]
            more = {name: job[name] for name in ("new_tokens", "prefix_of", "prefix_pages")}
            engine.submit(Sequence(job["room"], 0, job["tokens"], **more))
        elif message["kind"] == "cancel":
            engine.cancel(message["room"], message["attempt"])
    _finished(router, engine.finish())
    router.expect("close")
    engine.close()
    peer.close()


def _next(router: Channel) -> Message:
    message = router.receive()
    if message is None or message["kind"] == "stop":
        raise _StoppedError
    return message


def _finished(router: Channel, stats: dict[str, Any]) -> None:
    router.send("finished", stats=stats)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1]))
