"""Lets peers in at a listening socket, past strangers: all are heard beside each other, so that none is in the way.

A connection begins with a greeting: the peer's number and the listener's secret. Who says something else, or nothing,
is closed out.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Collection

BACKLOG = 4096
"""Connections that wait to be accepted; kernels may allow fewer."""
_POLL_SECONDS = 0.05
_MOST_STRANGERS = 128
"""Connections that have not said who they are, besides peers: of more, the oldest is closed, as peers speak at once."""
_NUMBER = struct.Struct("<I")
_SECRET = 16


class Reception:
    """Accepts connections of peers in a thread.

    Attributes:
        secret: What peers have to know, in hexadecimal digits.
        missing: Peers that have not come.
        accepted: Connections by peer.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Collection[int],
        timeout: float,
        knows: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        """Begins; the socket listens already.

        Args:
            listener: Where peers come to; closed with this.
            peers: Numbers of those to let in.
            timeout: Seconds to wait for them all, and the time limit of their connections afterwards.
            knows: Whether a connection may be a peer's, before it has said anything.
        """
        self._listener = listener
        self._timeout = timeout
        self._knows = knows
        self._secret = secrets.token_bytes(_SECRET)
        self._closed = threading.Event()
        self._greetings: dict[socket.socket, bytes] = {}
        """What each connection has said so far, oldest first."""
        self.secret = self._secret.hex()
        self.missing = set(peers)
        self.accepted: dict[int, socket.socket] = {}
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._receive, name="paceline reception", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Whether all peers have come, within the time limit."""
        self._thread.join(self._timeout)
        return not self.missing

    def close(self) -> None:
        """Lets nobody in any more."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while self.missing and not self._closed.is_set():
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj in self._greetings:
                        self._hear(key.fileobj, selector)
        for connection in self._greetings:
            connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It went away again.
            return
        if not self._knows(connection):
            connection.close()
            return
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        self._greetings[connection] = b""
        if len(self._greetings) > _MOST_STRANGERS + len(self.missing):
            oldest = next(iter(self._greetings))
            self._forget(oldest, selector)
            oldest.close()

    def _hear(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        expected = _NUMBER.size + _SECRET
        try:
            piece = connection.recv(expected - len(self._greetings[connection]))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        greeting = self._greetings[connection] = self._greetings[connection] + piece
        if piece and len(greeting) < expected:
            return
        self._forget(connection, selector)
        knows_secret = hmac.compare_digest(greeting[_NUMBER.size :], self._secret)
        peer = _NUMBER.unpack_from(greeting)[0] if knows_secret else None
        if peer not in self.missing:
            connection.close()
            return
        connection.settimeout(self._timeout)
        self.accepted[peer] = connection
        self.missing.remove(peer)

    def _forget(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        del self._greetings[connection]


def greeting(number: int, secret: str) -> bytes:
    """What a peer says first.

    Args:
        number: Its own.
        secret: The listener's, in hexadecimal digits.
    """
    return _NUMBER.pack(number) + bytes.fromhex(secret)
