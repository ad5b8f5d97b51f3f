"""Plans over memory that ranks of one host share: no copy in or out, sums read the peers' buffers in place.

Buffers are anonymous (`memfd_create`) and their descriptors travel over Unix sockets, so nothing has a name
that a stranger could open or that a killed process could leave behind, and the size of /dev/shm does not
matter. The same sockets are the doorbells: a peer that dies closes its end, and the wait for it ends at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.plan import PLANS, Round, Traffic
from paceline.comm.transport import CHUNK, CommunicationError, Transport, accumulation_dtype, sum_in_order

_BELL = struct.Struct("<IH58s")
_DONE = 0xFFFF
_STAGING_BYTES = 8 << 20

_open: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class _Region:
    """One buffer of every rank, mapped into this process."""

    start: int
    stop: int
    tensors: tuple[Tensor, ...]


class SharedMemoryTransport:
    """Executes plans by reading the peers' buffers directly."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        """Takes over connected sockets, one to each other rank (see `unix_sockets.connect`).

        Args:
            rank: This rank.
            sockets: By peer rank.
            timeout: Seconds after which a silent peer is given up.
        """
        self.name = "shared memory"
        self._rank = rank
        self._world_size = len(sockets) + 1
        self._sockets = sockets
        self._timeout = timeout
        for connection in sockets.values():
            connection.settimeout(timeout)
        self._regions: list[_Region] = []
        self._staging: dict[torch.dtype, Tensor] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._sequence = 0
        _open.add(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that every rank of the host can read. A collective call."""
        size = max(numel * dtype.itemsize, 1)
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        # A peer that shrank the file would turn our next read into a SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"m"], [descriptor])
        tensors = []
        for peer in range(self._world_size):
            theirs = descriptor if peer == self._rank else self._receive_descriptor(peer)
            tensors.append(
                torch.frombuffer(mmap.mmap(theirs, size), dtype=dtype, count=numel)
                if numel
                else torch.empty(0, dtype=dtype)
            )
            os.close(theirs)
        own = tensors[self._rank]
        self._regions.append(_Region(own.data_ptr(), own.data_ptr() + numel * dtype.itemsize, tuple(tensors)))
        return own

    def run(
        self, collective: str, buffer: Tensor, label: str, scale: float = 1.0, shard: Tensor | None = None
    ) -> Traffic:
        """Runs one collective in place; see `Transport.run`."""
        if not buffer.numel():
            return Traffic(0, 0)
        if shard is not None:
            return self._run_beside(collective, buffer, label, scale, shard)
        views = self._views(buffer)
        if views is not None:
            return self._execute(collective, views, label, scale)
        staging = self._staging.get(buffer.dtype)
        if staging is None:
            staging = self.allocate(_STAGING_BYTES // buffer.itemsize, buffer.dtype)
            self._staging[buffer.dtype] = staging
        sent = received = 0
        for piece in buffer.split(staging.numel()):
            staged = staging[: piece.numel()]
            staged.copy_(piece)
            views = self._views(staged)
            assert views is not None
            traffic = self._execute(collective, views, label, scale)
            piece.copy_(staged)
            sent, received = sent + traffic.sent, received + traffic.received
        return Traffic(sent, received)

    def _run_beside(self, collective: str, buffer: Tensor, label: str, scale: float, shard: Tensor) -> Traffic:
        """Runs a collective whose shards lie beside the buffer: read from the peers, or written by this rank alone."""
        shared = shard if collective == "all_gather" else buffer
        views = self._views(shared)
        if views is None:
            raise ValueError(f"{collective} of {label}: the tensor that peers read was not allocated here")
        size = buffer.numel() // self._world_size
        if collective != "all_gather":
            return self._execute(collective, views, label, scale, shard)
        # Each peer's shard stands for its range of the buffer.
        places = [buffer[peer * size : (peer + 1) * size] for peer in range(self._world_size)]
        traffic = self._execute(collective, views, label, scale, places=places)
        places[self._rank].copy_(shard)
        return traffic

    def inherit(self, other: Transport) -> None:
        """See `Transport.inherit`: memory outlives the connections that brought it."""
        assert isinstance(other, SharedMemoryTransport)
        self._regions, self._staging = other._regions, other._staging

    def interrupt(self) -> None:
        """Ends the connections, which closing a socket alone would not do while a thread waits on it."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the sockets; a peer still waiting for this rank is told so by that."""
        self.interrupt()
        self.forget_sockets()

    def forget_sockets(self) -> None:
        """Lets go of this end; in a forked child, so that the parent's death is seen while the child lives."""
        for connection in self._sockets.values():
            connection.close()

    def _execute(
        self,
        collective: str,
        views: list[Tensor],
        label: str,
        scale: float,
        out: Tensor | None = None,
        places: list[Tensor] | None = None,
    ) -> Traffic:
        """Runs a plan.

        Args:
            collective: Which.
            views: The buffer of every rank or, with `places`, its shard.
            label: Names the op.
            scale: Factor for sums.
            out: Where this rank's sum goes, if not into its own buffer.
            places: Where each rank's shard goes.
        """
        own = views[self._rank]
        numel = own.numel() if places is None else sum(place.numel() for place in places)
        rounds = PLANS[collective](self._rank, self._world_size, numel)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        call = f"{collective} {label} {numel} {str(own.dtype).removeprefix('torch.')}"
        readers: set[int] = set()
        sources: set[int] = set()
        sent = received = 0
        for number, turn in enumerate(rounds):
            for part in turn.sends:
                self._ring(part.peer, number, call)
                readers.add(part.peer)
                sent += part.stop - part.start
            for part in turn.receives:
                self._await(part.peer, number, call)
                sources.add(part.peer)
                received += part.stop - part.start
            if places is None:
                self._combine(turn, views, scale, out)
            else:
                for peer in (part.peer for part in turn.receives):
                    places[peer].copy_(views[peer])
        # Nobody may write to a buffer that a peer still reads.
        for peer in sources:
            self._ring(peer, _DONE, call)
        for peer in readers:
            self._await(peer, _DONE, call)
        return Traffic(sent * own.itemsize, received * own.itemsize)

    def _combine(self, turn: Round, views: list[Tensor], scale: float, out: Tensor | None) -> None:
        own = views[self._rank]
        if turn.combine == "replace":
            for peer, start, stop in turn.receives:
                own[start:stop].copy_(views[peer][start:stop])
        elif turn.receives:
            _, start, stop = turn.receives[0]
            ranks = sorted([self._rank, *(part.peer for part in turn.receives)])
            parts = [views[rank][start:stop] for rank in ranks]
            scratch = self._scratch.get(own.dtype)
            if scratch is None:
                scratch = torch.empty(CHUNK, dtype=accumulation_dtype(own.dtype))
                self._scratch[own.dtype] = scratch
            sum_in_order(own[start:stop] if out is None else out, parts, scratch, scale if turn.complete else 1.0)

    def _views(self, buffer: Tensor) -> list[Tensor] | None:
        """The same range of every rank's buffer, or None where `buffer` is not in shared memory."""
        address = buffer.data_ptr()
        for region in self._regions:
            if region.start <= address < region.stop:
                first = (address - region.start) // buffer.itemsize
                return [tensor[first : first + buffer.numel()] for tensor in region.tensors]
        return None

    def _ring(self, peer: int, number: int, call: str) -> None:
        try:
            self._sockets[peer].sendall(_BELL.pack(self._sequence, number, call.encode()[:58]))
        except TimeoutError as error:
            raise self._silent(peer, call) from error
        except OSError as error:
            raise self._gone(peer, call) from error

    def _await(self, peer: int, number: int, call: str) -> None:
        message = self._receive(peer, _BELL.size, call)
        sequence, theirs, label = _BELL.unpack(message)
        if (sequence, theirs, label.rstrip(b"\0")) != (self._sequence, number, call.encode()[:58]):
            raise CommunicationError(
                f"ranks disagree on what to communicate: rank {self._rank} is in call {self._sequence}, {call}; "
                f"rank {peer} is in call {sequence}, {label.rstrip(bytes(1)).decode(errors='replace')}. Every rank "
                "must run the same model with the same strategy and the same number of micro-batches"
            )

    def _receive(self, peer: int, size: int, call: str) -> bytes:
        message = b""
        while len(message) < size:
            try:
                piece = self._sockets[peer].recv(size - len(message))
            except TimeoutError as error:
                raise self._silent(peer, call) from error
            except OSError as error:
                raise self._gone(peer, call) from error
            if not piece:
                raise self._gone(peer, call)
            message += piece
        return message

    def _receive_descriptor(self, peer: int) -> int:
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sockets[peer], 1, 1)
        except OSError as error:
            raise self._gone(peer, "allocate") from error
        if not descriptors:
            raise self._gone(peer, "allocate")
        return descriptors[0]

    def _gone(self, peer: int, call: str) -> CommunicationError:
        return CommunicationError(f"rank {peer} is gone: rank {self._rank} waited for it in {call}")

    def _silent(self, peer: int, call: str) -> CommunicationError:
        return CommunicationError(
            f"rank {peer} did not answer within {self._timeout:g} s: rank {self._rank} waited for it in {call}"
        )


def _after_fork() -> None:
    for transport in list(_open):
        transport.forget_sockets()


os.register_at_fork(after_in_child=_after_fork)
