"""Opens transports between ranks, the fastest that their hosts and devices allow, and what goes with a device."""

from __future__ import annotations

import os
import platform
import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

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


def open_transport(
    world: World,
    groups: Sequence[Sequence[int]] | None = None,
    kind: str | None = None,
    wire: Wire = "full",
    rare: bool = False,
) -> Transport:
    """A transport between the ranks of a group, the fastest that their hosts and devices allow. A collective call.

    Args:
        world: The job.
        groups: Disjoint groups that together hold every rank, the same on every rank; the transport is that of the
            group with this rank, in which it is numbered by its position. By default one group of all.
        kind: "auto": shared memory inside a host, sockets between hosts; "tcp": sockets between all ranks. By default
            what PACELINE_TRANSPORT says, else "auto".
        wire: What fp32 elements are sent as between hosts where they are summed.
        rare: Whether little is sent, which between GPUs needs no communicator of its own: each takes memory, and the
            job has one already.

    Raises:
        UserError: There is no such kind of transport, or GPUs are asked to send fewer bytes.
    """
    groups = [list(range(world.world_size))] if groups is None else [list(group) for group in groups]
    mine = next(group for group in groups if world.rank in group)
    if world.backend == "nccl":
        if wire != "full":
            raise UserError("strategy.wire: NCCL sends gradients as they are; leave wire at full")
        if rare and len(groups) == 1:
            return NcclTransport(_group_of_all(), world.device, owns=False)
        return NcclTransport(_open_groups(groups, mine, "nccl", timedelta(seconds=world.timeout)), world.device)
    kind = kind or os.environ.get("PACELINE_TRANSPORT", "auto")
    if kind not in ("auto", "tcp"):
        raise UserError(f"PACELINE_TRANSPORT: expected auto or tcp, got {kind!r}")
    hosts = _hosts(world, kind)
    local = [rank for rank in mine if hosts[rank] == hosts[world.rank]]
    channels = unix_sockets.connect(world.rank, local, all_gather_json, world.timeout, world.secret)
    if channels is None:
        if world.rank == 0:
            _warn_of_sockets("some ranks of a host cannot reach each other over a Unix socket")
        channels, hosts, local = {}, [str(rank) for rank in range(world.world_size)], [world.rank]
    # By position in the group, not among those of this host.
    channels = {mine.index(local[index]): channel for index, channel in channels.items()}
    remote = [rank for rank in mine if rank not in local]
    sockets: dict[int, socket.socket] = {}
    if len(set(hosts)) > 1:
        sockets = tcp_connect.connect(world.rank, mine, remote, all_gather_json, world.timeout, world.secret)
    own_hosts = [hosts[rank] for rank in mine]
    return CpuTransport(
        mine.index(world.rank), own_hosts, channels, sockets, world.timeout, wire, mine, new_transport()
    )


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
