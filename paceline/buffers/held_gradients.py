"""Tensors that were `p.grad` when a backward began: what it publishes ends in them, as a loop may hold them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.handed_out import storage_of, uses_of
from paceline.core.errors import EngineError
from paceline.core.layout import Slot
from paceline.tensors.gradient_shard import GradientShard


class HeldGradients:
    """Of each parameter, the tensor that its gradients are added to, where a loop may edit that afterwards.

    Autograd adds to what `p.grad` holds, which stays the same tensor, and so does DDP. What a loop has kept of it, to
    scale it after each backward, must then be what an optimizer is given. Where the loop has kept neither that tensor
    nor another of its memory, there is none here either.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self._tensors: dict[int, Tensor] = {}
        self._replaced: dict[int, tuple[Tensor, int, int]] = {}

    def begin(self, flat: FlatGradients, gradients: Mapping[int, Tensor]) -> None:
        """A backward begins.

        Args:
            flat: Where gradients lie.
            gradients: What is `p.grad`, by index, with no other reference to it.
        """
        self._replaced.clear()
        former, self._tensors = self._tensors, {}
        if not gradients:
            return
        references, uses = _unheld()
        with torch._C.DisableTorchFunctionSubclass():
            counts, ours = _references(gradients), flat.handed_out()
            storages = {i: storage_of(g) for i, g in gradients.items() if g.layout == torch.strided}
            known = Counter(storages.values())
            for index, gradient in gradients.items():
                if index in former and gradient.data_ptr() == flat.views[index].data_ptr():
                    # This rank's share has stood in for it since the micro-batch before.
                    self._tensors[index] = former[index]
                elif index in storages and (
                    counts[index] > references
                    or (storages[index] not in ours and uses_of(gradient) > uses + known[storages[index]])
                ):
                    self._tensors[index] = gradient

    def stays(self, index: int, gradient: Tensor | None) -> bool:
        """Whether a parameter's gradient is such a tensor, to which autograd is to add again."""
        return gradient is not None and self._tensors.get(index) is gradient

    def drop(self, index: int) -> None:
        """Autograd has made another of it."""
        self._tensors.pop(index, None)

    def to_give(self, index: int, like: Tensor, dtype: torch.dtype, is_part: bool) -> Tensor | None:
        """The tensor that a gradient is published in; None where it is another's shape, or none.

        Args:
            index: Of the parameter.
            like: A tensor of the gradient's shape.
            dtype: Of what is published.
            is_part: Whether that is this rank's shard.
        """
        held = self._tensors.get(index)
        if held is None or type(held) not in ((GradientShard,) if is_part else (Tensor, GradientShard)):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return held if (held.shape, held.dtype) == (like.shape, dtype) else None

    def replace(self, index: int, gradient: Tensor) -> None:
        """Another tensor is `p.grad` from now on, and edits of the one before would be lost."""
        held = self._tensors.get(index)
        if held is gradient:
            self._replaced.pop(index, None)
        elif held is not None:
            self._replaced[index] = (held, held._version, gradient.data_ptr())

    def require_unedited(self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> None:
        """Refuses to go on where a loop has edited a tensor that was `p.grad` and could not stay it.

        Raises:
            EngineError: It has.
        """
        for index, (held, version, given) in self._replaced.items():
            with torch._C.DisableTorchFunctionSubclass():
                gradient = parameters[index].grad
                lost = gradient is not None and gradient.data_ptr() == given and held._version != version
            if lost:
                raise EngineError(
                    f"{slots[index].spec.name}: the tensor that was p.grad before backward was edited after it, but "
                    "p.grad is another one now (this rank's shard, or of another dtype), so the edit would be lost. "
                    "Ask p.grad again after each backward, or set strategy.zero to 0 in float32, where it stays the "
                    "same tensor"
                )

    def publish(self) -> None:
        """The step's gradients are published, and none is to be given back any more."""
        self._tensors.clear()

    def forget(self) -> None:
        """Forgets what a step that is given up has left."""
        self._tensors.clear()
        self._replaced.clear()


def _references(gradients: Mapping[int, Tensor]) -> dict[int, int]:
    """How many references of Python there are to each gradient, here and elsewhere."""
    return {index: sys.getrefcount(gradient) for index, gradient in gradients.items()}


@cache
def _unheld() -> tuple[int, int]:
    """References to a gradient that is nothing but a parameter's `grad`, and uses of its storage beside itself."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    return _references({0: probe.grad})[0], uses_of(probe.grad) - 1
