"""Pages over NIXL and UCX.

Both sides run without NIXL's progress thread, which spins on a core of its own: the sender makes progress when
it polls its posts, the receiver when it asks for notifications.
"""

from __future__ import annotations

import base64
import os
import secrets
from typing import Any

import numpy as np

from capture_hooks.events import U8
from replay.lab.barriers import Barriers
from replay.lab.transport import Slice, Transfer, Transport, TransportError, Wire

#: UCX on loopback only. Its default on one host would be a copy by the sender's own thread (process_vm_writev),
#: which is over when the post returns; TCP is asynchronous, as the network between two hosts is.
UCX_ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}


def prepare() -> None:
    """Set what UCX and NIXL read from the environment when they are loaded."""
    for name, value in UCX_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


class NixlTransport(Transport):
    """One NIXL agent with the pool registered as host memory."""

    name = "nixl/UCX"

    def __init__(self, role: str, memory: U8, metadata: U8, wire: Wire, barriers: Barriers) -> None:
        super().__init__(role, memory, metadata, wire, barriers)
        prepare()
        from nixl._api import nixl_agent, nixl_agent_config

        # The name is random: it must be unique, and nothing of the machine goes into it.
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl_agent(f"{role}-{secrets.token_hex(4)}", config)
        if "UCX" not in self._agent.backends:
            raise TransportError("NIXL has no UCX backend here")
        regions = [(int(part.ctypes.data), int(part.nbytes), 0, "") for part in (*memory, metadata)]
        self._registered = self._agent.register_memory(regions, "DRAM")
        self._peer = ""
        self._peer_data = b""

    def describe(self) -> dict[str, Any]:
        """The agent's metadata, and where each layer lies."""
        return {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "addresses": [int(layer.ctypes.data) for layer in self.memory],
            "metadata": int(self.metadata.ctypes.data),
            "pages": int(self.memory.shape[1]),
        }

    def connect(self, peer: dict[str, Any]) -> None:
        """Load the receiver's metadata."""
        self._peer_data = base64.b64decode(peer["agent"])
        name = self._agent.add_remote_agent(self._peer_data)
        self._peer = name if isinstance(name, str) else name.decode()

    def begin(self, transfer: Transfer, part: Slice) -> Any:
        """Post one WRITE."""
        source = self._agent.get_xfer_descs(_descriptors(part.source, part.length), "DRAM")
        destination = self._agent.get_xfer_descs(_descriptors(part.destination, part.length), "DRAM")
        handle = self._agent.initialize_xfer("WRITE", source, destination, self._peer)
        if transfer.outage:
            self._agent.remove_remote_agent(self._peer)
        try:
            if self._agent.transfer(handle) == "ERR":
                raise TransportError("NIXL refused the post")
        except Exception:
            self._agent.release_xfer_handle(handle)
            raise
        finally:
            if transfer.outage:
                self._agent.add_remote_agent(self._peer_data)
        return handle

    def poll(self, handle: Any) -> str:
        """State of a post; this is also where the sender's side makes progress."""
        state = self._agent.check_xfer_state(handle)
        return {"PROC": "active", "DONE": "done"}.get(state, "NIXL reports an error")

    def release(self, handle: Any) -> None:
        """Free the handle."""
        self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Asking for notifications makes progress; the lab sends none."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """End the thread, then deregister."""
        super().close()
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)


def _descriptors(addresses: Any, length: int) -> Any:
    """``uint64[n, 3]``: address, length, device."""
    table = np.zeros((len(addresses), 3), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = length
    return table
