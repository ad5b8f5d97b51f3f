"""Which elements of each parameter a rank keeps, which of them it writes, and where they go when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import UserError
from paceline.core.layout import ParameterSpec
from paceline.core.mesh import REPLICATE
from paceline.core.parameter_server import ParameterServer
from paceline.engine.engine import Engine
from paceline.optimizers.elementwise import SHARD, needs_whole
from paceline.optimizers.own_dtypes import keep_dtypes, widen_states

ReadInto = Callable[[int, Tensor], None]
"""(start, target): fills a one-dimensional tensor with a stored one's elements from `start` on, in row-major order."""


class Ranges:
    """The parameters of a parallel model as one-dimensional tensors of this rank's elements, in row-major order.

    What an optimizer holds for each element of a parameter goes the same ways.

    Attributes:
        names: Of all parameters, by index.
        shards: Into how many parts parameters are cut.
    """

    def __init__(self, engine: Engine, writers: Sequence[int] | None = None) -> None:
        """Takes the engine of one model.

        Args:
            engine: The model's.
            writers: Ranks that write, this one among them, which must hold all elements between them; by default all.

        Raises:
            UserError: Some parameters of the model are another parallel model's, which a checkpoint would lack.
        """
        if names := engine.program.others.names:
            raise UserError(
                f"checkpoints of a model of which another parallel model has parts, such as {names[0]}, would lack "
                "these: parallelize one model that has both, or keep model.state_dict() of each, which has them"
            )
        self._engine = engine
        self._writers = range(engine.world.world_size) if writers is None else writers
        self._flat = engine.program.parameters.flat
        self._world = engine.world
        self.shards = self._flat.shards
        self.names = [slot.spec.name for slot in self._flat.layout.slots]

    def spec(self, index: int) -> ParameterSpec:
        """What the layout knows of a parameter."""
        return self._flat.layout.slots[index].spec

    def local(self, index: int) -> Tensor:
        """A parameter as this rank updates it: its shard, one-dimensional, or all of it."""
        return self._flat.local[index] if index in self._flat.local else self._flat.all[index].data

    def kept(self, index: int) -> tuple[int, int]:
        """The elements of a parameter, in the order of its memory, that are this rank's to update."""
        slot = self._flat.layout.slots[index]
        if self._flat.shards == 1 or index not in self._flat.local:
            return 0, slot.spec.numel
        start, stop = self._flat.layout.shard_of(
            self._flat.bucket_of[index], index, self._flat.shard_index, self._flat.shards
        )
        return start - slot.offset, stop - slot.offset

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """This rank's shard of what has a number for each element of a whole parameter."""
        return self._flat.cut(index, whole, whole.dtype)

    def mark(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Notes in an optimizer's group which shards its states are of."""
        group.pop(SHARD, None)
        if self._flat.shards > 1 and not self.is_whole_in(optimizer):
            group[SHARD] = [*self._flat.number, [self._flat.cuts] * len(group["params"])]

    def widen(self, optimizer: Optimizer) -> None:
        """Has an optimizer's states in the dtype that the next step would have them in."""
        widen_states(optimizer, self._flat)

    def keep_dtypes(self, optimizer: Optimizer) -> None:
        """Has its states, which were loaded, stay as they are."""
        keep_dtypes(optimizer, self._flat)

    def is_whole_in(self, optimizer: Optimizer) -> bool:
        """Whether every rank holds all states of an optimizer, though its parameters are cut: see `needs_whole`."""
        return needs_whole(optimizer, self._flat)

    def is_gathered(self, index: int) -> bool:
        """Whether a parameter's shards are put together before they are written: memory has its elements in an order
        of its own.
        """
        return self.is_cut(index) and not is_row_major(self.spec(index))

    def is_cut(self, index: int) -> bool:
        """Whether this rank keeps a shard of a parameter, one-dimensional."""
        return self._flat.shards > 1 and index in self._flat.local

    def written(self, index: int, tensor: Tensor | None, dtype: torch.dtype) -> tuple[int, Tensor]:
        """What this rank writes of a parameter, or of a state of the same shape: (first element, elements).

        Ranks share the writing out: those that keep the same elements write a part each. A collective call where
        `is_gathered`.

        Args:
            index: Of the parameter.
            tensor: Like `local`; None where this rank has no elements.
            dtype: Of all ranks' elements.
        """
        spec = self.spec(index)
        if self.is_gathered(index):
            whole = self._gathered(index, tensor, dtype)
        elif tensor is None:
            return 0, torch.empty(0, dtype=dtype, device="cpu")
        else:
            whole = tensor.detach().reshape(-1)
        first, last = self._share(index)
        start = 0 if self.is_gathered(index) else self.kept(index)[0]
        first, last = max(first, start), min(last, start + whole.numel(), spec.numel)
        return first, whole[first - start : max(first, last) - start]

    def _share(self, index: int) -> tuple[int, int]:
        """The elements of a parameter that are this rank's to write, if it has them."""
        slot, bucket = self._flat.layout.slots[index], self._flat.bucket_of.get(index)
        schedule, numel = self._engine.schedule, slot.spec.numel
        rank, writers = self._world.rank, self._writers
        if isinstance(schedule, ParameterServer):
            return (0, numel) if rank == 0 else (0, 0)
        if bucket is None:
            return (0, numel) if rank == writers[index % len(writers)] else (0, 0)
        if not is_row_major(slot.spec):
            return _part(0, numel, rank, writers)
        first, last = bucket.shard(schedule.shard_index, schedule.shards)
        replicas = [each for each in schedule.mesh.group(rank, (REPLICATE,)) if each in writers]
        return _part(first - slot.offset, last - first, rank, replicas)

    def _gathered(self, index: int, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """All elements of a tensor of which ranks keep shards, in row-major order. A collective call."""
        spec, (start, stop) = self.spec(index), self.kept(index)
        memory = torch.zeros(spec.numel, dtype=dtype, device=self._world.device)
        collectives = self._engine.program.collectives
        assert collectives is not None
        if tensor is not None and self._engine.schedule.position_in("replicate")[0] == 0:
            memory[start:stop].copy_(tensor)
        # Whoever has none adds zeros; as bytes, so that no value changes, not even the sign of a zero.
        collectives.sum(memory.view(torch.uint8), f"elements of {spec.name}", "pl.save")
        return memory.as_strided(spec.shape, spec.stride).reshape(-1)

    def whole(self, index: int, dtype: torch.dtype, read_into: ReadInto) -> Tensor:
        """Reads all elements of a parameter, or of a state of its shape, into a tensor of that."""
        spec, device = self.spec(index), self.local(index).device
        elements = torch.empty(spec.numel, dtype=dtype, device=device)
        read_into(0, elements)
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device).copy_(elements.view(spec.shape))

    def fill(self, index: int, target: Tensor, read_into: ReadInto) -> None:
        """Reads this rank's elements of a parameter, or of a state of its shape, into a tensor like `local`."""
        spec, (start, _) = self.spec(index), self.kept(index)
        if self.is_cut(index) and is_row_major(spec):
            read_into(start, target)
        elif not self.is_cut(index) and target.is_contiguous():
            read_into(0, target.view(-1))
        else:
            whole = self.whole(index, target.dtype, read_into)
            target.copy_(self.cut(index, whole) if self.is_cut(index) else whole)


def _part(start: int, length: int, rank: int, among: Sequence[int]) -> tuple[int, int]:
    """One rank's part of a range that some share out."""
    index = among.index(rank)
    return start + length * index // len(among), start + length * (index + 1) // len(among)


def is_row_major(spec: ParameterSpec) -> bool:
    """Whether a parameter's elements lie in memory in the order of its indices, the last one running fastest."""
    wanted = 1
    for extent, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if extent != 1 and stride != wanted:
            return spec.numel == 0
        wanted *= extent
    return True
