from __future__ import annotations

import copy

import pytest
import torch

from paceline.train import dynamic_loss_scale
from paceline.train.dynamic_loss_scale import DynamicLossScale
from paceline.train.optim import Update
from paceline.train.sections import OptimConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "first"), [(1, 2.0**16), (512, 128.0), (500, 128.0), (0, 2.0**16)])
def test_the_mean_loss_begins_at_two_to_the_16th(tokens: int, first: float) -> None:
    assert DynamicLossScale(tokens, CPU).value.item() == first


def test_it_is_halved_at_once_and_doubled_after_many_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_loss_scale, "GROWTH_INTERVAL", 3)
    scale, seen = DynamicLossScale(2**16, CPU), []
    for unusable in (0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1):
        scale.update(torch.tensor(float(unusable)))
        seen.append(scale.value.item())
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1, 0.5]


def test_an_update_takes_the_scale_out_again_and_lowers_it_where_it_was_too_much() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 4)
    scaled = copy.deepcopy(plain)
    config, scale = OptimConfig(warmup=0, schedule="constant", clip=0.5), DynamicLossScale(2**12, CPU)
    updates = [Update(plain, config, 9, CPU), Update(scaled, config, 9, CPU, scale)]
    for step in range(3):
        gradients = [torch.randn_like(parameter) for parameter in plain.parameters()]
        norms = []
        for model, update, factor in zip((plain, scaled), updates, (1.0, scale.value.item()), strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * factor
            total = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            norms.append(update(step, torch.tensor(7.0), torch.tensor(14.0), total))
        assert norms[0] == norms[1]
    before = [parameter.clone() for parameter in scaled.parameters()]
    for parameter in scaled.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    updates[1](3, torch.tensor(7.0), torch.tensor(14.0), torch.tensor(torch.inf))
    assert scale.value.item() == 8.0
    for parameter, other, same in zip(plain.parameters(), scaled.parameters(), before, strict=True):
        assert torch.equal(parameter, other) and torch.equal(other, same)
