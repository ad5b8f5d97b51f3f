"""Lets peers in at a listening socket, past strangers: all are heard beside each other, so that none is in the way.

The listener begins with a nonce. The peer answers with its number, a nonce of its own and the tag that only who knows
the job's secret can make of all three (`introduce`), and the listener with the tag of both nonces. Who says something
else, or nothing, is closed out.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Collection

from paceline.comm.authentication import NONCE, TAG, is_signed, receive_exactly, sign

BACKLOG = 4096
"""Connections that wait to be accepted; kernels may allow fewer."""
_POLL_SECONDS = 0.05
_MOST_STRANGERS = 128
"""Connections that have not said who they are, besides peers: of more, the oldest is closed, as peers speak at once."""
_NUMBER = struct.Struct("<I")
_MOST_PEERS = 1 << 20
"""Of a group: what is left of a peer's number is the group's."""
_PEER, _LISTENER = b"peer", b"listener"
"""Who signs, so that nobody can be sent its own words back."""


def number_of(group: int, position: int) -> int:
    """What a peer calls itself where the ranks of several groups connect at once."""
    return group * _MOST_PEERS + position


class Reception:
    """Accepts connections of peers in a thread.

    Attributes:
        missing: Peers that have not come.
        accepted: Connections by peer.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Collection[int],
        timeout: float,
        secret: bytes,
        knows: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        """Begins; the socket listens already.

        Args:
            listener: Where peers come to; closed with this.
            peers: Numbers of those to let in.
            timeout: Seconds to wait for them all, and the time limit of their connections afterwards.
            secret: The job's.
            knows: Whether a connection may be a peer's, before it has said anything.
        """
        self._listener = listener
        self._timeout = timeout
        self._knows = knows
        self._secret = secret
        self._closed = threading.Event()
        self._greetings: dict[socket.socket, tuple[bytes, bytes]] = {}
        """The nonce that each connection was given and what it has said so far, oldest first."""
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
        nonce = secrets.token_bytes(NONCE)
        # One that is gone again is noticed when it is heard.
        with contextlib.suppress(OSError):
            connection.send(nonce)
        selector.register(connection, selectors.EVENT_READ)
        self._greetings[connection] = nonce, b""
        if len(self._greetings) > _MOST_STRANGERS + len(self.missing):
            oldest = next(iter(self._greetings))
            self._forget(oldest, selector)
            oldest.close()

    def _hear(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        nonce, greeting = self._greetings[connection]
        expected = _NUMBER.size + NONCE + TAG
        try:
            piece = connection.recv(expected - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        greeting += piece
        self._greetings[connection] = nonce, greeting
        if piece and len(greeting) < expected:
            return
        self._forget(connection, selector)
        words, tag = greeting[:-TAG], greeting[-TAG:]
        peer = _NUMBER.unpack_from(words)[0] if is_signed(tag, self._secret, _PEER, nonce, words) else None
        try:
            if peer not in self.missing:
                raise ConnectionError("a stranger")
            connection.send(sign(self._secret, _LISTENER, nonce, words))
        except OSError:
            connection.close()
            return
        connection.settimeout(self._timeout)
        self.accepted[peer] = connection
        self.missing.remove(peer)

    def _forget(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        del self._greetings[connection]


def introduce(connection: socket.socket, number: int, secret: bytes, timeout: float) -> None:
    """Says to a listener who this is, and has it prove that it knows the secret, too.

    Args:
        connection: To the listener.
        number: This peer's.
        secret: The job's.
        timeout: Seconds to wait for each of its two answers, and the time limit of the connection afterwards.

    Raises:
        OSError: It is gone, or is a stranger.
    """
    nonce = receive_exactly(connection, NONCE, timeout)
    words = _NUMBER.pack(number) + secrets.token_bytes(NONCE)
    connection.sendall(words + sign(secret, _PEER, nonce, words))
    if not is_signed(receive_exactly(connection, TAG, timeout), secret, _LISTENER, nonce, words):
        raise ConnectionError("the listener does not know the job's secret")
    connection.settimeout(timeout)
