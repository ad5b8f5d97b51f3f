from __future__ import annotations

import torch
from torch import nn

from paceline.plan.alike import Alike, arguments


def alike(first: nn.Module, second: nn.Module) -> bool:
    model = nn.ModuleList([first, second])
    tells = Alike(model)
    return tells.module("0", first) == tells.module("1", second)


def test_blocks_are_alike_by_all_that_shapes_can_depend_on() -> None:
    assert alike(nn.Linear(3, 4), nn.Linear(3, 4))
    assert not alike(nn.Linear(3, 4), nn.Linear(4, 3))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4, bias=False))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4).eval())
    assert not alike(nn.Dropout(0.1), nn.Dropout(0.2))
    assert not alike(nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU()))


def test_a_block_that_shares_a_parameter_is_like_no_other() -> None:
    shared, own = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([shared, own, nn.Sequential(shared)])
    tells = Alike(model)
    assert tells.module("0", shared) != tells.module("1", own)


def test_a_forward_or_hook_of_ones_own_tells_blocks_apart() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.forward = lambda x: x  # type: ignore[assignment, method-assign]
    assert not alike(first, second)
    third = nn.Linear(3, 3)
    third.register_forward_hook(lambda *_: None)
    assert not alike(nn.Linear(3, 3), third)


def test_calls_are_alike_by_shapes_and_values() -> None:
    x = torch.ones(2, 3)
    assert arguments((x,), {"causal": True}) == arguments((x + 1,), {"causal": True})
    assert arguments((x,), {}) != arguments((x.t(),), {})
    assert arguments((x, 1), {}) != arguments((x, 2), {})
    assert arguments((x, 1), {}) != arguments((x, True), {})
    assert arguments((x,), {}) != arguments((x.requires_grad_(),), {})
