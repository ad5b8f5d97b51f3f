"""Connections between ranks on different hosts, and rounds of messages over them.

Every message says which call and round it belongs to, so ranks that disagree are told so instead of mixing data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm.signals import plain
from paceline.comm.transport import CommunicationError

_HEADER = struct.Struct("<QQIIQ")
"""Call, digest of the call, round, kind, bytes that follow the text."""
_TEXT = 448
_DATA, _GAVE_UP = 0, 1
_LOOK_SECONDS = 0.1
_AT_ONCE = 1 << 18
"""Bytes of a message that are worth waking up for: waking for each packet would take a core from computing."""
_SIOCGIFADDR = 0x8915
_CONNECT_SECONDS = 5.0

Message = tuple[int, memoryview]
"""(peer, bytes)"""


class TcpLinks:
    """Sockets to other ranks, on which rounds of messages are exchanged."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        """Takes over connected sockets; see `connect`.

        Args:
            rank: This rank.
            sockets: By peer.
            timeout: Seconds without a byte after which a peer is given up.
        """
        self._rank = rank
        self._sockets = sockets
        self._timeout = timeout
        self._call = 0
        self._digest = 0
        self._text = b""
        self._in_message: set[int] = set()
        self._wakes_for: dict[int, int] = {}
        self.sent_bytes = 0
        """Bytes handed to the sockets so far, headers included."""
        self._received_bytes = 0
        for connection in sockets.values():
            connection.setblocking(False)

    def begin(self, digest: int, text: bytes) -> None:
        """Enters the next call; see `Signals.begin`."""
        self._call += 1
        self._digest, self._text = digest, text

    def exchange(
        self, number: int, sends: Sequence[Message], receives: Sequence[Message], look: Callable[[], None]
    ) -> None:
        """Sends and receives the messages of one round at once; several between two ranks arrive in their order.

        Args:
            number: The round.
            sends: What goes to whom; unchanged until this returns.
            receives: Where to put what comes from whom; its size is known to both sides.
            look: Called now and then while nothing moves; may raise.

        Raises:
            CommunicationError: A peer is gone, gave up, sends something else, or is silent for too long.
        """
        outgoing: dict[int, deque[memoryview]] = {}
        incoming: dict[int, deque[memoryview]] = {}
        for peer, data in sends:
            head = _HEADER.pack(self._call, self._digest, number, _DATA, len(data)) + self._text
            outgoing.setdefault(peer, deque()).extend((memoryview(head), data))
        for peer, data in receives:
            arriving = memoryview(bytearray(_HEADER.size + _TEXT))
            incoming.setdefault(peer, deque()).extend((arriving, data))
        heads = {peer: queue[0] for peer, queue in incoming.items()}
        poll = select.poll()
        wanted: dict[int, int] = {}
        by_number = {self._sockets[peer].fileno(): peer for peer in {*outgoing, *incoming}}
        if -1 in by_number:
            raise self._gone(by_number[-1])
        quiet_since = time.monotonic()
        for descriptor, peer in by_number.items():
            wanted[peer] = self._wants(peer, outgoing, incoming)
            if peer in incoming:
                self._wake_for(peer, len(incoming[peer][0]))
            poll.register(descriptor, wanted[peer])
        while outgoing or incoming:
            ready, moved = poll.poll(1000 * _LOOK_SECONDS), self.sent_bytes + self._received_bytes
            if not ready:
                look()
                # Fewer bytes than are worth waking up for show that a peer is there, too.
                ready = [(each, select.POLLIN) for each, peer in by_number.items() if peer in incoming]
            for descriptor, events in ready:
                peer = by_number[descriptor]
                if peer in outgoing and events & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                    self._send(peer, outgoing)
                if peer in incoming and events & (select.POLLIN | select.POLLERR | select.POLLHUP):
                    self._receive(peer, number, incoming, heads)
                wants = self._wants(peer, outgoing, incoming)
                if wants != wanted[peer]:
                    wanted[peer] = wants
                    if wants:
                        poll.modify(descriptor, wants)
                    else:
                        poll.unregister(descriptor)
            if self.sent_bytes + self._received_bytes > moved:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > self._timeout:
                raise self._silent(sorted({*outgoing, *incoming})[0])

    def give_up(self, why: str) -> None:
        """Tells peers that this rank will not go on, where no message is half sent, and ends the connections."""
        head = _HEADER.pack(self._call, self._digest, 0, _GAVE_UP, 0) + why.encode()[:_TEXT].ljust(_TEXT, b"\0")
        for peer in self._sockets:
            if peer not in self._in_message:
                with contextlib.suppress(OSError):
                    self._sockets[peer].send(head)
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Ends the connections, which wakes a thread that waits on them."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the sockets."""
        for connection in self._sockets.values():
            connection.close()

    @staticmethod
    def _wants(peer: int, outgoing: dict[int, Any], incoming: dict[int, Any]) -> int:
        return (select.POLLOUT if peer in outgoing else 0) | (select.POLLIN if peer in incoming else 0)

    def _send(self, peer: int, outgoing: dict[int, deque[memoryview]]) -> None:
        queue = outgoing[peer]
        try:
            count = self._sockets[peer].sendmsg(list(queue)[:8])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._last_words(peer) from error
        self.sent_bytes += count
        self._in_message.add(peer)
        while queue and count >= len(queue[0]):
            count -= len(queue.popleft())
        if queue:
            queue[0] = queue[0][count:]
        else:
            del outgoing[peer]
            self._in_message.discard(peer)

    def _receive(
        self, peer: int, number: int, incoming: dict[int, deque[memoryview]], heads: dict[int, memoryview]
    ) -> None:
        queue = incoming[peer]
        while queue:
            try:
                count = self._sockets[peer].recv_into(queue[0]) if len(queue[0]) else 0
            except BlockingIOError:
                self._wake_for(peer, len(queue[0]))
                return
            except OSError as error:
                raise self._gone(peer) from error
            if not count and len(queue[0]):
                raise self._gone(peer)
            self._received_bytes += count
            if count < len(queue[0]):
                queue[0] = queue[0][count:]
                continue
            queue.popleft()
            if peer in heads:
                self._verify(peer, number, heads.pop(peer), len(queue[0]))
            elif queue:
                heads[peer] = queue[0]
        del incoming[peer]

    def _wake_for(self, peer: int, size: int) -> None:
        """Counts a peer as ready once so much of what it sends is there: no more than its message will bring."""
        size = min(size, _AT_ONCE)
        if self._wakes_for.get(peer) != size:
            self._wakes_for[peer] = size
            # Where the kernel does not know it, as some sandboxes' do not, it wakes for each packet.
            with contextlib.suppress(OSError):
                self._sockets[peer].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _verify(self, peer: int, number: int, head: memoryview, size: int) -> None:
        call, digest, theirs, kind, follows = _HEADER.unpack(head[: _HEADER.size])
        text = plain(bytes(head[_HEADER.size :]))
        if kind == _GAVE_UP:
            raise CommunicationError(f"rank {peer} gave up: {text}")
        if (call, digest, theirs, follows) != (self._call, self._digest, number, size):
            raise CommunicationError(
                f"ranks disagree on what to communicate: rank {self._rank} is in call {self._call}, "
                f"{plain(self._text)}; rank {peer} is in call {call}, {text}. Every rank must run the same model with "
                "the same strategy and the same number of micro-batches"
            )

    def _last_words(self, peer: int) -> CommunicationError:
        """Why a peer that takes nothing more ended, if it said so."""
        head = bytearray()
        with contextlib.suppress(OSError):
            while len(head) < _HEADER.size + _TEXT:
                piece = self._sockets[peer].recv(_HEADER.size + _TEXT - len(head))
                if not piece:
                    break
                head += piece
        if len(head) == _HEADER.size + _TEXT and _HEADER.unpack(head[: _HEADER.size])[3] == _GAVE_UP:
            return CommunicationError(f"rank {peer} gave up: {plain(bytes(head[_HEADER.size :]))}")
        return self._gone(peer)

    def _gone(self, peer: int) -> CommunicationError:
        return CommunicationError(f"rank {peer} is gone: rank {self._rank} waited for it in {plain(self._text)}")

    def _silent(self, peer: int) -> CommunicationError:
        return CommunicationError(
            f"rank {peer} did not answer within {self._timeout:g} s: rank {self._rank} waited for it in "
            f"{plain(self._text)}"
        )


