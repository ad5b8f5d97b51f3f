"""Plans over the memory of CPUs: shared memory between ranks of one host, sockets between hosts."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from paceline.comm.algorithms import LEAST, SUMS, find_plan
from paceline.comm.calls import Call, copying, meeting, prepare, prepare_gather
from paceline.comm.choice import Choice, Topology, choose
from paceline.comm.codecs import CODECS, Wire
from paceline.comm.measure import measure
from paceline.comm.plan import Plan, Traffic, shard
from paceline.comm.scratch import Room
from paceline.comm.shared_memory import SharedBuffers
from paceline.comm.signals import Signals
from paceline.comm.sums import accumulation_dtype
from paceline.comm.tcp import TcpLinks
from paceline.comm.transport import CommunicationError, Transport
from paceline.errors import UserError

_STAGING_BYTES = 1 << 20
_MOST_CALLS = 4096
_ELEMENTWISE = ("all_reduce", "reduce", "broadcast")
"""Collectives that may be run on pieces of a buffer one after another."""

_open: weakref.WeakSet[CpuTransport] = weakref.WeakSet()


class CpuTransport:
    """Runs plans between the ranks of one group."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channels: dict[int, socket.socket],
        sockets: dict[int, socket.socket],
        timeout: float,
        wire: Wire = "full",
    ) -> None:
        """Takes over connected sockets. A collective call.

        Args:
            rank: This rank.
            hosts: Of each rank.
            channels: Unix sockets to the other ranks of this host (`unix_sockets.connect`).
            sockets: TCP sockets to all other ranks (`tcp.connect`).
            timeout: Seconds after which a silent peer is given up.
            wire: What fp32 elements are sent as between hosts where they are summed.
        """
        self._codec = CODECS[wire] if wire != "full" else None
        self._rank = rank
        self._world_size = len(hosts)
        self.hosts = tuple(hosts)
        self.ranks_per_host = _ranks_per_host(hosts)
        # Where any do, all cut what must be staged into the same pieces.
        self._some_share = len(set(hosts)) < len(hosts)
        self._channels = channels
        for channel in channels.values():
            channel.settimeout(timeout)
        self._signals = Signals(rank, channels, timeout) if channels else None
        self._buffers = SharedBuffers(rank, channels)
        self._far = tuple(sockets)
        self._links = TcpLinks(rank, sockets, timeout) if sockets else None
        self.name = " and ".join(["shared memory"] * bool(channels) + ["tcp"] * bool(sockets)) or "alone"
        self._calls: dict[tuple[object, ...], Call] = {}
        self._room = Room()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._failure: str | None = None
        self._topology: Topology | None = None
        _open.add(self)
        if self._links is not None:
            # Here, where every rank is, rather than in the first call that needs it.
            self._topology = measure(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that ranks of this host can read. A collective call."""
        # New buffers may take the place of others, which calls that were made ready would keep.
        self._calls.clear()
        return self._buffers.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Transport.allocate_shared`: rank 0's part of a buffer."""
        if self._links is not None:
            raise UserError(
                "strategy.share_parameters: the ranks that hold one copy of the parameters must be on one host, but "
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
            self._execute(meeting(collective, label, self._rank, buffer, self._channels.keys(), self._far))
            return Traffic(0, 0)
        beside = 0 if shard is None else shard.data_ptr()
        key = (collective, label, buffer.data_ptr(), buffer.numel(), buffer.dtype, scale, beside)
        call = self._calls.get(key)
        if call is None:
            ours = self._buffers.views(buffer) is not None
            gathers_beside = shard is not None and self._links is None and collective.startswith("all_gather")
            if self._some_share and not ours and not gathers_beside:
                return self._run_staged(collective, buffer, label, scale, shard)
            call = self._prepare(collective, buffer, label, scale, shard)
            if (ours or gathers_beside) and not once:
                # It keeps what it moves: memory that comes and goes is not for keeping.
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                self._calls[key] = call
        self._execute(call)
        return call.traffic

    def run_plan(self, plan: Plan, buffer: Tensor, label: str) -> None:
        """Runs any plan on a buffer from `allocate`."""
        near = self._buffers.views(buffer)
        assert near is not None
        self._execute(prepare("plan", label, plan, self._rank, self._world_size, buffer, near, 1.0, None, self._room))

    def inherit(self, other: Transport) -> None:
        """See `Transport.inherit`."""
        assert isinstance(other, CpuTransport)
        self._buffers.inherit(other._buffers)
        self._staging = other._staging

    def why(self, collective: str, size: int, least: bool = False) -> Choice:
        """Which algorithm takes least time for a buffer of `size` bytes, and what each would. A collective call."""
        if self._topology is None:
            self._topology = measure(self)
        return choose(collective, size, self._topology, least)

    def interrupt(self) -> None:
        """Wakes a thread that waits for a peer."""
        if self._signals is not None:
            self._signals.interrupt()
        if self._links is not None:
            self._links.interrupt()

    def close(self) -> None:
        """Ends the connections; a peer still waiting for this rank is told so by that."""
        self.interrupt()
        self.forget_sockets()

    def forget_sockets(self) -> None:
        """Lets go of this end; in a forked child, so that the parent's death is seen while the child lives."""
        for channel in self._channels.values():
            channel.close()
        if self._signals is not None:
            self._signals.close()
        if self._links is not None:
            self._links.close()

    @property
    def sent_bytes(self) -> int:
        """Bytes handed to sockets so far, headers included."""
        return self._links.sent_bytes if self._links is not None else 0

    # ---- making ready

    def _algorithm(self, collective: str, buffer: Tensor) -> str:
        """The collective with the algorithm to run it by.

        Without a name it is the fastest of those that move the fewest bytes. But not inside a host, where the default
        adds in the order of the ranks and makes a sum the same to the bit wherever a buffer is cut; nor for low
        precision, where the default rounds a sum only once.
        """
        name, _, algorithm = collective.partition("/")
        algorithm, at, root = algorithm.partition("@")
        if not algorithm and self._encodes(collective, buffer) and name in LEAST:
            # In one hop between hosts, so that nothing is rounded twice.
            return f"{name}/hierarchical" if self.ranks_per_host > 1 else collective
        if algorithm == "auto":
            return f"{name}/{self.why(name, buffer.nbytes).algorithm}{at}{root}"
        rounds = name in SUMS and accumulation_dtype(buffer.dtype) != buffer.dtype
        if algorithm or self._links is None or name not in LEAST or rounds or buffer.numel() % self._world_size:
            return collective
        return f"{name}/{self.why(name, buffer.nbytes, least=True).algorithm}"

    def _prepare(self, collective: str, buffer: Tensor, label: str, scale: float, beside: Tensor | None) -> Call:
        gathers = beside is not None and collective.partition("/")[0] == "all_gather"
        if gathers and self._links is None:
            assert beside is not None
            shards = self._buffers.views(beside)
            if shards is None:
                raise ValueError(f"{collective} of {label}: the shard, which peers read, was not allocated here")
            return prepare_gather(collective, label, self._rank, buffer, shards)
        name = self._algorithm(collective, buffer)
        plan = find_plan(name, self.ranks_per_host)
        near = self._buffers.views(buffer) or {self._rank: buffer}
        out = None if gathers else beside
        codec = self._codec if self._encodes(collective, buffer) else None
        call = prepare(
            collective, label, plan, self._rank, self._world_size, buffer, near, scale, out, self._room, codec
        )
        if gathers:
            assert beside is not None
            start, stop = shard(self._rank, self._world_size, buffer.numel())
            call.first = copying(buffer[start:stop], beside)
        return call

    def _encodes(self, collective: str, buffer: Tensor) -> bool:
        """Whether what a collective sends between hosts is encoded."""
        sums = collective.partition("/")[0] in SUMS
        return self._codec is not None and self._links is not None and sums and buffer.dtype == torch.float32

    def _run_staged(self, collective: str, buffer: Tensor, label: str, scale: float, beside: Tensor | None) -> Traffic:
        """Runs a collective of a buffer that peers cannot read, by way of one that they can."""
        size = _STAGING_BYTES
        if collective.partition("/")[0] not in _ELEMENTWISE:
            # Its shards are those of the whole buffer.
            size = max(size, 1 << (buffer.nbytes - 1).bit_length())
        if self._staging.numel() < size:
            # Ranks that call something else, and need no more room, would not take part.
            self._execute(meeting(collective, label, self._rank, buffer, self._channels.keys(), self._far))
            self._staging = self.allocate(size, torch.uint8)
        sent = received = 0
        for piece in buffer.split(size // buffer.itemsize):
            staged = self._staging[: piece.nbytes].view(buffer.dtype)
            staged.copy_(piece)
            traffic = self.run(collective, staged, label, scale, beside)
            piece.copy_(staged)
            sent, received = sent + traffic.sent, received + traffic.received
        return Traffic(sent, received)

    # ---- running

    def _execute(self, call: Call) -> None:
        if self._failure is not None:
            raise CommunicationError(self._failure)
        try:
            self._follow(call)
        except BaseException as error:
            # Peers must not wait for what does not come.
            self._failure = str(error) if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
            if self._signals is not None:
                self._signals.give_up(self._failure)
            if self._links is not None:
                self._links.give_up(self._failure)
            raise

    def _follow(self, call: Call) -> None:
        signals, links = self._signals, self._links
        if call.first is not None:
            call.first()
        if links is not None:
            links.begin(call.digest, call.text)
        if signals is None:
            for step in call.steps:
                for pack in step.packs:
                    pack()
                if links is not None:
                    links.exchange(step.begun, step.sends, step.receives, _nothing)
                for work in (*step.work, *step.finish):
                    work()
            return
        signals.begin(call.digest, call.text)
        for step in call.steps:
            for pack in step.packs:
                # Before peers look: what is sent rounded is kept rounded.
                pack()
            if step.announces:
                signals.publish(step.begun)
            for peer, stage in step.before:
                signals.wait(peer, stage)
            if links is not None and (step.sends or step.receives):
                links.exchange(step.begun, step.sends, step.receives, signals.check)
            for peer in step.sources:
                signals.wait(peer, step.begun)
            for work in step.work:
                work()
            if step.confirms:
                signals.publish(step.done)
            if step.finish:
                for peer in step.readers:
                    signals.wait(peer, step.done)
                for work in step.finish:
                    work()
        for peer, stage in call.last:
            signals.wait(peer, stage)


def _nothing() -> None:
    pass


def _ranks_per_host(hosts: Sequence[str]) -> int:
    """Ranks on each host, if they are as many on each and neighbours; else 0."""
    each = [len(list(group)) for _, group in groupby(hosts)]
    return each[0] if len(set(each)) == 1 and len(each) == len(set(hosts)) else 0


def _after_fork() -> None:
    for transport in list(_open):
        transport.forget_sockets()


os.register_at_fork(after_in_child=_after_fork)
