"""Opens transports between ranks, the fastest that their hosts and devices allow, and what goes with a device."""

from __future__ import annotations

import os
import platform
import socket
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from paceline.comm.control import all_gather_json
from paceline.comm.cpu import tcp_connect, unix_sockets
from paceline.comm.cpu.codecs import Wire
from paceline.comm.cpu.signals import MOST_RANKS
from paceline.comm.cpu.transport import CpuTransport
from paceline.comm.gpu_streams import CudaClock, CudaStream
from paceline.comm.nccl import NcclTransport, last_words
from paceline.comm.streams import CommStream, HostClock, ThreadStream
from paceline.comm.transport import Transport
from paceline.comm.watch import new_transport
from paceline.comm.world import World
from paceline.core.errors import UserError


class Wanted(NamedTuple):
    """What a transport is to be.

    Attributes:
        groups: Disjoint groups that together hold every rank, the same on every rank; the transport is that of the
            group with this rank, in which it is numbered by its position. By default one group of all.
        wire: What fp32 elements are sent as between hosts where they are summed.
        rare: Whether little is sent, which between GPUs needs no communicator of its own: each takes memory, and the
            job has one already.
    """

    groups: Sequence[Sequence[int]] | None = None
    wire: Wire = "full"
    rare: bool = False


def open_transport(world: World, kind: str | None = None, wire: Wire = "full") -> Transport:
    """A transport between all ranks: see `open_transports`. A collective call."""
    return open_transports(world, {"": Wanted(wire=wire)}, kind)[""]


def open_transports(world: World, wanted: Mapping[str, Wanted], kind: str | None = None) -> dict[str, Transport]:
    """Transports between the ranks of a group each, the fastest that their hosts and devices allow. A collective call.

    Ranks tell each other where they are once for all of them.

    Args:
        world: The job.
        wanted: By a name of the caller's; the same on every rank.
        kind: "auto": shared memory inside a host, sockets between hosts; "tcp": sockets between all ranks. By default
            what PACELINE_TRANSPORT says, else "auto".

    Raises:
        UserError: There is no such kind of transport, or GPUs are asked to send fewer bytes.
    """
    everyone = range(world.world_size)
    groups = {name: [list(group) for group in each.groups or [everyone]] for name, each in wanted.items()}
    mine = {name: next(group for group in each if world.rank in group) for name, each in groups.items()}
    if world.backend == "nccl":
        return {name: _open_nccl(world, each, groups[name], mine[name]) for name, each in wanted.items()}
    kind = kind or os.environ.get("PACELINE_TRANSPORT", "auto")
    if kind not in ("auto", "tcp"):
        raise UserError(f"PACELINE_TRANSPORT: expected auto or tcp, got {kind!r}")
    hosts = _hosts(world, kind)
    local = [[rank for rank in group if hosts[rank] == hosts[world.rank]] for group in mine.values()]
    found = unix_sockets.connect(world.rank, local, all_gather_json, world.timeout, world.secret)
    if found is None:
        if world.rank == 0:
            _warn_of_sockets("some ranks of a host cannot reach each other over a Unix socket")
        hosts, local, found = [str(rank) for rank in everyone], [[world.rank] for _ in wanted], [{} for _ in wanted]
    sockets: list[dict[int, socket.socket]] = [{} for _ in wanted]
    if len(set(hosts)) > 1:
        remote = [
            [rank for rank in group if rank not in neighbours]
            for group, neighbours in zip(mine.values(), local, strict=True)
        ]
        sockets = tcp_connect.connect(
            world.rank, list(mine.values()), remote, all_gather_json, world.timeout, world.secret
        )
    opened: dict[str, Transport] = {}
    for (name, group), neighbours, channels, remote_sockets in zip(mine.items(), local, found, sockets, strict=True):
        opened[name] = CpuTransport(
            group.index(world.rank),
            [hosts[rank] for rank in group],
            # By position in the group, not among those of this host.
            {group.index(neighbours[index]): channel for index, channel in channels.items()},
            remote_sockets,
            world.timeout,
            wanted[name].wire,
            group,
            new_transport(),
        )
    return opened


def _open_nccl(world: World, wanted: Wanted, groups: list[list[int]], mine: list[int]) -> Transport:
    if wanted.wire != "full":
        raise UserError("strategy.wire: NCCL sends gradients as they are; leave wire at full")
    if wanted.rare and len(groups) == 1:
        return NcclTransport(_group_of_all(), world.device, owns=False)
    return NcclTransport(_open_groups(groups, mine, "nccl", timedelta(seconds=world.timeout)), world.device)


def _hosts(world: World, kind: str) -> list[str]:
    """The host of each rank: a name that those share who can share memory."""
    why = _no_memory() if kind == "auto" else ""
    possible = kind == "auto" and not why
    if why:
        _warn_of_sockets(why)
    hosts: list[str] = all_gather_json(_host() if possible else f"rank {world.rank}", "hosts of ranks")
    crowded = {host for host in hosts if hosts.count(host) > MOST_RANKS}
    if crowded and world.rank == 0:
        _warn_of_sockets(f"more than {MOST_RANKS} ranks are on a host")
    return [f"rank {rank}" if host in crowded else host for rank, host in enumerate(hosts)]


def _no_memory() -> str:
    """Why ranks of this host cannot share memory; empty if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"on {platform.machine()} stores may be seen in another order than on x86-64, for which it is written"
    try:
        os.close(os.memfd_create("paceline"))
    except (AttributeError, OSError):
        return "the kernel, or a sandbox, gives no memory to share (memfd_create)"
    return ""


def _warn_of_sockets(why: str) -> None:
    warnings.warn(f"ranks of one host talk over sockets, which are slower than shared memory: {why}", stacklevel=3)


def _open_groups(
    groups: Sequence[Sequence[int]], mine: Sequence[int], backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Torch's process group of `mine`; every rank takes part in opening each."""
    try:
        opened = [dist.new_group(list(group), timeout=timeout, backend=backend) for group in groups]
    except dist.DistBackendError as error:
        raise UserError(
            f"NCCL could not connect ranks {', '.join(map(str, mine))}: {last_words(error)}. Each rank needs a GPU of "
            "its own; with NCCL_DEBUG=INFO in the environment NCCL says more"
        ) from error
    found: dist.ProcessGroup = opened[groups.index(mine)]
    return found


def _group_of_all() -> dist.ProcessGroup:
    """The group that the job was joined with, whose communicator is there in any case."""
    found: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return found


def open_stream(world: World, name: str) -> CommStream:
    """A stream for collectives on this rank's device."""
    return CudaStream(world.device) if world.backend == "nccl" else ThreadStream(name)


def open_clock(world: World) -> HostClock | CudaClock:
    """The clock of this rank's device."""
    return CudaClock(world.device) if world.device.type == "cuda" else HostClock()


def _host() -> str:
    """Names this host and network; containers with a network each are hosts of their own."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{name} {network.readlink()}" if network.is_symlink() else name
