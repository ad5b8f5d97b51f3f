"""The job this process belongs to: ranks, hosts, devices, and the small messages between them."""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import socket
import struct
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions' defaults hold the process group of the time it is imported, which torch's optimizers do late. A group
# that is held is not ended with the job, and its threads may then abort the interpreter's exit.
import torch.distributed.nn.functional

from paceline.comm import tcp, unix_sockets
from paceline.comm.codecs import Wire
from paceline.comm.cpu import CpuTransport
from paceline.comm.nccl import NcclTransport
from paceline.comm.signals import MOST_RANKS
from paceline.comm.streams import CommStream, CudaClock, CudaStream, HostClock, ThreadStream
from paceline.comm.transport import Transport
from paceline.errors import UserError


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int = 0
    """Number among all processes; not stable across restarts."""
    world_size: int = 1
    local_rank: int = 0
    """Number among the processes of this host: which of its devices this rank uses."""
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0
    """Seconds after which a silent peer is given up."""

    @property
    def backend(self) -> str:
        """What moves tensors: "nccl" on GPUs, "gloo" on CPUs."""
        return "nccl" if self.device.type == "cuda" else "gloo"


_world: World | None = None
_LETTING_GO_SECONDS = 0.005
_LENGTH = struct.Struct("<Q")
_AT_FIRST = 1024
"""Bytes of a control message that are gathered before its length is known; most messages end there."""


def init(device: str | None = None, timeout: float = 600.0) -> World:
    """Joins the job found in the environment, or is a job of one process.

    Understood are paceline's own launcher, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT) and Slurm's. Calling it again returns the same world.

    Args:
        device: "cpu" or "cuda"; by default a GPU for each local rank where the host has enough, else the CPU.
        timeout: Seconds after which a silent peer is given up.

    Raises:
        UserError: The variables contradict each other, the address cannot be bound, or a GPU is missing.
    """
    global _world
    if _world is not None:
        return _world
    rank, world_size, local_rank, local_world_size, method = _from_environment(os.environ)
    world = World(
        rank, world_size, local_rank, local_world_size, _device(device, local_rank, local_world_size), timeout
    )
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world_size > 1:
        if method.startswith("file:"):
            # All ranks are on this host; its name need not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if world.backend == "nccl" else "gloo",
                init_method=method,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=world.device if world.backend == "nccl" else None,
            )
        except dist.DistError as error:
            raise UserError(
                f"rank {rank} could not join the job at {method}: {str(error).splitlines()[0]}. If the port is in "
                "use by another job, set MASTER_PORT to a free one on every rank (torchrun: --master-port); if ranks "
                f"are missing, see that all {world_size} were started and reach that address"
            ) from error
    atexit.register(shutdown)
    _world = world
    return world


def current_world() -> World:
    """The world that `init` joined; joins it if nobody has."""
    return _world if _world is not None else init()


def shutdown() -> None:
    """Leaves the job. Safe to call twice."""
    global _world
    if dist.is_initialized():
        # A thread of Gloo's lets go of the last collective's tensors under the interpreter's lock. Some holders of a
        # process group, such as DDP, end it with that lock held and wait for the thread: it gets the lock before.
        time.sleep(_LETTING_GO_SECONDS)
        dist.destroy_process_group()
    _world = None


def all_gather_json(value: Any) -> list[Any]:
    """Every rank's JSON-ready `value`, in rank order. For small control data; JSON, so nothing is executed."""
    world = current_world()
    if world.world_size == 1:
        return [value]
    text = json.dumps(value).encode()
    message = _LENGTH.pack(len(text)) + text
    rows = _gather_bytes(message[:_AT_FIRST], _AT_FIRST)
    longest = max(_LENGTH.unpack_from(row)[0] for row in rows)
    if longest > _AT_FIRST - _LENGTH.size:
        rows = _gather_bytes(message, longest + _LENGTH.size)
    return [json.loads(row[_LENGTH.size :][: _LENGTH.unpack_from(row)[0]]) for row in rows]


def _gather_bytes(message: bytes, size: int) -> list[bytes]:
    """Every rank's message, padded to `size`."""
    padded = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in range(current_world().world_size)]
    dist.all_gather(rows, padded)
    return [row.numpy().tobytes() for row in rows]


def barrier() -> None:
    """Returns when every rank has called it."""
    all_gather_json(None)


