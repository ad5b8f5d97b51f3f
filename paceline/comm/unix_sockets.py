"""Connections between the ranks of one host, which strangers cannot enter."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from paceline.comm.transport import CommunicationError

_LOOK_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.01
_NUMBER = struct.Struct("<I")
_SECRET = 16


def connect(
    rank: int, group: Sequence[int], exchange: Callable[[Any], list[Any]], timeout: float
) -> dict[int, socket.socket] | None:
    """Connects every pair of ranks of a group on this host by a Unix socket.

    Addresses are abstract, so they leave no file. All users of the host can list them: let in are only processes of the
    same user that know the listener's secret, which travels by `exchange`.

    Args:
        rank: This rank.
        group: The ranks of its group, all on this host.
        exchange: Gathers one JSON value from every rank of the job, in rank order.
        timeout: Seconds to wait for a peer.

    Returns:
        Sockets by the peer's position in the group, or None on every rank of the job if any cannot reach a peer
        (containers with a network each).

    Raises:
        CommunicationError: A peer that could reach this rank did not.
    """
    own = group.index(rank)
    door = _Door(range(own + 1, len(group)), timeout)
    sockets: dict[int, socket.socket] = {}
    try:
        told = exchange(door.told)
        reachable = door.told is not None
        try:
            for peer in range(own):
                address, secret = told[group[peer]] or ("", "")
                connection = sockets[peer] = _reach(address, timeout)
                connection.sendall(_NUMBER.pack(own) + bytes.fromhex(secret))
        except OSError:
            reachable = False
        # Nobody is waited for before all have connected: a rank may have failed.
        everyone = all(exchange(reachable))
        if everyone:
            sockets |= door.wait()
    finally:
        door.close()
    if not everyone:
        for connection in (*sockets.values(), *door.entered.values()):
            connection.close()
        return None
    return dict(sorted(sockets.items()))


class _Door:
    """Listens, and turns strangers away at once so that they keep nobody out.

    Attributes:
        told: Address and secret in hexadecimal digits, for the peers; None where it cannot listen.
        entered: Connections by peer.
    """

    def __init__(self, peers: Collection[int], timeout: float) -> None:
        self._missing = set(peers)
        self._timeout = timeout
        self._secret = secrets.token_bytes(_SECRET)
        self._over = threading.Event()
        self.entered: dict[int, socket.socket] = {}
        self.told: tuple[str, str] | None = (f"\0paceline-{secrets.token_hex(16)}", self._secret.hex())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(_LOOK_SECONDS)
        self._keeper = threading.Thread(target=self._keep, name="paceline door", daemon=True)
        try:
            self._listener.bind(self.told[0])
            self._listener.listen(max(1, len(self._missing)))
        except OSError:
            self.told = None
            self._missing.clear()
        self._keeper.start()

    def wait(self) -> dict[int, socket.socket]:
        """The connections, when all peers have come."""
        self._keeper.join(self._timeout)
        if self._missing:
            raise CommunicationError(
                f"of the ranks of this host, number {', '.join(map(str, sorted(self._missing)))} did not connect "
                f"within {self._timeout:g} s"
            )
        return self.entered

    def close(self) -> None:
        """Lets nobody in any more."""
        self._over.set()
        self._keeper.join()
        self._listener.close()

    def _keep(self) -> None:
        while self._missing and not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(min(self._timeout, _CONNECT_SECONDS))
            peer = self._greeted_by(connection)
            if peer is None:
                connection.close()
                continue
            connection.settimeout(self._timeout)
            self.entered[peer] = connection
            self._missing.remove(peer)

    def _greeted_by(self, connection: socket.socket) -> int | None:
        """Which of the peers that are missing this is; None if it is a stranger."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iII", credentials)[1] != os.getuid():
            return None
        try:
            greeting = connection.recv(_NUMBER.size + _SECRET, socket.MSG_WAITALL)
        except OSError:
            return None
        if not hmac.compare_digest(greeting[_NUMBER.size :], self._secret):
            return None
        (peer,) = _NUMBER.unpack_from(greeting)
        return peer if peer in self._missing else None


def _reach(address: str, timeout: float) -> socket.socket:
    """Connects, also where others stand in the listener's short queue."""
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)
