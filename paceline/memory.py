"""Bytes that one rank holds for parameters, gradients and optimizer states, from its schedule. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.layout import Flat
from paceline.schedule import Schedule


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds, padding included. Activations and the framework itself are not in it."""

    parameters: int
    """What is computed with: whole, or this rank's shards."""
    gradients: int
    """What lives from backward to update: whole gradients, and sums over micro-batches or ranks beside them."""
    optimizer: int
    """The optimizer's states, and the master that it updates under low precision."""
    buckets: int
    """Places for whole gradients between their collection and their reduction, where they do not live longer."""
    gathered: int
    """Places for whole parameters while units compute with them, where only shards live longer."""

    @property
    def states(self) -> int:
        """The model states of Rajbhandari et al. 2020: parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.buckets + self.gathered


def memory(schedule: Schedule, micro_batches: int = 1, states: int = 2, state_itemsize: int | None = None) -> Memory:
    """What one rank holds during a step (with a parameter server, rank 0).

    With P parameters, N ranks and Adam, bfloat16 with gradients reduced as computed takes for the model states 16 P at
    stage 0, 4 P + 12 P / N at stage 1, 2 P + 14 P / N at stage 2 and 16 P / N at stage 3 (Rajbhandari et al. 2020,
    figure 1). Gradients reduced in fp32 take 2 P more, or 2 P / N where they are sharded.

    Args:
        schedule: Gives layout, strategy and number of ranks.
        micro_batches: Micro-batches of a step.
        states: Numbers that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        state_itemsize: Bytes of each of these; by default as wide as the parameters that it updates.
    """
    layout, shards = schedule.layout, schedule.shards
    trainable = [flat for flat in layout.flats if flat.trainable]
    # One copy between the ranks of a group takes each of them its part.
    holders = shards if schedule.gathers_units or schedule.shares else 1
    parameters = sum(flat.numel * flat.itemsize // holders for flat in layout.flats)
    optimizer = sum(
        flat.numel // shards * (states * (state_itemsize or flat.master_itemsize) + _master_itemsize(flat))
        for flat in trainable
    )
    buckets = 0
    if schedule.rotates:
        buckets = _largest((schedule.gradient_place[b.name], b.numel * b.gradient_itemsize) for b in schedule.reduced)
    moving = {unit: sum(bucket.bytes for bucket in held) for unit, held in schedule.moving.items()}
    gathered = _largest((place, moving[unit]) for unit, place in schedule.place.items())
    return Memory(
        parameters,
        _gradients(schedule, trainable, micro_batches),
        optimizer,
        buckets,
        gathered + sum(bucket.bytes for bucket in schedule.residents),
    )


def _gradients(schedule: Schedule, trainable: Iterable[Flat], micro_batches: int) -> int:
    sums_up = schedule.strategy.reduces_each and micro_batches > 1
    # Replicas sum a shard apart from the whole gradients that it came from.
    beside = sums_up or schedule.rotates or 1 < schedule.shards < schedule.world_size
    size = 0
    for flat in trainable:
        if not schedule.rotates:
            size += flat.numel * flat.gradient_itemsize
        if beside:
            size += flat.numel // schedule.shards * (flat.master_itemsize if sums_up else flat.gradient_itemsize)
    return size


def _master_itemsize(flat: Flat) -> int:
    """Bytes an element of the master beside the parameters; 0 where they are updated themselves."""
    return flat.master_itemsize if flat.master != flat.dtype else 0


def _largest(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of places that are as large as the largest that comes into each."""
    places: dict[int, int] = defaultdict(int)
    for place, size in sizes:
        places[place] = max(places[place], size)
    return sum(places.values())
