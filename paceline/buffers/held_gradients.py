"""Tensors that were `p.grad` when a backward began: what it publishes ends in them, as a loop may hold them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.memory import bits_of
from paceline.buffers.storage_uses import storage_of, uses_of
from paceline.core.errors import EngineError
from paceline.core.layout import Slot
from paceline.tensors.former_gradient import FormerGradient, become_former, kind_of, refusal
from paceline.tensors.gradient_shard import GradientShard


class HeldGradients:
    """Keeps the tensor that each parameter's gradients are added to, where a loop may edit it afterwards.

    Autograd adds to what `p.grad` holds, which stays the same tensor, and so does DDP. What a loop has kept of it, to
    scale it after each backward, must then be what an optimizer is given. Where the loop has kept neither that tensor
    nor another of its memory, there is none here either.
    """

    def __init__(self) -> None:
        """Holds no tensor yet."""
        self._tensors: dict[int, Tensor] = {}
        self._replaced: dict[int, _Replaced] = {}

    def begin(self, flat: FlatGradients, gradients: Mapping[int, Tensor]) -> None:
        """A backward begins.

        Args:
            flat: Where gradients lie.
            gradients: What is `p.grad`, by index, with no other reference to it.
        """
        self._flat = flat
        former, self._tensors = self._tensors, {}
        if not gradients:
            return
        references, uses = _unheld()
        with torch._C.DisableTorchFunctionSubclass():
            counts, ours = _references(gradients), flat.handed_out()
            self._ours = ours
            self._replaced = {index: each for index, each in self._replaced.items() if each.is_kept(ours)}
            storages = {i: storage_of(g) for i, g in gradients.items() if g.layout == torch.strided}
            known = Counter(storages.values())
            for index, gradient in gradients.items():
                if type(gradient) is FormerGradient:
                    raise EngineError(refusal(gradient._name))
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
        if held is None or kind_of(held) not in ((GradientShard,) if is_part else (Tensor, GradientShard)):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return held if (held.shape, held.dtype) == (like.shape, dtype) else None

    def replace(self, index: int, gradient: Tensor | None) -> None:
        """Another tensor is `p.grad` from now on, or none, and edits of the one before would be lost.

        That shows the values here, as far as this rank has them, so that an edit which would change them changes it.
        Where it has not all, reading it is refused.
        """
        held, replaced = self._tensors.get(index), self._replaced.get(index)
        if held is not None and held is not gradient and (replaced is None or replaced.tensor is not held):
            replaced = self._replaced[index] = _Replaced(held)
        if replaced is None:
            return
        if replaced.tensor is gradient:
            del self._replaced[index]
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            former = replaced.tensor
            if storage_of(former) not in self._ours and (gradient is None or gradient.shape != former.shape):
                # Who reads it by way of another tensor of its memory is not seen.
                former.fill_(torch.nan)
            if gradient is not None:
                self._flat.show_in(index, former, gradient)
                replaced.given = TensorWeakRef(gradient)
            replaced.take()
            if gradient is None or self._flat.schedule.shards > 1:
                become_former(former, self._flat.schedule.layout.slots[index].spec.name)

    def require_unedited(self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> None:
        """Refuses to go on where a loop has edited a tensor that was `p.grad` and could not stay it.

        To be called before each `begin`.

        Raises:
            EngineError: It has.
        """
        for index, replaced in list(self._replaced.items()):
            with torch._C.DisableTorchFunctionSubclass():
                gradient = parameters[index].grad
                if gradient is None or replaced.given is None or replaced.given() is not gradient:
                    # The loop has set it to another, and under DDP, too, this one would be p.grad no more.
                    del self._replaced[index]
                    continue
                if not replaced.is_edited():
                    continue
                is_zero = not replaced.tensor.any()
            if is_zero and not gradient.as_subclass(Tensor).any():
                # Both were set to zero, as p.grad alone would have been.
                replaced.take()
                continue
            raise EngineError(refusal(slots[index].spec.name))

    def publish(self) -> None:
        """The step's gradients are published, and none is to be given back any more."""
        self._tensors.clear()

    def forget(self) -> None:
        """Forgets what a step that is given up has left."""
        self._tensors.clear()
        self._replaced.clear()


@dataclass
class _Replaced:
    """A tensor that was `p.grad` and could not stay it.

    Attributes:
        tensor: That.
        given: The one that took its place. It may move, as a shard does that becomes whole.
    """

    tensor: Tensor
    given: TensorWeakRef | None = None

    def take(self) -> None:
        """Takes it as it is now for unedited."""
        self._bits = bits_of(self.tensor).clone()

    def is_edited(self) -> bool:
        """Whether somebody wrote to it since, in any way that has changed it on this rank."""
        return not torch.equal(self._bits, bits_of(self.tensor))

    def is_kept(self, ours: Collection[int]) -> bool:
        """Whether a loop still has it, or its memory, which may be one of buffers of `ours`, by `storage_of`."""
        references, uses = _alone()
        is_ours = storage_of(self.tensor) in ours
        return is_ours or uses_of(self.tensor) > uses or _references({0: self.tensor})[0] > references


def _references(gradients: Mapping[int, Tensor]) -> dict[int, int]:
    """Returns the number of Python's references to each gradient, here and elsewhere."""
    return {index: sys.getrefcount(gradient) for index, gradient in gradients.items()}


@cache
def _unheld() -> tuple[int, int]:
    """References to a gradient that is nothing but a parameter's `grad`, and uses of its storage beside itself."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    return _references({0: probe.grad})[0], uses_of(probe.grad) - 1


@cache
def _alone() -> tuple[int, int]:
    """References to a tensor that one variable holds and that is nobody's `grad`, and uses of its storage."""
    probe = torch.zeros(1)
    return _references({0: probe})[0], uses_of(probe)
