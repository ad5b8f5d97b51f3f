"""Collectives over the memory of CPUs: shared memory between ranks of one host, sockets between hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.comm.cpu.algorithm_choice import AlgorithmChoice, ranks_per_host
from paceline.comm.cpu.codecs import CODECS, Wire
from paceline.comm.cpu.compile import prepare
from paceline.comm.cpu.execute import execute
from paceline.comm.cpu.prepared import PreparedCollective, copy_kernel, prepare_direct_gather, prepare_handshake
from paceline.comm.cpu.registry import register
from paceline.comm.cpu.residuals import SavedResiduals
from paceline.comm.cpu.scratch import Scratch
from paceline.comm.cpu.shared_memory import SharedBuffers
from paceline.comm.cpu.signals import Signals, plain
from paceline.comm.cpu.tcp import TcpConnections
from paceline.comm.transport import CommunicationError, SilenceError, Transport, explain
from paceline.comm.watch import missing
from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.choice import Choice
from paceline.core.collectives.rounds import Algorithm, Traffic, chunk
from paceline.core.errors import UserError

_STAGING_BYTES = 1 << 20
_MOST_PREPARED = 4096
_ELEMENTWISE = ("all_reduce", "reduce", "broadcast")
"""Collectives that may be run on pieces of a buffer one after another."""


class CpuTransport:
    """Runs collectives between the ranks of one group, which are numbered by their position in it."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channels: dict[int, socket.socket],
        sockets: dict[int, socket.socket],
        timeout: float,
        wire: Wire = "full",
        world_ranks: Sequence[int] | None = None,
        identity: str = "",
    ) -> None:
        """Takes over connected sockets. A collective call.

        Args:
            rank: This rank.
            hosts: Of each rank.
            channels: Unix sockets to the other ranks of this host (`unix_sockets.connect`).
            sockets: TCP sockets to all other ranks (`tcp.connect`).
            timeout: Seconds after which a silent peer is given up.
            wire: What fp32 elements are sent as between hosts where they are summed.
            world_ranks: What errors call each rank, if not by its position in the group.
            identity: What tells it from other transports, the same on every rank (`watch.new_transport`).
        """
        self.identity = identity
        self._group = world_ranks if world_ranks is not None else range(len(hosts))
        self._codec = CODECS[wire] if wire != "full" else None
        self._rank, self._world_size = rank, len(hosts)
        self.hosts = tuple(hosts)
        self.ranks_per_host = ranks_per_host(hosts)
        # Where any do, all cut what must be staged into the same pieces.
        self._some_share = len(set(hosts)) < len(hosts)
        self._channels = channels
        for channel in channels.values():
            channel.settimeout(timeout)
        self._signals = Signals(rank, channels, timeout, world_ranks) if channels else None
        self._buffers = SharedBuffers(rank, channels)
        self._remote = tuple(sockets)
        self._connections = TcpConnections(rank, sockets, timeout, world_ranks) if sockets else None
        self.name = " and ".join(["shared memory"] * bool(channels) + ["tcp"] * bool(sockets)) or "alone"
        self._prepared: dict[tuple[object, ...], PreparedCollective] = {}
        self._scratch = Scratch()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._failure: str | None = None
        self._running: PreparedCollective | None = None
        register(self)
        self._choice = AlgorithmChoice(bool(sockets), self._codec is not None)
        if sockets:
            # Here, where every rank is, rather than in the first collective that needs it.
            self._choice.measure(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that ranks of this host can read. A collective call."""
        # New buffers may take the place of others, which collectives that were made ready would keep.
        self._prepared.clear()
        return self._buffers.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Transport.allocate_shared`: rank 0's part of a buffer."""
        if self._connections is not None:
            raise UserError(
                "strategy.share_parameters: the ranks of a shard group must be on one host, but "
                f"they are connected by {self.name}; leave share_parameters out, or set strategy.shard to the number "
                "of ranks of a host"
            )
        if not numel:
            return torch.empty(0, dtype=dtype)
        views = self._buffers.views(self.allocate(numel, dtype))
        assert views is not None
        return views[0]

    def run(
        self,
        collective: str,
        buffer: Tensor,
        label: str,
        scale: float = 1.0,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> Traffic:
        """Runs one collective in place; see `Transport.run`."""
        if not buffer.numel():
            # Peers that have something to move are told so.
            self._shake_hands(collective, buffer, label)
            return Traffic(0, 0)
        shard_address = 0 if shard is None else shard.data_ptr()
        key = (collective, label, buffer.data_ptr(), buffer.numel(), buffer.dtype, scale, shard_address)
        prepared = self._prepared.get(key)
        if prepared is None:
            # Peers read the shard, and none of the buffer that is filled.
            direct_gather = shard is not None and self._connections is None and collective.startswith("all_gather")
            reached = direct_gather or self._buffers.views(buffer) is not None
            if self._some_share and not reached:
                return self._run_staged(collective, buffer, label, scale, shard, once)
            prepared = self._prepare(collective, buffer, label, scale, shard)
            if reached and not once:
                # It keeps what it moves: memory that comes and goes is not for keeping.
                if len(self._prepared) >= _MOST_PREPARED:
                    self._prepared.clear()
                self._prepared[key] = prepared
        self._execute(prepared)
        return prepared.traffic

    def run_algorithm(self, algorithm: Algorithm, buffer: Tensor, label: str) -> None:
        """Runs any algorithm on a buffer from `allocate`."""
        local = self._buffers.views(buffer)
        assert local is not None
        ranks = self._rank, self._world_size
        self._execute(prepare("algorithm", label, algorithm, *ranks, buffer, local, 1.0, None, self._scratch))

    def inherit(self, other: Transport) -> None:
        """See `Transport.inherit`."""
        assert isinstance(other, CpuTransport)
        self._buffers.inherit(other._buffers)
        self._staging = other._staging

    def saved_residuals(self) -> SavedResiduals:
        """See `Transport.saved_residuals`."""
        return self._buffers.saved_residuals()

    def load_residuals(self, saved: SavedResiduals) -> None:
        """See `Transport.load_residuals`."""
        self._buffers.load_residuals(saved)

    def why(self, collective: str, size: int, bandwidth_optimal: bool = False) -> Choice:
        """Which algorithm takes least time for a buffer of `size` bytes, and what each would. A collective call.

        Args:
            collective: Such as "all_reduce".
            size: Bytes.
            bandwidth_optimal: Only those that move the fewest bytes.
        """
        return self._choice.why(self, collective, size, bandwidth_optimal)

    def abort(self, reason: str = "") -> None:
        """Ends all waiting for peers, here and there; see `Transport.abort`."""
        if reason:
            self._tell(reason)
        elif self._failure is None:
            self._failure = f"rank {self._rank} ended its connections itself"
        if self._signals is not None:
            self._signals.interrupt()
        if self._connections is not None:
            self._connections.interrupt()

    def close(self) -> None:
        """Ends the connections; a peer still waiting for this rank is told so by that."""
        self.abort()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Lets go of this process's ends; what a forked child has to say is nothing to peers."""
        self._failure = self._failure or "a forked process is no rank"
        for channel in self._channels.values():
            channel.close()
        if self._signals is not None:
            self._signals.close()
        if self._connections is not None:
            self._connections.close()

    def blocked_peers(self) -> Iterable[tuple[int, str]]:
        """See `Signals.blocked_peers`; none where ranks are connected by sockets alone."""
        return self._signals.blocked_peers() if self._signals is not None and self._failure is None else ()

    @property
    def number(self) -> int:
        """The number of the collective that this rank entered last."""
        return max((each.number for each in (self._signals, self._connections) if each is not None), default=0)

    @property
    def under_way(self) -> str:
        """The collective that this rank is in, in words; empty where it is in none."""
        return plain(running.text) if (running := self._running) is not None else ""

    @property
    def sent_bytes(self) -> int:
        """Bytes handed to sockets so far, headers included."""
        return self._connections.sent_bytes if self._connections is not None else 0

    # ---- making ready

    def _prepare(
        self, collective: str, buffer: Tensor, label: str, scale: float, shard: Tensor | None
    ) -> PreparedCollective:
        sent = shard if collective.partition("/")[0] == "all_gather" else None
        if sent is not None and self._connections is None:
            shards = self._buffers.views(sent)
            if shards is None:
                raise ValueError(f"{collective} of {label}: the shard, which peers read, was not allocated here")
            return prepare_direct_gather(collective, label, self._rank, buffer, shards)
        name = self._choice.of(self, collective, buffer)
        algorithm = find_algorithm(name, self.ranks_per_host)
        local = self._buffers.views(buffer) or {self._rank: buffer}
        out = None if sent is not None else shard
        codec = self._codec if self._choice.encodes(collective, buffer) else None
        residuals = self._buffers.residuals(buffer) if codec is not None else None
        ranks = self._rank, self._world_size
        prepared = prepare(
            collective, label, algorithm, *ranks, buffer, local, scale, out, self._scratch, codec, residuals
        )
        if sent is not None:
            start, stop = chunk(*ranks, buffer.numel())
            prepared.fill = copy_kernel(buffer[start:stop], sent)
        return prepared

    def _run_staged(
        self, collective: str, buffer: Tensor, label: str, scale: float, shard: Tensor | None, once: bool
    ) -> Traffic:
        """Runs a collective of a buffer that peers cannot read, by way of one that they can."""
        size = _STAGING_BYTES
        if collective.partition("/")[0] not in _ELEMENTWISE:
            # Its chunks are those of the whole buffer.
            size = max(size, 1 << (buffer.nbytes - 1).bit_length())
        if self._staging.numel() < size:
            # Ranks that run something else, and need no more memory, would not take part.
            self._shake_hands(collective, buffer, label)
            self._staging = self.allocate(size, torch.uint8)
        sent = received = 0
        encodes = self._choice.encodes(collective, buffer)
        for number, piece in enumerate(buffer.split(size // buffer.itemsize)):
            staged = self._staging[: piece.nbytes].view(buffer.dtype)
            staged.copy_(piece)
            # A residual is one piece's, not that of the memory that all pass through.
            traffic = self.run(collective, staged, f"{label}, part {number}" if encodes else label, scale, shard)
            piece.copy_(staged)
            sent, received = sent + traffic.sent, received + traffic.received
        if once:
            self._prepared.clear()  # which keep what they move
            self._staging = torch.empty(0, dtype=torch.uint8)
        return Traffic(sent, received)

    # ---- running

    def _shake_hands(self, collective: str, buffer: Tensor, label: str) -> None:
        self._execute(prepare_handshake(collective, label, self._rank, buffer, self._channels.keys(), self._remote))

    def _execute(self, prepared: PreparedCollective) -> None:
        if (failed := self._failure) is not None:
            raise CommunicationError(failed)
        self._running = prepared
        try:
            execute(prepared, self._signals, self._connections)
        except BaseException as error:
            if self._failure is not None and isinstance(error, CommunicationError):
                # It was aborted meanwhile: the end of the connections is the consequence.
                raise CommunicationError(self._failure) from error
            if isinstance(error, SilenceError):
                # Before peers are told, who then leave what they wait in.
                told = "; ".join([str(error), *missing(self.identity, self.number, self._group)])
                self._tell(told)
                raise CommunicationError(told) from None
            # Peers must not wait for what does not come.
            self._tell(explain(error))
            raise
        self._running = None

    def _tell(self, reason: str) -> None:
        """Tells peers why this rank will not go on, once."""
        if self._failure is None:
            self._failure = reason
            for each in (self._signals, self._connections):
                if each is not None:
                    each.abort(reason, inside=self._running is not None)