def connect(
    rank: int, group: Sequence[int], peers: Sequence[int], exchange: Callable[[Any], list[Any]], timeout: float
) -> dict[int, socket.socket]:
    """Connects this rank to peers on any hosts.

    Each rank listens at a port of its own while it connects and lets in only who knows the job's secret, which travels
    by `exchange`.

    Args:
        rank: This rank.
        group: The ranks of its group.
        peers: Those of the group to connect to; each has this rank among its own.
        exchange: Gathers one JSON value from every rank of the job, in rank order.
        timeout: Seconds to wait for a peer.

    Returns:
        Sockets by the peer's position in the group.

    Raises:
        CommunicationError: A peer cannot be reached.
    """
    own = group.index(rank)
    sockets: dict[int, socket.socket] = {}
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(max(1, len(peers)))
        told = exchange([addresses(), listener.getsockname()[1], secrets.token_hex(16)])
        for peer in sorted(peer for peer in peers if peer < rank):
            theirs, port, secret = told[peer]
            connection = _reach(theirs, port, min(timeout, _CONNECT_SECONDS))
            if connection is None:
                raise CommunicationError(
                    f"rank {rank} cannot reach rank {peer} at port {port} of {', '.join(theirs)}; let the hosts reach "
                    "each other at any port, or name the interface to use in GLOO_SOCKET_IFNAME"
                )
            connection.settimeout(timeout)
            try:
                connection.sendall(struct.pack("<I", own) + secret.encode())
            except OSError as error:
                raise CommunicationError(f"rank {peer} is gone: rank {rank} was about to connect to it") from error
            sockets[group.index(peer)] = connection
        missing = {group.index(peer) for peer in peers if peer > rank}
        secret = told[rank][2].encode()
        deadline = time.monotonic() + timeout
        while missing:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_SECONDS)
                greeting = _exactly(connection, 4 + len(secret))
            except OSError as error:
                # Something that connects and says nothing, or goes away again, is a stranger too.
                if time.monotonic() < deadline and isinstance(error, (TimeoutError, ConnectionError)):
                    continue
                names = ", ".join(f"rank {group[peer]}" for peer in sorted(missing))
                raise CommunicationError(f"{names} did not reach rank {rank} within {timeout:g} s") from None
            peer = struct.unpack("<I", greeting[:4])[0] if len(greeting) == 4 + len(secret) else -1
            if not hmac.compare_digest(greeting[4:], secret) or peer not in missing:
                # A stranger.
                connection.close()
                continue
            missing.remove(peer)
            sockets[peer] = connection
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dict(sorted(sockets.items()))


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


def _reach(theirs: Sequence[str], port: int, timeout: float) -> socket.socket | None:
    for address in theirs:
        connection = socket.socket()
        connection.settimeout(timeout)
        try:
            connection.connect((address, port))
            return connection
        except OSError:
            connection.close()
    return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data
