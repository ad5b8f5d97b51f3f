"""Bytes that one rank holds for parameters, gradients and optimizer states: its schedule's buffers, added up. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.buffers import BufferKind
from paceline.core.schedule import Schedule


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds all the time, padding included.

    Activations, transient buffers and the framework itself are not in it.
    """

    parameters: int
    """The parameters that are computed with: whole, or this rank's shards."""
    gradients: int
    """Gradients that live from backward to update: whole ones, and sums over micro-batches or ranks beside them."""
    optimizer: int
    """The optimizer's states, and the master that it updates under low precision."""
    buckets: int
    """Slots for whole gradients between their copy-in and their reduction, where they do not live longer."""
    gathered: int
    """Slots for whole parameters while units compute with them, where only shards live longer."""

    @property
    def states(self) -> int:
        """The model states of Rajbhandari et al. 2020: parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.buckets + self.gathered


def memory(schedule: Schedule, micro_batches: int = 1, states: int = 2, state_itemsize: int | None = None) -> Memory:
    """Returns the bytes that one rank holds during a step (with a parameter server, rank 0).

    With P parameters, N ranks and Adam, bfloat16 with gradients reduced as computed takes for the model states 16 P at
    stage 0, 4 P + 12 P / N at stage 1, 2 P + 14 P / N at stage 2 and 16 P / N at stage 3 (Rajbhandari et al. 2020,
    figure 1). Gradients reduced in fp32 take 2 P more, or 2 P / N where they are sharded.

    Args:
        schedule: Gives layout, strategy and number of ranks.
        micro_batches: Micro-batches of a step.
        states: Numbers that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        state_itemsize: Bytes of each of these; by default as wide as the parameters that it updates.
    """
    held: dict[BufferKind, int] = {}
    for buffer in schedule.buffers(micro_batches):
        if buffer.transient:
            continue
        # What the ranks of a group share takes each of them its part.
        size = buffer.bytes // schedule.shards if buffer.shared else buffer.bytes
        held[buffer.kind] = held.get(buffer.kind, 0) + size
    trainable = [flat for flat in schedule.layout.flats if flat.trainable]
    if not schedule.copies_gradients:
        # Autograd's own: no engine moves them.
        held["gradients"] = sum(flat.numel * flat.gradient_itemsize for flat in trainable)
    updated = sum(flat.numel // schedule.shards * (state_itemsize or flat.master_itemsize) for flat in trainable)
    return Memory(
        parameters=held.get("parameters", 0),
        gradients=held.get("gradients", 0) + held.get("reduced", 0),
        optimizer=held.get("master", 0) + states * updated,
        buckets=held.get("slots", 0),
        gathered=held.get("unsharded", 0),
    )