def open_transport(
    world: World, groups: Sequence[Sequence[int]] | None = None, kind: str | None = None, wire: Wire = "full"
) -> Transport:
    """A transport between the ranks of a group, the fastest that their hosts and devices allow. A collective call.

    Args:
        world: The job.
        groups: Disjoint groups that together hold every rank, the same on every rank; the transport is that of the
            group with this rank, in which it is numbered by its position. By default one group of all.
        kind: "auto": shared memory inside a host, sockets between hosts; "tcp": sockets between all ranks. By default
            what PACELINE_TRANSPORT says, else "auto".
        wire: What fp32 elements are sent as between hosts where they are summed.

    Raises:
        UserError: There is no such kind of transport, or GPUs are asked to send fewer bytes.
    """
    groups = [list(range(world.world_size))] if groups is None else [list(group) for group in groups]
    mine = next(group for group in groups if world.rank in group)
    if world.backend == "nccl":
        if wire != "full":
            raise UserError("strategy.wire: NCCL sends gradients as they are; leave wire at full")
        return NcclTransport(_open_groups(groups, mine, "nccl", timedelta(seconds=world.timeout)), world.device)
    kind = kind or os.environ.get("PACELINE_TRANSPORT", "auto")
    if kind not in ("auto", "tcp"):
        raise UserError(f"PACELINE_TRANSPORT: expected auto or tcp, got {kind!r}")
    hosts = _hosts(world, kind)
    near = [rank for rank in mine if hosts[rank] == hosts[world.rank]]
    channels = unix_sockets.connect(world.rank, near, all_gather_json, world.timeout)
    if channels is None:
        if world.rank == 0:
            _warn_of_sockets("some ranks of a host cannot reach each other over a Unix socket")
        channels, hosts, near = {}, [str(rank) for rank in range(world.world_size)], [world.rank]
    # By position in the group, not among the neighbours.
    channels = {mine.index(near[index]): channel for index, channel in channels.items()}
    far = [rank for rank in mine if rank not in near]
    sockets: dict[int, socket.socket] = {}
    if len(set(hosts)) > 1:
        sockets = tcp.connect(world.rank, mine, far, all_gather_json, world.timeout)
    places = [hosts[rank] for rank in mine]
    return CpuTransport(mine.index(world.rank), places, channels, sockets, world.timeout, wire)


def _hosts(world: World, kind: str) -> list[str]:
    """The host of each rank: a name that those share who can share memory."""
    why = _no_memory() if kind == "auto" else ""
    possible = kind == "auto" and not why
    if why:
        _warn_of_sockets(why)
    hosts: list[str] = all_gather_json(_host() if possible else f"rank {world.rank}")
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
    opened = [dist.new_group(list(group), timeout=timeout, backend=backend) for group in groups]
    found: dist.ProcessGroup = opened[groups.index(mine)]
    return found


def open_stream(world: World, name: str) -> CommStream:
    """A stream for collectives on this rank's device."""
    return CudaStream(world.device) if world.backend == "nccl" else ThreadStream(name)


def open_clock(world: World) -> HostClock | CudaClock:
    """The clock of this rank's device."""
    return CudaClock() if world.device.type == "cuda" else HostClock()


def _host() -> str:
    """Names this host and network; containers with a network each are hosts of their own."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{name} {network.readlink()}" if network.is_symlink() else name


def _device(wanted: str | None, local_rank: int, local_world_size: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        wanted = "cuda" if count >= local_world_size else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != "cuda":
        raise UserError(f"device: expected cpu or cuda, got {wanted!r}")
    if local_rank >= count:
        raise UserError(
            f"device: local rank {local_rank} needs a GPU of its own, but this host shows {count}; start at most "
            f"{count} ranks on it or use the CPU"
        )
    return torch.device("cuda", local_rank)


def _from_environment(env: Mapping[str, str]) -> tuple[int, int, int, int, str]:
    """(rank, world size, local rank, local world size, rendezvous) from a launcher's variables."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK", 0)
        local_size = _number(env, "LOCAL_WORLD_SIZE", size if "PACELINE_RENDEZVOUS" in env else 1)
        method = env.get("PACELINE_RENDEZVOUS", "env://")
        if size > 1 and method == "env://" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise UserError(
                f"WORLD_SIZE={size} but MASTER_ADDR and MASTER_PORT are not both set; start the job with torchrun, "
                "with `paceline train --workers N`, or set them on every rank"
            )
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "SLURM_STEP_NODELIST" in env:
        rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
        local_rank = _number(env, "SLURM_LOCALID", 0)
        local_size = int(re.split(r"[(,]", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0])
        # A port from the job's number, as several jobs may share a host.
        port = env.get("MASTER_PORT", str(20000 + _number(env, "SLURM_JOB_ID", 0) % 20000))
        address = env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        method = f"tcp://{address}:{port}"
    else:
        return 0, 1, 0, 1, ""
    if not 0 <= rank < size:
        raise UserError(f"rank {rank} of {size}: expected 0 <= rank < world size; check RANK and WORLD_SIZE")
    return rank, size, local_rank, local_size, method


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],x" gives "gpu03"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise UserError(f"{name}: expected a whole number, got {value!r}") from None
