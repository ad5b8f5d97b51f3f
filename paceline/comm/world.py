"""The job this process belongs to, and its place in it."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions' defaults hold the process group of the time it is imported, which torch's optimizers do late. A group
# that is held is not ended with the job, and its threads may then abort the interpreter's exit.
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from paceline.comm import meeting, watch
from paceline.comm.cpu import registry
from paceline.comm.devices import choose, index_of, look, tell_all
from paceline.comm.environment import JOINING, read_environment
from paceline.comm.folder_store import FolderStore
from paceline.comm.gpu_streams import let_end
from paceline.comm.meeting import share_secret
from paceline.comm.nccl import abort_process_group, is_of_nccl, last_words
from paceline.comm.transport import CommunicationError, Exchange
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
        secret: What the ranks of this job know each other by.

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
    secret: bytes = field(default=b"", repr=False)

    @property
    def backend(self) -> str:
        """What moves tensors: "nccl" on GPUs, "gloo" on CPUs."""
        return "nccl" if self.device.type == "cuda" else "gloo"


_world: World | None = None
_FILE = "file://"
STORE = "store://"
"""Begins the name of a store that somebody else keeps for several jobs: its address, a slash, the job's name in it."""
_LETTING_GO_SECONDS = 0.005
_ENDING_SECONDS = 10.0
_JOINING_SECONDS = 60.0
"""Ranks start at different times, and are waited for at least so long: none is silent yet."""
_failed = False
_is_forked = False
"""Whether this process was forked by a rank of the job."""
_folder_store: Any = None
"""Torch's own code, which calls it, does not keep it."""
_kept: list[Any] = []
"""Process groups of Gloo's with messages that others will not answer. To end one is to wait for its time limit."""


def init(device: str | None = None, timeout: float = 600.0) -> World:
    """Joins the job found in the environment, or is a job of one process.

    Understood are paceline's own launcher, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT) and Slurm's. Calling it again returns the same world.

    Args:
        device: "cpu" or "cuda", the same on every rank; by default a GPU for each rank where all have one of their
            own, else the CPU. A process that is shown one GPU alone takes that.
        timeout: Seconds after which a silent peer is given up; before ranks have met, at least 60.

    Returns:
        This process's rank and device, and the number of ranks.

    Raises:
        UserError: The variables contradict each other, the address cannot be bound, or a GPU is missing.
        CommunicationError: It is known, from who started this process, that another rank will not come.

    Example:
        >>> world = pl.init()
        >>> world.rank, world.world_size
        (0, 1)
    """
    global _world
    if _world is not None:
        return _world
    rank, world_size, local_rank, local_world_size, method = read_environment(os.environ)
    if world_size > 1 and dist.is_initialized():
        raise UserError(
            "pl.init: torch.distributed's default process group is there already; pl.init makes it, so leave out "
            "dist.init_process_group before it (pl.parallelize calls pl.init, too)"
        )
    sight, store, secret = look(device, local_rank, local_world_size), None, b""
    joining = float(os.environ.get(JOINING, max(timeout, _JOINING_SECONDS)))
    if world_size > 1:
        with _joining(rank, world_size, method):
            store = _open_store(rank, world_size, method, timedelta(seconds=joining))
            sights = tell_all(sight, _prefixed("devices", store), rank, world_size, joining)
            secret = share_secret(store, rank, joining)
    else:
        sights = [sight]
    kind, idle = choose(sights)
    if idle and rank == 0:
        warnings.warn(idle, stacklevel=2)
    chosen = torch.device("cuda", index_of(local_rank, sight.gpus)) if kind == "cuda" else torch.device("cpu")
    world = World(rank, world_size, local_rank, local_world_size, chosen, timeout, secret)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if store is not None:
        with _joining(rank, world_size, method):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if world.backend == "nccl" else "gloo",
                store=_store_of_group(store, world, method),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=world.device if world.backend == "nccl" else None,
            )
            watch.begin(rank, world_size, _exchange_in(store, rank, world_size, joining), timeout, secret)
    atexit.register(_leave_at_exit)
    _world = world
    return world


