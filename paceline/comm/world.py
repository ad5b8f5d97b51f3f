"""The job this process belongs to, and its place in it."""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions' defaults hold the process group of the time it is imported, which torch's optimizers do late. A group
# that is held is not ended with the job, and its threads may then abort the interpreter's exit.
import torch.distributed.nn.functional

from paceline.comm.environment import choose_device, read_environment
from paceline.core.errors import UserError


@dataclass(frozen=True)
class World:
    """This process's place in the job, as `pl.init()` returns it.

    Attributes:
        rank: Number among all processes, from 0; not stable across restarts.
        world_size: Number of processes.
        local_rank: Number among the processes of this host: which of its devices this rank uses.
        local_world_size: Number of processes on this host.
        device: Where this rank computes: `pl.parallelize` moves the model there, the loop moves its data there.
        timeout: Seconds after which a silent peer is given up.

    Example:
        >>> world = pl.init()
        >>> batch = torch.randn(8, 4).to(world.device)
        >>> if world.rank == 0:
        ...     print(f"{world.world_size} ranks")
        1 ranks
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0

    @property
    def backend(self) -> str:
        """What moves tensors: "nccl" on GPUs, "gloo" on CPUs."""
        return "nccl" if self.device.type == "cuda" else "gloo"


_world: World | None = None
_FILE = "file://"
_LETTING_GO_SECONDS = 0.005


def init(device: str | None = None, timeout: float = 600.0) -> World:
    """Joins the job found in the environment, or is a job of one process.

    Understood are paceline's own launcher, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT) and Slurm's. Calling it again returns the same world.

    Args:
        device: "cpu" or "cuda"; by default a GPU for each local rank where the host has enough, else the CPU.
        timeout: Seconds after which a silent peer is given up.

    Returns:
        This process's rank and device, and the number of ranks.

    Raises:
        UserError: The variables contradict each other, the address cannot be bound, or a GPU is missing.

    Example:
        >>> world = pl.init()
        >>> world.rank, world.world_size
        (0, 1)
    """
    global _world
    if _world is not None:
        return _world
    rank, world_size, local_rank, local_world_size, method = read_environment(os.environ)
    chosen = choose_device(device, local_rank, local_world_size)
    world = World(rank, world_size, local_rank, local_world_size, chosen, timeout)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world_size > 1:
        store = None
        if method.startswith(_FILE):
            # All ranks are on this host; its name need not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            # Opened here, as torch would take the path for an address, which ends at a question mark.
            store = dist.FileStore(method.removeprefix(_FILE), world_size)  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=timeout))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if world.backend == "nccl" else "gloo",
                init_method=method if store is None else None,
                store=store,
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
    """Leaves the job; `pl.init()` may then join another. Safe to call twice.

    A process that ends leaves by itself. Call it where it goes on without the others, such as in a notebook or a test.
    Models that are still parallel are of no more use: `pl.release` them first.
    """
    global _world
    if dist.is_initialized():
        # A thread of Gloo's lets go of the last collective's tensors under the interpreter's lock. Some holders of a
        # process group, such as DDP, end it with that lock held and wait for the thread: it gets the lock before.
        time.sleep(_LETTING_GO_SECONDS)
        dist.destroy_process_group()
    _world = None
