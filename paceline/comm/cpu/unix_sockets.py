"""Connections between the ranks of one host, which strangers cannot enter."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from paceline.comm.cpu.reception import BACKLOG, Reception, introduce, number_of
from paceline.comm.transport import CommunicationError, Exchange

_RETRY_SECONDS = 0.01


def connect(
    rank: int, groups: Sequence[Sequence[int]], exchange: Exchange, timeout: float, secret: bytes
) -> list[dict[int, socket.socket]] | None:
    """Connects every pair of ranks of each group on this host by a Unix socket.

    Addresses are abstract, so they leave no file. All users of the host can list them: let in are only processes of the
    same user that know the job's secret.

    Args:
        rank: This rank.
        groups: The ranks of its groups, all on this host; as many on every rank of the job.
        exchange: Gathers one JSON value from every rank of the job, in rank order; says what it is about.
        timeout: Seconds to wait for a peer.
        secret: The job's.

    Returns:
        For each group, sockets by the peer's position in it, or None on every rank of the job if any cannot reach a
        peer (containers with a network each).

    Raises:
        CommunicationError: A peer that could reach this rank did not.
    """
    owns = [group.index(rank) for group in groups]
    later = {
        number_of(index, peer): (index, peer)
        for index, (own, group) in enumerate(zip(owns, groups, strict=True))
        for peer in range(own + 1, len(group))
    }
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0paceline-{secrets.token_hex(16)}"
    address: str | None = name
    try:
        listener.bind(name)
        listener.listen(BACKLOG)
    except OSError:
        address = None
    reception = Reception(listener, later if address is not None else (), timeout, secret, _is_same_user)
    sockets: list[dict[int, socket.socket]] = [{} for _ in groups]
    try:
        told = exchange(address, "addresses of Unix sockets")
        reachable = address is not None
        try:
            for index, (own, group) in enumerate(zip(owns, groups, strict=True)):
                for peer in range(own):
                    connection = sockets[index][peer] = _reach(told[group[peer]] or "", timeout)
                    introduce(connection, number_of(index, own), secret, timeout)
        except OSError:
            reachable = False
        # Nobody is waited for before all have connected: a rank may have failed.
        everyone = all(exchange(reachable, "who can be reached over Unix sockets"))
        if everyone and not reception.wait():
            missing = sorted({groups[index][peer] for index, peer in map(later.__getitem__, reception.missing)})
            names = ", ".join(f"rank {peer}" for peer in missing)
            raise CommunicationError(f"of the ranks of this host, {names} did not connect within {timeout:g} s")
    finally:
        reception.close()
    for number, connection in reception.accepted.items():
        index, peer = later[number]
        sockets[index][peer] = connection
    if not everyone:
        for connected in sockets:
            for connection in connected.values():
                connection.close()
        return None
    return [dict(sorted(connected.items())) for connected in sockets]


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("iII", credentials)[1] == os.getuid())


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
