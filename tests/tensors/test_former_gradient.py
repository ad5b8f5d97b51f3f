"""A tensor that was a whole `p.grad`: what a loop may still do with it, and what would read what is not there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import EngineError
from paceline.tensors.former_gradient import FormerGradient, become_former, kind_of
from paceline.tensors.gradient_shard import GradientShard, as_shard


def former() -> Tensor:
    tensor = torch.ones(2, 3)
    become_former(tensor, "head.weight")
    return tensor


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda g: g.norm(),
    "several norms": lambda g: torch._foreach_norm([torch.ones(2), g]),
    "sum": lambda g: 1 + g,
    "element": lambda g: g[0, 0],
    "element set": lambda g: g.__setitem__((0, 0), 2.0),
    "number": lambda g: float(g),
    "transposed": lambda g: g.T,
    "view": lambda g: g.view(-1),
    "numpy": lambda g: g.numpy(),
    "list": lambda g: g.tolist(),
    "clone": lambda g: g.clone(),
    "copy": copy.deepcopy,
    "copied elsewhere": lambda g: torch.zeros(2, 3).copy_(g),
    "scaled": lambda g: g.mul_(2),
    "scaled by an operator": lambda g: g.__imul__(2),
    "by data": lambda g: g.data.norm(),
    "detached": lambda g: g.detach().norm(),
    "several scaled": lambda g: torch._foreach_mul_([g], 2.0),
}


@pytest.mark.parametrize("name", READS)
def test_what_depends_on_the_values_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match=r"head\.weight: the tensor that was p\.grad before backward was read or"):
        READS[name](former())


OVERWRITES: dict[str, Callable[[Any], Any]] = {
    "zeroed": lambda g: g.zero_(),
    "several zeroed": lambda g: torch._foreach_zero_([g]),
    "filled": lambda g: g.fill_(0.0),
    "copied to": lambda g: g.copy_(torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", OVERWRITES)
def test_what_is_written_over_as_a_whole_is_an_ordinary_tensor_again(name: str) -> None:
    tensor = former()
    OVERWRITES[name](tensor)
    assert type(tensor) is Tensor and not tensor.any()


def test_one_that_was_a_shard_is_that_again() -> None:
    shard = as_shard(torch.ones(4), None, ((8,), (1,), ((0, 4), (4, 8))))
    become_former(shard, "head.weight")
    become_former(shard, "head.weight")
    assert kind_of(shard) is GradientShard
    with pytest.raises(EngineError, match=r"Ask p\.grad again"):
        shard * 2
    assert type(shard.zero_()) is GradientShard


def test_what_tells_of_it_and_not_of_its_values_is_answered() -> None:
    tensor = former()
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.device.type) == ((2, 3), torch.float32, 6, "cpu")
    assert torch.zeros_like(tensor).shape == (2, 3)
    assert "head.weight" in repr(tensor) and type(tensor) is FormerGradient
