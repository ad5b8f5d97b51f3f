"""Who belongs to a job: those that know its secret, which they prove without saying it (HMAC-SHA256)."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from typing import Any

NONCE = 16
"""Bytes that are asked for anew each time, so that what was said once proves nothing later."""
TAG = 32
MOST_BYTES = 1 << 16
"""Of a message."""
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16


def new_secret() -> str:
    """A job's secret, in hexadecimal digits."""
    return secrets.token_hex(32)


def sign(secret: bytes, *parts: bytes) -> bytes:
    """The tag of `TAG` bytes that only who knows the secret can make of these parts, in this order."""
    mac = hmac.new(secret, digestmod="sha256")
    for part in parts:
        mac.update(_LENGTH.pack(len(part)) + part)
    return mac.digest()


def is_signed(tag: bytes, secret: bytes, *parts: bytes) -> bool:
    """Whether `tag` is that of the parts; takes equally long for every wrong one."""
    return hmac.compare_digest(tag, sign(secret, *parts))


class SignedMessages:
    """JSON messages over a connected socket that waits for nobody.

    Each is signed with the job's secret, who says it and how many it said before. So one that is made up, changed, left
    out or said again ends the connection, as does one that is too long or is not taken at once.
    """

    def __init__(self, connection: socket.socket, secret: bytes, own: str, other: str) -> None:
        """Takes the connection over.

        Args:
            connection: To `other`.
            secret: The job's.
            own: Who speaks here; not who speaks there.
            other: Who speaks there.
        """
        self.connection = connection
        self._secret, self._own, self._other = secret, own.encode(), other.encode()
        self._sent = self._received = 0
        self._arrived = bytearray()
        # What one thread says must not end up inside of what another does.
        self._sending = threading.Lock()
        connection.setblocking(False)

    def send(self, value: Any) -> None:
        """Says something.

        Raises:
            ConnectionError: The other one is gone, or takes nothing; or it is too long.
        """
        body = json.dumps(value).encode()
        if len(body) > MOST_BYTES:
            raise ConnectionError(f"a message of {len(body)} bytes; at most {MOST_BYTES}")
        with self._sending:
            number = _LENGTH.pack(self._sent)
            frame = _LENGTH.pack(len(body)) + sign(self._secret, self._own, number, body) + body
            self._sent += 1
            try:
                complete = self.connection.send(frame) == len(frame)
            except OSError as error:
                raise ConnectionError(f"{self._other.decode()} takes no message") from error
            if not complete:
                raise ConnectionError(f"{self._other.decode()} takes no message")

    def receive(self) -> list[Any]:
        """What has arrived; nothing while no message is complete.

        Raises:
            ConnectionError: The other one is gone, or what came is not its next message.
        """
        try:
            piece = self.connection.recv(_PIECE)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionError(f"{self._other.decode()} is gone")
        self._arrived += piece
        values = []
        while len(self._arrived) >= _LENGTH.size + TAG:
            (size,) = _LENGTH.unpack_from(self._arrived)
            if size > MOST_BYTES:
                raise ConnectionError(f"a message of {size} bytes; at most {MOST_BYTES}")
            start = _LENGTH.size + TAG
            if len(self._arrived) < start + size:
                break
            tag, body = bytes(self._arrived[_LENGTH.size : start]), bytes(self._arrived[start : start + size])
            del self._arrived[: start + size]
            if not is_signed(tag, self._secret, self._other, _LENGTH.pack(self._received), body):
                raise ConnectionError(f"a message that {self._other.decode()} did not sign")
            self._received += 1
            values.append(json.loads(body))
        return values

    def interrupt(self) -> None:
        """Ends the connection, which wakes a thread that waits at it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the socket."""
        self.interrupt()
        self.connection.close()


def receive_exactly(connection: socket.socket, size: int, seconds: float) -> bytes:
    """So many bytes, within so many seconds however they trickle in.

    Raises:
        OSError: They did not come.
    """
    deadline, found = time.monotonic() + seconds, b""
    while len(found) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = connection.recv(size - len(found))
        if not piece or time.monotonic() > deadline:
            raise ConnectionError("the other end did not say who it is")
        found += piece
    return found
