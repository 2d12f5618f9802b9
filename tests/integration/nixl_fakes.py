"""A stand-in for NIXL's agent, a recording of it, and real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture_hooks.adapters import nixl
from capture_hooks.events import Hook, Process
from capture_hooks.journal import JournalReader
from capture_hooks.options import Options
from capture_hooks.recorder import Recorder


class Handle:
    """Handles of the library carry a number."""

    def __init__(self, number: int) -> None:
        self._handle = number


class DescList:
    """What ``get_xfer_descs`` returns: countable and indexable, nothing more."""

    def __init__(self, rows: list[tuple[int, int, int]]) -> None:
        self._rows = rows

    def descCount(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return self._rows[index]

    def __getstate__(self) -> bytes:
        return b"head|" + np.array(self._rows, "<u8").tobytes() + b"|"


class Agent:
    """A stand-in with the methods of ``nixl_agent``; ``answers`` are the states that transfers will have, or the names
    of what is raised instead, as the library names them ("RAISE": some other exception).
    """

    def __init__(self, name: str = "left") -> None:
        self.name = name
        self.answers: list[str] = []
        self.notifs: dict[str, list[bytes]] = {}
        self.arrived: dict[str, list[bytes]] = {}
        self.calls: list[str] = []
        self._handles = 100

    def _handle(self) -> Handle:
        self._handles += 1
        return Handle(self._handles)

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Any = ()) -> DescList:
        return DescList([row[:3] for row in reg_list])

    def _answer(self, why: str) -> str:
        answer = self.answers.pop(0) if self.answers else "PROC"
        if answer == "RAISE":
            raise RuntimeError(why)
        if answer.startswith("nixl"):
            raise type(answer, (Exception,), {})(why)
        return answer

    def _refuses(self) -> bool:
        """Whether a handle is refused, which the library tells by raising."""
        answer = self.answers.pop(0) if self.answers else ""
        if answer == "RAISE":
            raise RuntimeError("no backend for these descriptors")
        return answer == "NONE"

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: str = "DRAM") -> Handle:
        return self._handle()

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes = b""
    ) -> Handle | None:
        return None if self._refuses() else self._handle()

    def make_prepped_xfer(
        self, operation: str, local: Any, local_indices: Any, remote: Any, remote_indices: Any,
        notif_msg: bytes = b"",
    ) -> Handle | None:  # fmt: skip
        return None if self._refuses() else self._handle()

    def transfer(self, handle: Handle, notif_msg: bytes = b"") -> str:
        self.calls.append("transfer")
        return self._answer("the backend is gone")

    def check_xfer_state(self, handle: Handle) -> str:
        return self._answer("the peer is gone")

    def release_xfer_handle(self, handle: Handle) -> None:
        self.calls.append("release")
        self._answer("it is still on its way")

    def release_dlist_handle(self, handle: Handle) -> None:
        self.calls.append("unlist")

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self.calls.append("notif")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.arrived = self.arrived, {}
        return found

    def update_notifs(self) -> dict[str, list[bytes]]:
        for sender, messages in self.get_arrived().items():
            self.notifs.setdefault(sender, []).extend(messages)
        return self.notifs

    def get_arrived(self) -> dict[str, list[bytes]]:
        found, self.arrived = self.arrived, {}
        return found

    def check_remote_xfer_done(self, remote_agent_name: str, lookup_tag: bytes) -> bool:
        for sender, messages in self.get_arrived().items():
            self.notifs.setdefault(sender, []).extend(messages)
        held = self.notifs.get(remote_agent_name, [])
        for message in held:
            if message.startswith(lookup_tag):
                held.remove(message)
                return True
        return False

    def prep_mem_view(self, dlist: Any) -> int:
        return 1


class Recording:
    """A recorder with the adapter on a class of its own, and what it wrote."""

    def __init__(self, folder: Path, agent_class: type[Any], **options: Any) -> None:
        self.recorder = Recorder(Options(capture=folder, seal=False, **options), Process("prefill"))
        self.adapter = nixl.NixlAdapter(self.recorder, agent_class).install()
        self.over: list[
            str
        ] = []  #: states of the transfers that were over, as they were told to engines' hooks
        self.adapter.after_state.append(lambda post: self.over.append(post.state))

    def events(self) -> list[Any]:
        """End the recording and read it."""
        self.adapter.uninstall()
        self.recorder.close()
        return [event for _, event in JournalReader(self.recorder.path)]


def kinds(events: list[Any], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def hooks(events: list[Any]) -> dict[str, Hook]:
    return {event.name: event for event in kinds(events, Hook)}


def real_agents() -> tuple[Any, Any]:
    """Two agents in this process, over TCP on the loopback; neither makes progress by itself."""
    for name, value in {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    api = pytest.importorskip("nixl._api")
    config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
    return api.nixl_agent("left-test", config), api.nixl_agent("right-test", config)
