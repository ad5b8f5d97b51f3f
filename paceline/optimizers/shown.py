"""What an optimizer is shown in its step: this rank's shards of parameters and gradients, or all of them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.put_in_place import take_updated
from paceline.optimizers.elementwise import needs_whole
from paceline.optimizers.shard_states import takes_empty_parts
from paceline.tensors.assigned_gradient import gradient_of, set_gradient
from paceline.tensors.gradient_shard import GradientShard, as_shard, become_whole
from paceline.tensors.reduced_norm import forget_norms


class Shown:
    """Parameters and gradients as an optimizer finds them inside its step, of one model.

    An optimizer that looks at whole ones is shown these, on every rank, each of which updates all.
    """

    def __init__(
        self,
        flat: FlatParameters,
        show_local: Callable[[], None],
        full: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Nothing is shown yet.

        Args:
            flat: The model's parameters.
            show_local: Lets parameters be this rank's shards.
            full: Lets them be whole and as they are updated, while it is entered.
        """
        self._flat, self._show_local, self._full = flat, show_local, full
        self._shards: list[GradientShard] = []
        self._empty: dict[int, GradientShard] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._whole: AbstractContextManager[None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether whole parameters are shown where ranks have shards of them."""
        return self._whole is not None

    def show(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step. A collective call where it is shown whole gradients."""
        flat = self._flat
        if not flat.managed:
            return
        if needs_whole(optimizer, flat):
            own = (p.grad for group in optimizer.param_groups for p in group["params"] if id(p) in flat.index_of)
            become_whole(
                [shard for shard in own if isinstance(shard, GradientShard)], f"{type(optimizer).__name__}.step()"
            )
            self._whole = self._full()
            self._whole.__enter__()
            self._widen()
            return
        gradients = self._gradients()
        if flat.shards > 1:
            self._cut(gradients)
        elif flat.has_masters:
            self._widen()
        self._show_local()
        shards = {index: shard for index, shard in gradients.items() if isinstance(shard, GradientShard)}
        self._unmark(shards, takes_empty_parts(optimizer))

    def _gradients(self) -> dict[int, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            found = ((index, gradient_of(self._flat.all[index])) for index in self._flat.managed)
            return {index: gradient for index, gradient in found if gradient is not None}

    def _widen(self) -> None:
        """Makes gradients that the loop has made itself, in what is computed in, as wide as what is updated."""
        flat = self._flat
        for index, gradient in self._gradients().items():
            with torch._C.DisableTorchFunctionSubclass():
                if gradient.dtype == flat.local[index].dtype:
                    continue
                wide = gradient.to(flat.local[index].dtype)
            set_gradient(flat.all[index], wide)

    def _cut(self, gradients: dict[int, Tensor]) -> None:
        """Puts this rank's shards in the place of whole gradients: a loop has made these, or looked at them."""
        flat = self._flat
        for index, gradient in gradients.items():
            if not isinstance(gradient, GradientShard):
                gradients[index] = shard = as_shard(flat.cut(index, gradient), None, flat.division(index))
                self._made[index] = (gradient, shard)
                set_gradient(flat.all[index], shard)

    def _unmark(self, shards: Mapping[int, GradientShard], takes_empty: bool) -> None:
        """Lets an optimizer compute with shards, and with none that has no element if it need not."""
        with torch._C.DisableTorchFunctionSubclass():
            self._empty = {index: shard for index, shard in shards.items() if not takes_empty and not shard.numel()}
        forget_norms(shards.values())
        self._shards = [shard for index, shard in shards.items() if index not in self._empty]
        for index in self._empty:
            self._flat.all[index].grad = None
        for shard in self._shards:
            shard.__class__ = Tensor  # type: ignore[assignment]

    def take_back(self, takes_given: bool = True) -> None:
        """Gradients are what they are between steps; parameters of which shards were shown are to rest now.

        Args:
            takes_given: Whether data that the optimizer has put in the place of shards count.
        """
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.__exit__(None, None, None)
        elif takes_given:
            take_updated(self._flat)
        for shard in self._shards:
            shard.__class__ = GradientShard
        parameters = self._flat.all
        if not self._shards or any(parameter.grad is not None for parameter in parameters):
            for index, empty in self._empty.items():
                set_gradient(parameters[index], empty)
        for index, (made, cut) in self._made.items():
            if parameters[index].grad is cut:
                set_gradient(parameters[index], made)
        self._shards, self._empty, self._made = [], {}, {}
