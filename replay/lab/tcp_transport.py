"""Pages over a plain loopback connection, for machines without NIXL. One-sided in the same way: the sender names the
addresses, its memory is read when the bytes go out, and the receiver's thread puts them where they belong.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import threading
from typing import Any

import numpy as np

from capture_hooks.events import U8
from replay.lab.barriers import Barriers
from replay.lab.transport import IDLE_NAP, Slice, Transfer, Transport, TransportError, Wire

_HEAD = struct.Struct("<QII")  # serial, descriptors, bytes each
_SERIAL = struct.Struct("<Q")
_MAX_DESCRIPTORS = 1 << 16


class TcpTransport(Transport):
    """One connection from the sender's process to the receiver's."""

    name = "tcp"

    def __init__(self, role: str, memory: U8, metadata: U8, wire: Wire, barriers: Barriers) -> None:
        super().__init__(role, memory, metadata, wire, barriers)
        self._regions = [(int(part.ctypes.data), part.reshape(-1)) for part in (memory, metadata)]
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._outbox: queue.SimpleQueue[tuple[int, Slice] | None] = queue.SimpleQueue()
        self._serial = 0
        self._done: set[int] = set()
        self._failed = ""

    def describe(self) -> dict[str, Any]:
        """Port, where each layer lies, and a token that only our sender knows."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
        return {
            "port": self._listener.getsockname()[1],
            "token": self._token.hex(),
            "addresses": [int(layer.ctypes.data) for layer in self.memory],
            "metadata": int(self.metadata.ctypes.data),
            "pages": int(self.memory.shape[1]),
        }

    def connect(self, peer: dict[str, Any]) -> None:
        """Connect, and start the threads that write and collect acknowledgements."""
        self._socket = socket.create_connection(("127.0.0.1", int(peer["port"])), timeout=20)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(bytes.fromhex(peer["token"]))
        for loop in (self._write_loop, self._acknowledge_loop):
            threading.Thread(target=loop, name=f"{self.role}-tcp", daemon=True).start()

    def begin(self, transfer: Transfer, part: Slice) -> int:
        """Queue one slice for the writing thread."""
        if self._failed:
            raise TransportError(self._failed)
        if transfer.outage:
            raise TransportError("the peer is not known at the moment")
        self._serial += 1
        self._outbox.put((self._serial, part))
        return self._serial

    def poll(self, handle: int) -> str:
        """Whether the receiver has acknowledged the slice."""
        if handle in self._done:
            return "done"
        return self._failed or "active"

    def release(self, handle: int) -> None:
        """Forget the slice."""
        self._done.discard(handle)

    def progress(self) -> None:
        """Receive slices until the sender is gone."""
        if self._socket is None:
            self._accept()
            return
        try:
            self._receive_one(self._socket)
        except (OSError, TransportError) as error:
            self._failed = str(error)
            self._stop.wait(IDLE_NAP)

    def close(self) -> None:
        """Close the connection and end the threads."""
        self._stop.set()
        self._outbox.put(None)
        for end in (self._socket, self._listener):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        super().close()

    def _view(self, address: int, length: int) -> memoryview:
        """The bytes at ``address``, which have to lie inside the registered memory."""
        for base, flat in self._regions:
            start = address - base
            if start >= 0 and start + length <= flat.nbytes:
                return flat[start : start + length].data
        raise TransportError(f"{length} bytes at {address:#x} are not registered memory")

    def _accept(self) -> None:
        assert self._listener is not None
        self._listener.settimeout(0.2)
        try:
            connection, _ = self._listener.accept()
        except (TimeoutError, OSError):
            return
        connection.settimeout(None)
        try:
            if not secrets.compare_digest(_read(connection, len(self._token)), self._token):
                connection.close()
                return
        except TransportError:
            connection.close()
            return
        self._socket = connection

    def _receive_one(self, connection: socket.socket) -> None:
        serial, count, length = _HEAD.unpack(_read(connection, _HEAD.size))
        if count > _MAX_DESCRIPTORS or length > self.memory.nbytes:
            raise TransportError("sender announces an impossible slice")
        addresses = np.frombuffer(_read(connection, count * 8), "<u8")
        views = [self._view(int(address), length) for address in addresses]
        for view in views:
            _read_into(connection, view)
        connection.sendall(_SERIAL.pack(serial))

    def _write_loop(self) -> None:
        assert self._socket is not None
        try:
            while (item := self._outbox.get()) is not None:
                serial, part = item
                head = _HEAD.pack(serial, len(part.destination), part.length)
                self._socket.sendall(head + part.destination.astype("<u8").tobytes())
                for address in part.source.tolist():
                    self._socket.sendall(self._view(address, part.length))
        except (OSError, TransportError) as error:
            self._failed = self._failed or str(error)

    def _acknowledge_loop(self) -> None:
        assert self._socket is not None
        try:
            while True:
                (serial,) = _SERIAL.unpack(_read(self._socket, _SERIAL.size))
                self._done.add(serial)
        except (OSError, TransportError) as error:
            self._failed = self._failed or str(error)


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    _read_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            raise TransportError("the peer closed the data connection")
        view = view[count:]
