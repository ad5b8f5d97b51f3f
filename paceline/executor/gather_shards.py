"""Gradients and optimizers' states of which ranks have shards, made whole where a loop looks at all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.errors import EngineError
from paceline.core.placement import Placement
from paceline.core.step_state import StepState
from paceline.executor.collectives import Collectives
from paceline.tensors.division import Division


class GatherShards:
    """Gathers shards of gradients, or of states, from the ranks that have them."""

    def __init__(
        self,
        collectives: Collectives | None,
        placement: Placement,
        device: torch.device,
        state: StepState,
        settle: Callable[[], None],
    ) -> None:
        """Gathers nothing yet.

        Args:
            collectives: Of the model's ranks; None with one.
            placement: Where the ranks stand.
            device: Where the transport moves tensors.
            state: Tells whether gradients are reduced.
            settle: Waits for gathers under way.
        """
        self._collectives, self._placement, self._device = collectives, placement, device
        self._state, self._settle = state, settle

    def __call__(self, shards: Sequence[Tensor], divisions: Sequence[Division], what: str) -> list[Tensor]:
        """See `Gather`.

        Raises:
            EngineError: A backward is under way, or gradients are meant and reduced among some ranks alone.
        """
        label, is_state = divisions[0].label, bool(divisions[0].state)
        if is_state and self._state.phase == "backward":
            raise EngineError(f"{what.strip('_')} of {label} in backward: do that before or after it")
        partial = self._state.gradients != "reduced" and self._placement.replicas > 1
        if not is_state and (self._state.phase == "backward" or partial):
            raise EngineError(
                f"{what} of {label}: it holds this rank's shard of a gradient that is not reduced among all ranks "
                "yet, and the whole is known only then: do that after the step's last backward. Until then scale or "
                "zero it as you like"
            )
        assert self._collectives is not None
        self._settle()
        return [self._gather(shard, each, what) for shard, each in zip(shards, divisions, strict=True)]

    def _gather(self, shard: Tensor, division: Division, what: str) -> Tensor:
        whole = torch.empty_strided(division.shape, division.strides, dtype=shard.dtype, device=shard.device)
        if not whole.numel():
            return whole
        assert self._collectives is not None
        index = self._placement.shard_index
        # Ranks have parts of different sizes.
        size = max(stop - start for start, stop in filter(None, division.parts))
        parts = torch.zeros(len(division.parts), size, dtype=shard.dtype, device=self._device)
        parts[index, : shard.numel()] = shard
        purpose = "optimizer.state" if division.state else "p.grad"
        self._collectives.gather_parts(parts, f"{division.label} ({what.strip('_')})", purpose)
        flat = whole.as_strided((whole.numel(),), (1,))
        for part, bounds in zip(parts, division.parts, strict=True):
            if bounds:
                start, stop = bounds
                flat[start:stop] = part[: stop - start]
        return whole
