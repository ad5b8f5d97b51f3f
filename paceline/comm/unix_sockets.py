"""Connections between the ranks of one host, which strangers cannot find or enter."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any


def connect(
    rank: int, group: Sequence[int], exchange: Callable[[Any], list[Any]], timeout: float
) -> dict[int, socket.socket] | None:
    """Connects every pair of ranks of a group on this host by a Unix socket.

    Addresses are abstract (no file) and unguessable, and only processes of the same user are let in.

    Args:
        rank: This rank.
        group: The ranks of its group, all on this host.
        exchange: Gathers one JSON value from every rank of the job, in rank order.
        timeout: Seconds to wait for a peer.

    Returns:
        Sockets by the peer's position in the group, or None on every rank of the job if any cannot reach a peer
        (containers with a network each).
    """
    address = f"\0paceline-{secrets.token_hex(16)}"
    own = group.index(rank)
    sockets: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        reachable = True
        try:
            listener.bind(address)
            listener.listen(len(group))
        except OSError:
            reachable = False
        addresses = exchange(address if reachable else None)
        try:
            for peer in range(own):
                connection = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(timeout)
                connection.connect(addresses[group[peer]] or "")
                connection.sendall(struct.pack("<I", own))
        except OSError:
            reachable = False
        # Nobody accepts before all have connected: a rank that failed must not be waited for.
        if not all(exchange(reachable)):
            for connection in sockets.values():
                connection.close()
            return None
        listener.settimeout(timeout)
        while len(sockets) < len(group) - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("iII", credentials)[1] != os.getuid():
                connection.close()
                continue
            (peer,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
            sockets[peer] = connection
    return dict(sorted(sockets.items()))
