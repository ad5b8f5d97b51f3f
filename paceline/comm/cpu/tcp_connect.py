"""Opens TCP connections between ranks on any hosts, which strangers cannot enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from paceline.comm.cpu.reception import BACKLOG, Reception, introduce, number_of
from paceline.comm.transport import CommunicationError, Exchange

_SIOCGIFADDR = 0x8915
_CONNECT_SECONDS = 5.0


def connect(
    rank: int,
    groups: Sequence[Sequence[int]],
    peers: Sequence[Sequence[int]],
    exchange: Exchange,
    timeout: float,
    secret: bytes,
) -> list[dict[int, socket.socket]]:
    """Connects this rank to peers on any hosts, those of several groups at once.

    Each rank listens at a port of its own while it connects and lets in only who knows the job's secret.

    Args:
        rank: This rank.
        groups: The ranks of its groups; as many on every rank of the job.
        peers: Those of each group to connect to; each has this rank among its own.
        exchange: Gathers one JSON value from every rank of the job, in rank order; says what it is about.
        timeout: Seconds to wait for a peer.
        secret: The job's.

    Returns:
        For each group, sockets by the peer's position in it.

    Raises:
        CommunicationError: A peer cannot be reached.
    """
    places = {
        number_of(index, group.index(peer)): (index, peer)
        for index, group in enumerate(groups)
        for peer in sorted(peers[index])
    }
    later = {number: place for number, place in places.items() if place[1] > rank}
    sockets: list[dict[int, socket.socket]] = [{} for _ in groups]
    listener = socket.socket()
    listener.bind(("0.0.0.0", 0))
    listener.listen(BACKLOG)
    port = listener.getsockname()[1]
    reception = Reception(listener, later, timeout, secret)
    try:
        told = exchange([addresses(), port], "addresses of TCP sockets")
        for index, peer in places.values():
            if peer > rank:
                continue
            theirs, port = told[peer]
            connection = reach(theirs, port, min(timeout, _CONNECT_SECONDS))
            if connection is None:
                raise CommunicationError(
                    f"rank {rank} cannot reach rank {peer} at port {port} of {', '.join(theirs)}; let the hosts reach "
                    "each other at any port, or name the interface to use in GLOO_SOCKET_IFNAME"
                )
            try:
                introduce(connection, number_of(index, groups[index].index(rank)), secret, timeout)
            except OSError as error:
                raise CommunicationError(f"rank {peer} is gone: rank {rank} was about to connect to it") from error
            sockets[index][groups[index].index(peer)] = connection
        if not reception.wait():
            names = ", ".join(f"rank {peer}" for peer in sorted({later[number][1] for number in reception.missing}))
            raise CommunicationError(f"{names} did not reach rank {rank} within {timeout:g} s")
    finally:
        reception.close()
    for number, connection in reception.accepted.items():
        index, peer = later[number]
        sockets[index][groups[index].index(peer)] = connection
    for connected in sockets:
        for connection in connected.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return [dict(sorted(connected.items())) for connected in sockets]


def addresses() -> list[str]:
    """IPv4 addresses of this host, most useful first: of the interface that GLOO_SOCKET_IFNAME names, or of all."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    names = named.split(",") if named else [name for _, name in socket.if_nameindex()]
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not named:
            with contextlib.suppress(OSError):
                # The address from which the rendezvous is reached; connecting a datagram socket sends nothing.
                probe.connect((os.environ["MASTER_ADDR"], 9)) if "MASTER_ADDR" in os.environ else None
                found += [probe.getsockname()[0]] if "MASTER_ADDR" in os.environ else []
        for name in names:
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    # Loopback last: on another host it is that host.
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reach(theirs: Sequence[str], port: int, timeout: float) -> socket.socket | None:
    """A connection to a port of a host, by the first of its addresses that answers; None where none does.

    Args:
        theirs: The host's addresses.
        port: Where it listens.
        timeout: Seconds for each address.
    """
    for address in theirs:
        connection = socket.socket()
        connection.settimeout(timeout)
        try:
            connection.connect((address, port))
            return connection
        except OSError:
            connection.close()
    return None
