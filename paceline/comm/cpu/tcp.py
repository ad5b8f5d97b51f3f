"""Rounds of messages between ranks on different hosts.

Every message says which collective and round it belongs to, so ranks that disagree are told so instead of mixing data.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from paceline.comm.cpu.signals import plain, text_of
from paceline.comm.patience import Silence, limit
from paceline.comm.transport import CommunicationError, DisagreementError, SilenceError, aborted_by

_HEADER = struct.Struct("<QQIIQ")
"""Number of the collective, its digest, stage, kind, bytes that follow the text."""
_TEXT = 448
_DATA, _ABORTED = 0, 1
_INSIDE = 1
"""The stage that a rank names which gave up in the middle of its latest collective, and not between two."""
_POLL_SECONDS = 0.1
_AT_ONCE = 1 << 18
"""Bytes of a message that are worth waking up for: waking for each packet would take a core from computing."""

Message = tuple[int, memoryview]
"""(peer, bytes)"""


class TcpConnections:
    """Sockets to other ranks, on which rounds of messages are exchanged.

    Attributes:
        number: Of the collective that was entered last.
    """

    def __init__(
        self, rank: int, sockets: dict[int, socket.socket], timeout: float, world_ranks: Sequence[int] | None = None
    ) -> None:
        """Takes over connected sockets; see `tcp_connect`.

        Args:
            rank: This rank.
            sockets: By peer.
            timeout: Seconds without a byte after which a peer is given up.
            world_ranks: What errors call each rank, if not by its number.
        """
        self._name = world_ranks.__getitem__ if world_ranks is not None else int
        self._own_name = self._name(rank)
        self._sockets = sockets
        self._timeout = timeout
        self.number = 0
        self._digest = 0
        self._text = b""
        self._in_message: set[int] = set()
        self._sending = threading.Lock()
        self._wakes_for: dict[int, int] = {}
        self.sent_bytes = 0
        """Bytes handed to the sockets so far, headers included."""
        self._received_bytes = 0
        for connection in sockets.values():
            connection.setblocking(False)

    def begin(self, digest: int, text: bytes) -> None:
        """Enters the next collective; see `Signals.begin`."""
        self.number += 1
        self._digest, self._text = digest, text

    def exchange(
        self, stage: int, sends: Sequence[Message], receives: Sequence[Message], look: Callable[[], None]
    ) -> None:
        """Sends and receives the messages of one round at once; several between two ranks arrive in their order.

        Args:
            stage: Of the collective at which the round starts.
            sends: What goes to whom; unchanged until this returns.
            receives: Where to put what comes from whom; its size is known to both sides.
            look: Called now and then while nothing moves; may raise.

        Raises:
            CommunicationError: A peer is gone, gave up, sends something else, or is silent for too long.
        """
        outgoing: dict[int, deque[memoryview]] = {}
        incoming: dict[int, deque[memoryview]] = {}
        for peer, data in sends:
            header = _HEADER.pack(self.number, self._digest, stage, _DATA, len(data)) + self._text
            outgoing.setdefault(peer, deque()).extend((memoryview(header), data))
        for peer, data in receives:
            arriving = memoryview(bytearray(_HEADER.size + _TEXT))
            incoming.setdefault(peer, deque()).extend((arriving, data))
        headers = {peer: queue[0] for peer, queue in incoming.items()}
        poll = select.poll()
        wanted: dict[int, int] = {}
        by_number = {self._sockets[peer].fileno(): peer for peer in {*outgoing, *incoming}}
        if -1 in by_number:
            raise self._gone(by_number[-1])
        silence = Silence(self._timeout)
        for descriptor, peer in by_number.items():
            wanted[peer] = self._wants(peer, outgoing, incoming)
            if peer in incoming:
                self._wake_for(peer, len(incoming[peer][0]))
            poll.register(descriptor, wanted[peer])
        while outgoing or incoming:
            ready, moved = poll.poll(1000 * _POLL_SECONDS), self.sent_bytes + self._received_bytes
            if not ready:
                look()
                self._look_around(incoming)
                # Fewer bytes than are worth waking up for show that a peer is there, too.
                ready = [(each, select.POLLIN) for each, peer in by_number.items() if peer in incoming]
            for descriptor, events in ready:
                peer = by_number[descriptor]
                if peer in outgoing and events & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                    self._send(peer, outgoing)
                if peer in incoming and events & (select.POLLIN | select.POLLERR | select.POLLHUP):
                    self._receive(peer, stage, incoming, headers)
                wants = self._wants(peer, outgoing, incoming)
                if wants != wanted[peer]:
                    wanted[peer] = wants
                    if wants:
                        poll.modify(descriptor, wants)
                    else:
                        poll.unregister(descriptor)
            if self.sent_bytes + self._received_bytes > moved:
                silence.end()
            elif silence.left() <= 0:
                raise self._silent(sorted({*outgoing, *incoming})[0])

    def abort(self, reason: str, inside: bool = False) -> None:
        """Tells peers that this rank will not go on, where no message is half sent, and sends nothing after that.

        Args:
            reason: Why.
            inside: Whether it is in the middle of a collective; see `Signals.abort`.
        """
        header = _HEADER.pack(self.number, self._digest, _INSIDE * inside, _ABORTED, 0) + text_of(reason)
        with self._sending:
            for peer, connection in self._sockets.items():
                with contextlib.suppress(OSError):
                    if peer not in self._in_message:
                        connection.send(header)
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
            # Another thread may abort, whose message must not end up inside of this one.
            with self._sending:
                count = self._sockets[peer].sendmsg(list(queue)[:8])
                self.sent_bytes += count
                while queue and count >= len(queue[0]):
                    count -= len(queue.popleft())
                if queue:
                    queue[0] = queue[0][count:]
                    self._in_message.add(peer)
                else:
                    del outgoing[peer]
                    self._in_message.discard(peer)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._why_gone(peer) from error

    def _receive(
        self, peer: int, stage: int, incoming: dict[int, deque[memoryview]], headers: dict[int, memoryview]
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
            if peer in headers:
                self._verify(peer, stage, headers.pop(peer), len(queue[0]))
            elif queue:
                headers[peer] = queue[0]
        del incoming[peer]

    def _wake_for(self, peer: int, size: int) -> None:
        """Counts a peer as ready once so much of what it sends is there: no more than its message will bring."""
        size = min(size, _AT_ONCE)
        if self._wakes_for.get(peer) != size:
            self._wakes_for[peer] = size
            # Where the kernel does not know it, as some sandboxes' do not, it wakes for each packet.
            with contextlib.suppress(OSError):
                self._sockets[peer].setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _verify(self, peer: int, stage: int, header: memoryview, size: int) -> None:
        number, digest, theirs, kind, follows = _HEADER.unpack(header[: _HEADER.size])
        text = plain(bytes(header[_HEADER.size :]))
        if kind == _ABORTED:
            raise aborted_by(self._name(peer), text)
        if (number, digest, theirs, follows) != (self.number, self._digest, stage, size):
            raise DisagreementError(
                f"ranks disagree on what to communicate: rank {self._own_name} is in collective {self.number}, "
                f"{plain(self._text)}; rank {self._name(peer)} is in collective {number}, {text}. Every rank must run "
                "the same model with the same strategy and the same number of micro-batches"
            )

    def _look_around(self, awaited: Collection[int]) -> None:
        """Raises if a peer gave up without which the collective cannot end, though nothing of it is awaited now.

        The awaited ones may not know of it: see `Signals._look_around`.
        """
        others = {self._sockets[peer].fileno(): peer for peer in self._sockets if peer not in awaited}
        poll = select.poll()
        for descriptor in others.keys() - {-1}:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            peer = others[descriptor]
            if (said := self._last_words(peer)) is not None:
                number, is_inside, text = said
                if number < self.number or (number == self.number and is_inside):
                    raise aborted_by(self._name(peer), text)

    def _last_words(self, peer: int) -> tuple[int, bool, str] | None:
        """The collective in which a peer gave up, whether in its middle, and why; what it has sent stays unread.

        None where it said nothing of it.
        """
        unread = memoryview(b"")
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._sockets[peer], termios.FIONREAD, bytes(4))
            unread = memoryview(self._sockets[peer].recv(int.from_bytes(size, sys.byteorder), socket.MSG_PEEK))
        while len(unread) >= _HEADER.size + _TEXT:
            number, _, stage, kind, follows = _HEADER.unpack_from(unread)
            if kind == _ABORTED:
                return number, stage == _INSIDE, plain(bytes(unread[_HEADER.size : _HEADER.size + _TEXT]))
            unread = unread[_HEADER.size + _TEXT + follows :]
        return None

    def _why_gone(self, peer: int) -> CommunicationError:
        """Why a peer that takes nothing more ended, if it said so."""
        header = bytearray()
        with contextlib.suppress(OSError):
            while len(header) < _HEADER.size + _TEXT:
                piece = self._sockets[peer].recv(_HEADER.size + _TEXT - len(header))
                if not piece:
                    break
                header += piece
        if len(header) == _HEADER.size + _TEXT and _HEADER.unpack(header[: _HEADER.size])[3] == _ABORTED:
            return aborted_by(self._name(peer), plain(bytes(header[_HEADER.size :])))
        return self._gone(peer)

    def _gone(self, peer: int) -> CommunicationError:
        return CommunicationError(
            f"rank {self._name(peer)} is gone: rank {self._own_name} waited for it in {plain(self._text)}"
        )

    def _silent(self, peer: int) -> SilenceError:
        return SilenceError(
            f"rank {self._name(peer)} did not answer within {limit(self._timeout):g} s: rank {self._own_name} waited "
            f"for it in {plain(self._text)}"
        )
