"""Control connections on loopback: JSON messages with a length in front."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct("<I")
#: No message of the lab comes near this; a longer one means that something else is talking to us.
MAX_MESSAGE = 4 << 20

Message = dict[str, Any]


class ControlError(Exception):
    """The peer sent something that is not a message."""


class Channel:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, port: int, token: str, timeout: float = 20.0) -> Channel:
        """Connect to ``port`` on loopback and show ``token``."""
        connection = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        connection.settimeout(None)
        channel = cls(connection)
        channel.send("join", token=token)
        return channel

    def send(self, kind: str, **body: Any) -> None:
        """Send one message; ``OSError`` where the peer is gone."""
        data = json.dumps({"kind": kind, **body}, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE:
            raise ControlError(f"message {kind!r} of {len(data)} bytes is too long")
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(data)) + data)

    def receive(self) -> Message | None:
        """The next message, or ``None`` once the peer has closed."""
        try:
            head = self._reader.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            (length,) = _HEAD.unpack(head)
            if length > MAX_MESSAGE:
                raise ControlError(f"peer announces a message of {length} bytes")
            data = self._reader.read(length)
        except (OSError, ValueError):
            return None
        if len(data) < length:
            return None
        message = json.loads(data)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ControlError("message without a kind")
        return message

    def expect(self, kind: str) -> Message:
        """The next message, which has to be ``kind``."""
        message = self.receive()
        if message is None:
            raise ControlError(f"connection closed while waiting for {kind!r}")
        if message["kind"] != kind:
            raise ControlError(f"expected {kind!r}, got {message['kind']!r}: {message.get('error', '')}")
        return message

    def serve(
        self, handler: Callable[[Message], None], name: str, on_error: Callable[[BaseException], None]
    ) -> threading.Thread:
        """Hand every message to ``handler`` on a thread of its own, until the peer closes.

        ``on_error`` is told what ends the thread before that: messages that nobody reads would be waited for in vain.
        """

        def loop() -> None:
            try:
                while (message := self.receive()) is not None:
                    handler(message)
            except Exception as error:
                on_error(error)

        thread = threading.Thread(target=loop, name=name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close; a thread in :meth:`receive` gets ``None``."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """A listening socket on loopback with a port of the system's choice; callers have to show ``token``."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout: float = 60.0) -> Channel:
        """The next connection; ``TimeoutError`` where none comes."""
        self._socket.settimeout(timeout)
        while True:
            connection, _ = self._socket.accept()
            connection.settimeout(timeout)
            channel = Channel(connection)
            with contextlib.suppress(ControlError, ValueError):
                token = str(channel.expect("join").get("token"))
                if hmac.compare_digest(token.encode(), self._token.encode()):
                    connection.settimeout(None)
                    return channel
            channel.close()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
