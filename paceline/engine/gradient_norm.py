"""The 2-norm of a model's gradients, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from paceline.core.ops import GRADIENT_NORM
from paceline.core.step_state import StepState
from paceline.engine.program import Program
from paceline.engine.update import Update
from paceline.tensors.gradient_shard import GradientShard
from paceline.tensors.reduced_norm import norms_of


class GradientNorm:
    """The norm of gradients of which ranks have shards, or all of them."""

    def __init__(self, program: Program, state: StepState, update: Update, settle: Callable[[], None]) -> None:
        """Takes what is known of one model's gradients; `settle` waits for collectives under way."""
        self._program, self._state, self._update, self._settle = program, state, update, settle

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model, other models' among them."""
        others = self._program.others
        return [*self._program.parameters.all, *(p for owner in others.owners for p in others.of(owner))]

    @torch.inference_mode(False)
    def now(self, among: Collection[nn.Parameter] | None = None) -> Tensor:
        """The 2-norm of parameters' `grad` as they are now: a 0-dim tensor, the same on every rank.

        A collective call where not every rank holds all reduced gradients.

        Args:
            among: Those that are meant, the same on every rank; by default all of the model.

        Raises:
            EngineError: The gradients are not reduced yet.
        """
        squares = self._squares(among)
        chosen = None if among is None else set(map(id, among))
        for owner in self._program.others.owners:
            theirs = self._program.others.of(owner)
            if meant := [p for p in theirs if chosen is None or id(p) in chosen]:
                squares = squares + owner.norm._squares(meant)
        return self._as_norm(squares)

    def _squares(self, among: Collection[nn.Parameter] | None) -> Tensor:
        """The sum of the squares of the model's own gradients over all ranks."""
        program, schedule, world = self._program, self._program.schedule, self._program.world
        self._update.require_reduced("the gradient norm")
        squares = norms_of(self._own_gradients(among), world.device).square().sum()
        if schedule.holders < world.world_size:
            squares = squares if schedule.updated_buckets else torch.zeros_like(squares)
            self._settle()
            vector = squares.reshape(1)
            program.sum(vector, GRADIENT_NORM, self._state.last_micro_batch, "update")
            squares = vector[0] / schedule.holders
        return squares

    def _own_gradients(self, among: Collection[nn.Parameter] | None) -> list[Tensor]:
        """Returns the gradients that this rank adds to the sum: of one that the loop made whole, its shard."""
        flat = self._program.parameters.flat
        own = flat.all if among is None else (p for p in among if id(p) in flat.index_of)
        found = ((flat.index_of[id(p)], p.grad) for p in own)
        return [
            gradient if flat.shards == 1 or isinstance(gradient, GradientShard) else flat.cut(index, gradient)
            for index, gradient in found
            if gradient is not None and (flat.shards == 1 or index in flat.local)
        ]

    def as_reduced(self) -> Tensor:
        """The 2-norm of what the last synchronised backward made `p.grad`, whatever was done to it since; see `now`."""
        if self._program.schedule.shards == 1:
            return self._as_norm(self._squares(None))
        return self._as_norm(self._program.statistics.squares().sum() / self._program.schedule.replicas)

    def _as_norm(self, squares: Tensor) -> Tensor:
        dtype = torch.float32
        for flat in self._program.layout.flats:
            dtype = torch.promote_types(dtype, getattr(torch, flat.master)) if flat.trainable else dtype
        return squares.sqrt().to(dtype.to_real())
