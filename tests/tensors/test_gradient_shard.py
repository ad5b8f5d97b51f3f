"""A shard of a gradient: what it lets through on every rank alike, and waits for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.tensors.assigned_gradient import set_gradient
from paceline.tensors.division import WHOLE, Division
from paceline.tensors.gradient_shard import GradientShard, as_shard
from paceline.tensors.state_shard import become_state_shard

VALUES = [1.0, -2.0, 3.0, 0.5]


WHOLE_VALUES = [VALUES, VALUES]


def of_two_alike(shards: Sequence[Tensor], divisions: Sequence[Division], what: str) -> list[Tensor]:
    """Gathers where the other of two ranks holds the same values in its part, and so in what is made of it."""
    return [torch.stack([shard.as_subclass(Tensor)] * 2) for shard in shards]


PARTS = Division("p", (2, 4), (4, 1), ((0, 4), (4, 8)), lambda: of_two_alike)
"""How two ranks divide a parameter: its shape, strides, the elements of each, and how it becomes whole."""


def shard(wait: Callable[[], None] | None = None, is_part: bool = True) -> GradientShard:
    return as_shard(torch.tensor(VALUES), wait, PARTS if is_part else WHOLE)


def parameter(gradient: Tensor) -> nn.Parameter:
    """A whole parameter, of which the gradient is a part."""
    made = nn.Parameter(torch.zeros(2, 4))
    set_gradient(made, gradient)
    return made


# ---- what is done to each element

IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda g: g.mul_(2),
    "mul_ by a scalar tensor": lambda g: g.mul_(torch.tensor(2.0)),
    "div_": lambda g: g.div_(4),
    "add_": lambda g: g.add_(1),
    "add_ another shard": lambda g: g.add_(g * 3),
    "sub_": lambda g: g.sub_(1),
    "neg_": lambda g: g.neg_(),
    "clamp_": lambda g: g.clamp_(-1, 1),
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(7),
    "nan_to_num_": lambda g: g.div_(torch.tensor(0.0)).nan_to_num_(1.0),
    "copy_": lambda g: g.copy_(g * 2),
    "lerp_": lambda g: g.lerp_(g * 2, 0.5),
    "addcmul_": lambda g: g.addcmul_(g, g, value=0.5),
    "masked_fill_": lambda g: g.masked_fill_(g > 1, 0),
    "*=": lambda g: g.__imul__(2),
    "/=": lambda g: g.__itruediv__(2),
    "+=": lambda g: g.__iadd__(2),
    "-=": lambda g: g.__isub__(2),
    "**=": lambda g: g.__ipow__(2),
    "_foreach_mul_": lambda g: torch._foreach_mul_([g], 2.0),
    "_foreach_mul_ by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(2.0)),
    "_foreach_add_": lambda g: torch._foreach_add_([g], [g * 2], alpha=2),
    "_foreach_clamp_max_": lambda g: torch._foreach_clamp_max_([g], 1.0),
    "_foreach_zero_": lambda g: torch._foreach_zero_([g]),
    "_foreach_neg_": lambda g: torch._foreach_neg_([g]),
    "out=": lambda g: torch.mul(g, 2, out=g),
}

ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "to": lambda g: g.to(torch.float64),
    "double": lambda g: g.double(),
    "cpu": lambda g: g.cpu(),
    "data": lambda g: g.data,
    "* 2": lambda g: g * 2,
    "2 *": lambda g: 2 * g,
    "/ 2": lambda g: g / 2,
    "2 /": lambda g: 2 / g,
    "1 -": lambda g: 1 - g,
    "1 +": lambda g: 1 + g,
    "** 2": lambda g: g**2,
    "-": lambda g: -g,
    "abs": abs,
    "torch.mul": lambda g: torch.mul(g, g),
    "by one element": lambda g: g * torch.tensor([2.0]),
    "square": lambda g: g.square(),
    "clip": lambda g: g.clip(max=1.0),
    "isfinite": lambda g: g.isfinite(),
    "> 1": lambda g: g > 1,
    "where": lambda g: torch.where(g > 0, g, 0.0),
    "maximum": lambda g: torch.maximum(g, torch.tensor(0.0)),
    "zeros_like": torch.zeros_like,
    "contiguous": lambda g: g.contiguous(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_elements_are_changed_in_place_as_those_of_the_whole(name: str) -> None:
    ours, plain = shard(), torch.tensor(VALUES)
    memory = ours.data_ptr()
    IN_PLACE[name](ours)
    IN_PLACE[name](plain)
    assert ours.data_ptr() == memory and type(ours) is GradientShard
    assert torch.equal(ours.as_subclass(Tensor), plain)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_computed_elementwise_is_a_shard_too(name: str) -> None:
    found, plain = ELEMENTWISE[name](shard()), ELEMENTWISE[name](torch.tensor(VALUES))
    assert type(found) is GradientShard
    assert torch.equal(found.as_subclass(Tensor), plain)
    assert torch.equal(found.sum(), 2 * plain.sum())


# ---- what loops do with p.grad


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_zeroed_or_dropped(foreach: bool) -> None:
    made = parameter(shard())
    optimizer = torch.optim.SGD([made], lr=0.1, foreach=foreach)
    optimizer.zero_grad(set_to_none=False)
    assert type(made.grad) is GradientShard
    assert not made.grad.as_subclass(Tensor).any()
    optimizer.zero_grad()
    assert made.grad is None


def test_a_module_zeroes_its_gradients() -> None:
    module = nn.Module()
    module.weight = parameter(shard())
    module.zero_grad(set_to_none=False)
    assert type(module.weight.grad) is GradientShard and not module.weight.grad.as_subclass(Tensor).any()


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_by_value(foreach: bool) -> None:
    made = parameter(shard())
    nn.utils.clip_grad_value_([made], 1.0, foreach=foreach)
    assert made.grad is not None
    assert made.grad.as_subclass(Tensor).tolist() == [1.0, -1.0, 1.0, 0.5]


def test_it_tells_of_itself() -> None:
    gradient = shard()
    assert (gradient.dtype, gradient.device.type) == (torch.float32, "cpu")
    assert (gradient.is_contiguous(), gradient.is_sparse) == (True, False)
    assert "GradientShard" in repr(gradient) and "GradientShard" in str(gradient)
    assert hash(gradient) == id(gradient) and isinstance(gradient, Tensor)


@pytest.mark.parametrize(
    "whole",
    [
        torch.empty_strided((8, 6), (1, 8)),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(9),
    ],
    ids=["transposed", "channels last", "contiguous"],
)
def test_it_and_states_lie_as_the_whole_does(whole: Tensor) -> None:
    numel = whole.numel()
    division = Division("w", tuple(whole.shape), whole.stride(), ((0, numel // 2), (numel // 2, numel)))
    part = torch.ones(numel // 2)
    for each in (as_shard(part.clone(), None, division), become_state_shard(part.clone(), division)):
        assert (each.shape, each.stride(), each.numel()) == (whole.shape, whole.stride(), numel)
        assert each.is_contiguous() == whole.is_contiguous()
        if whole.dim() == 4:
            assert each.is_contiguous(memory_format=torch.channels_last)


def test_whoever_asks_for_a_plain_tensor_gets_one() -> None:
    plain = shard().as_subclass(Tensor)
    assert type(plain) is Tensor and plain.sum() == 2.5


# ---- reductions that are under way

WAITING = {**IN_PLACE, **ELEMENTWISE, "repr": repr, "untyped_storage": lambda g: g.untyped_storage()}


@pytest.mark.parametrize("name", WAITING)
def test_whatever_is_done_waits_first(name: str) -> None:
    raw = torch.zeros(4)
    waits = []

    def wait() -> None:
        if not waits:
            raw.copy_(torch.tensor(VALUES))
        waits.append(name)

    gradient = as_shard(raw, wait, PARTS)
    assert not waits
    found = WAITING[name](gradient)
    assert waits
    if name in ELEMENTWISE:
        assert torch.equal(found.as_subclass(Tensor), ELEMENTWISE[name](torch.tensor(VALUES)))


def test_every_shard_of_a_list_is_waited_for() -> None:
    waits: list[int] = []
    several = [shard(lambda index=index: waits.append(index)) for index in range(3)]  # type: ignore[misc]
    torch._foreach_mul_(several, 2.0)
    assert set(waits) == {0, 1, 2}


# ---- not there yet

MARKED: dict[str, Callable[[Any], Any]] = {
    "_foreach_mul": lambda g: torch._foreach_mul([g], 2.0)[0],
    "one element in more dimensions": lambda g: g * torch.ones(1, 1),
    "copy.deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", MARKED)
def test_these_are_shards_too_or_whole(name: str) -> None:
    found = MARKED[name](shard())
    assert type(found) is GradientShard or found.shape == PARTS.shape
