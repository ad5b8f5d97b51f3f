"""paceline's transports in `paceline bench comm`, and what else runs in the same processes: Gloo, NCCL, copying."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.bench.comm.calls import Call, Library, in_place
from paceline.bench.comm.copy_bound import CopyLibrary
from paceline.bench.comm.rank import ADDRESS, connect, serve
from paceline.bench.comm.torch_peers import TorchLibrary
from paceline.comm.connect import open_transport
from paceline.comm.transport import CommunicationError, Transport
from paceline.comm.world import World, init, shutdown
from paceline.core.collectives.algorithms import ALGORITHMS

KINDS = ("auto", "tcp")
"""What `open_transport` is asked for: the fastest that one host allows, which is shared memory, and sockets."""


class TransportLibrary:
    """One of paceline's transports, with every algorithm that there is."""

    def __init__(self, transport: Transport, world: World, most: int, dtype: torch.dtype) -> None:
        """Every rank makes it: the buffer, of `most` elements, may be shared between them."""
        self.name = transport.name
        self.algorithms = {op: tuple(found) for op, found in ALGORITHMS.items()}
        self._transport = transport
        self._world = world
        self._buffer = transport.allocate(most, dtype)
        self._token = transport.allocate(1, dtype)

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        """See `Library.call`."""
        buffer = self._token if op == "barrier" else self._buffer[:numel]
        given, result = in_place(op, buffer, self._world.rank, self._world.world_size)
        run = partial(self._transport.run, f"{op}/{algorithm}", buffer, "bench")
        return Call(given, result, run, self.barrier)

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self._transport.run("barrier", self._token, "bench")


def main(dtype: str, most: str, threads: str) -> None:
    """Runs one rank.

    Args:
        dtype: Such as "float32".
        most: Elements of the largest buffer.
        threads: Threads that torch may use.
    """
    torch.set_num_threads(int(threads))
    connection = connect()
    os.environ["PACELINE_RENDEZVOUS"] = f"file://{Path(os.environ[ADDRESS]).with_name('store')}"
    world = init(device="cpu", timeout=300)
    kind, size = getattr(torch, dtype), int(most)
    missing: dict[str, str] = {}
    transports: list[TransportLibrary] = []
    for name in KINDS:
        try:
            transport = open_transport(world, kind=name)
        except (CommunicationError, OSError) as error:
            missing[f"paceline's transport {name}"] = str(error)
            continue
        if all(transport.name != each.name for each in transports):
            transports.append(TransportLibrary(transport, world, size, kind))
    libraries: list[Library] = [*transports]
    barrier = transports[0].barrier if transports else dist.barrier
    libraries.insert(0, CopyLibrary(size, kind, barrier))
    everyone = dist.group.WORLD
    assert everyone is not None
    libraries.append(TorchLibrary("gloo", everyone, torch.device("cpu"), size, kind))
    if torch.cuda.device_count() < world.world_size:
        missing["nccl"] = f"needs a GPU for each of {world.world_size} ranks, found {torch.cuda.device_count()}"
    else:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        libraries.append(TorchLibrary("nccl", dist.new_group(backend="nccl"), device, size, kind))
    serve(connection, world.rank, world.world_size, libraries, missing)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