def _open_store(rank: int, world_size: int, method: str, timeout: timedelta) -> Any:
    """Where the ranks of a job meet, with keys of its own for each time that they do."""
    global _folder_store
    store: Any
    if method.startswith(_FILE):
        # All ranks are on this host; its name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _folder_store = FolderStore(Path(method.removeprefix(_FILE)))
    elif method.startswith(STORE):
        address, _, job = method.removeprefix(STORE).partition("/")
        host, _, port = address.rpartition(":")
        found = dist.TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)  # type: ignore
        store = _prefixed(job, found)
    else:
        store, _, _ = next(rendezvous(method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return _prefixed(meeting.agree(store, rank, world_size, timeout.total_seconds()), store)


def _store_of_group(store: Any, world: World, method: str) -> Any:
    """Where the process group's ranks find each other."""
    if world.backend == "nccl" and method.startswith(_FILE):
        # NCCL's own threads use it as long as the job lasts. Opened here, as torch would take the path for an address,
        # which ends at a question mark.
        name = hashlib.sha256(world.secret).hexdigest()[:16]
        store = dist.FileStore(str(Path(method.removeprefix(_FILE)) / name), -1)  # type: ignore[attr-defined]
    return _prefixed("default_pg", store)


def _exchange_in(store: Any, rank: int, world_size: int, seconds: float) -> Exchange:
    """Gathers values in the store, by what they are about."""
    return lambda value, label: meeting.tell_all(value, _prefixed(label, store), rank, world_size, seconds)


def _prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


@contextmanager
def _joining(rank: int, world_size: int, method: str) -> Iterator[None]:
    """Says what to do where ranks cannot be joined."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        if is_of_nccl(error):
            raise UserError(
                f"rank {rank} could not join the other {world_size - 1} by NCCL: {last_words(error)}. Each rank needs "
                "a GPU of its own; with NCCL_DEBUG=INFO in the environment NCCL says more"
            ) from error
        raise UserError(
            f"rank {rank} could not join the job at {method}: {str(error).splitlines()[0]}. If the port is in "
            "use by another job, set MASTER_PORT to a free one on every rank (torchrun: --master-port); if ranks "
            f"are missing, see that all {world_size} were started and reach that address"
        ) from error


def current_world() -> World:
    """The world that `init` joined; joins it if nobody has."""
    return _world if _world is not None else init()


def shutdown() -> None:
    """Leaves the job; `pl.init()` may then join another. Safe to call twice.

    A process that ends leaves by itself. Call it where it goes on without the others, such as in a notebook or a test.
    Models that are still parallel are of no more use, and ranks that wait for this one in one of them are told so:
    `pl.release` them first. On GPUs every rank calls it, and a rank that leaves because of an exception does so without
    the others.
    """
    registry.leave(_ENDING_SECONDS)
    _leave()


def _leave() -> None:
    global _world
    watch.end()
    if dist.is_initialized() and not _is_forked:
        if _world is not None and _world.backend == "nccl" and (_failed or sys.exc_info()[0] is not None):
            _abort()
            return
        # A thread of Gloo's lets go of the last collective's tensors under the interpreter's lock. Some holders of a
        # process group, such as DDP, end it with that lock held and wait for the thread: it gets the lock before.
        time.sleep(_LETTING_GO_SECONDS)
        dist.destroy_process_group()
    _world = None


def require_rank(label: str) -> None:
    """Refuses to communicate for a process that a rank has forked, on connections that are the rank's.

    Raises:
        CommunicationError: This is one.
    """
    if _is_forked:
        raise CommunicationError(f"{label}: a forked process is no rank: only the one that forked it can call this")


def _after_fork() -> None:
    global _is_forked
    if dist.is_initialized():
        # To leave the job is the rank's to do. Here, and when nothing holds its group any more, Gloo would wait for its
        # threads, which are not forked.
        _is_forked = True
        atexit.unregister(_leave_at_exit)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


os.register_at_fork(after_in_child=_after_fork)


def keep_process_group() -> None:
    """A message of this job's will not be answered: when it is left, Gloo's process group is left as it is."""
    if dist.group.WORLD is not None and dist.group.WORLD not in _kept:
        _kept.append(dist.group.WORLD)


def note_failure() -> None:
    """On GPUs, other ranks may from now on wait for this one in vain: it leaves without asking them."""
    global _failed
    _failed = True


def _leave_at_exit() -> None:
    """As `shutdown`, but on GPUs waits for no other rank, which may have failed or be elsewhere."""
    if _world is None or _world.backend != "nccl" or not dist.is_initialized():
        _leave()
        return
    # What the interpreter keeps of an exception that ends the program.
    if not (_failed or getattr(sys, "last_value", None) is not None):
        let_end(_ENDING_SECONDS)
    _abort()


def _abort() -> None:
    """Leaves the job without the other ranks."""
    global _world, _failed
    watch.end()
    abort_process_group()
    _world, _failed = None, False
