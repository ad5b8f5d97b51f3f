"""An owner of sharded parameters that has their values, and these as they lie there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.tensors.sharded_parameter import guard, own, unguard
from paceline.tensors.transforms import follow_transforms

X = torch.tensor([[1.0, 2.0, 3.0]])


class Whole:
    """An owner that makes parameters whole when asked, as engines do, and remembers who asked."""

    def __init__(self, *shapes: tuple[int, ...], opens: bool = True) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.values = [torch.arange(float(torch.Size(shape).numel())).view(shape) + 1 for shape in shapes]
        self.parameters = [nn.Parameter(torch.full(shape, torch.nan)) for shape in shapes]
        self._opens = opens
        follow_transforms()
        for index, parameter in enumerate(self.parameters):
            own(parameter, self, index, parameter.stride())
            guard(parameter)

    def dtype_seen(self, index: int, computed: torch.dtype) -> torch.dtype:
        return computed

    def parameter_used(self, index: int, function: str, edits: bool, shape: Any = None) -> None:
        assert function
        self.asked.append((index, edits))
        if self._opens:
            unguard(self.parameters[index])
            self.parameters[index].data = self.values[index]


def plain_view(parameter: Tensor) -> Tensor:
    """A parameter's values as they lie there, without asking."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()
