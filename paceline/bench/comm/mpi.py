"""MPI's collectives as a peer in `paceline bench comm`: what a rank runs under mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.bench.comm.calls import Call, in_place
from paceline.bench.comm.rank import connect, serve
from paceline.bench.comm.reference import GETS_SHARD, GIVES_SHARD

IN_PLACE, SEPARATE = "*in place", "*separate buffers"

_DATATYPES = {torch.float64: "DOUBLE", torch.float32: "FLOAT", torch.float16: "FLOAT16_T", torch.bfloat16: "BFLOAT16_T"}
"""mpi4py's names; a library may lack those of 16 bits, which are in no standard."""

_FUNCTIONS = {
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "reduce": "Reduce",
    "all_to_all": "Alltoall",
    "broadcast": "Bcast",
    "scatter": "Scatter",
    "gather": "Gather",
}


class MpiLibrary:
    """The MPI library that this process was started with, called with buffers as they are, without pickle."""

    def __init__(self, most: int, dtype: torch.dtype) -> None:
        """Joins MPI's world, whose ranks hold two buffers of `most` elements each."""
        from mpi4py import MPI

        vendor, version = MPI.get_vendor()
        self.name = f"{vendor} {'.'.join(map(str, version))}"
        self.algorithms: dict[str, tuple[str, ...]] = dict.fromkeys(_FUNCTIONS, (IN_PLACE, SEPARATE))
        self.algorithms |= dict.fromkeys(("scatter", "gather"), (SEPARATE,))
        self.algorithms |= {"broadcast": (IN_PLACE,), "barrier": ("own",)}
        self.rank, self.ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self._mpi: Any = MPI
        self._datatype = getattr(MPI, _DATATYPES[dtype], MPI.DATATYPE_NULL)
        self._buffers = [torch.zeros(most, dtype=dtype) for _ in range(2)]

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        """See `Library.call`."""
        barrier = self._mpi.COMM_WORLD.Barrier
        if op == "barrier":
            return Call(self._buffers[0][:0], self._buffers[1][:0], barrier, barrier)
        if self._datatype == self._mpi.DATATYPE_NULL:
            raise TypeError(f"{self.name} has no {self._buffers[0].dtype}")
        source, target = (buffer[:numel] for buffer in self._buffers)
        function = getattr(self._mpi.COMM_WORLD, _FUNCTIONS[op])
        if algorithm == IN_PLACE:
            given, result = in_place(op, source, self.rank, self.ranks)
            run = self._in_place(op, function, source)
        else:
            given = source[: numel // self.ranks] if op in GIVES_SHARD else source
            result = target[: numel // self.ranks] if op in GETS_SHARD else target
            run = partial(function, self._memory(given), self._memory(result))
        return Call(given, result, run, barrier)

    def _in_place(self, op: str, function: Callable[..., object], buffer: Tensor) -> Callable[[], object]:
        if op == "broadcast":
            return partial(function, self._memory(buffer))
        if op == "reduce" and self.rank:
            return partial(function, self._memory(buffer), None)
        return partial(function, self._mpi.IN_PLACE, self._memory(buffer))

    def _memory(self, tensor: Tensor) -> list[Any]:
        return [tensor.view(torch.uint8).numpy(), self._datatype]


def main(dtype: str, most: str, threads: str) -> None:
    """Runs one rank.

    Args:
        dtype: Such as "float32".
        most: Elements of the largest buffer.
        threads: Threads that torch may use.
    """
    torch.set_num_threads(int(threads))
    connection = connect()
    library = MpiLibrary(int(most), getattr(torch, dtype))
    serve(connection, library.rank, library.ranks, [library], {})


if __name__ == "__main__":
    main(*sys.argv[1:])
