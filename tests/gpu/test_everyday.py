"""What programs do on one GPU: reentrant checkpoints, exceptions in hooks, gradients that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.strategy import Strategy
from tests.gpu.devices import on_a_gpu
from tests.gpu.loop import POLICIES, Net, assert_same, make, train

pytestmark = on_a_gpu


class Reentrant(nn.Module):
    """A block whose inside is computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=True)
        return y


def reentrant(device: torch.device) -> Net:
    model = make(torch.float64, device)
    model.blocks = nn.ModuleList(Reentrant(block) for block in model.blocks)
    return model


@pytest.mark.parametrize("name", POLICIES)
def test_reentrant_checkpoints(gpu: torch.device, name: str) -> None:
    expected = train(reentrant(gpu), torch.float64, gpu)
    model = pl.parallelize(reentrant(gpu), POLICIES[name])
    found = train(model, torch.float64, gpu)
    pl.release(model)
    assert_same(found, expected, atol=1e-11)


def fails(gradient: Tensor) -> None:
    raise ValueError("a broken loss")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_a_hook_one_rank_goes_on(gpu: torch.device, where: str, zero: Any) -> None:
    expected = train(make(torch.float64, gpu), torch.float64, gpu)
    model = pl.parallelize(make(torch.float64, gpu), Strategy(zero=zero, bucket_mb=1e-3))
    x = torch.ones(2, 4, device=gpu, dtype=torch.float64)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if where == "forward":
            raise ValueError("a broken model")
        output.register_hook(fails)

    handle = model.blocks[1].register_forward_hook(hook)
    with pytest.raises(ValueError, match="broken"):
        model(x).sum().backward()
    handle.remove()
    pl.reset(model)
    found = train(model, torch.float64, gpu)
    pl.release(model)
    assert_same(found, expected, atol=1e-11)


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_that_a_loop_keeps_stay_as_they_were(gpu: torch.device, name: str) -> None:
    model = pl.parallelize(make(torch.float32, gpu), replace(POLICIES[name], precision="bfloat16"))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        model(torch.full((2, 4), step + 1.0, device=gpu)).float().square().mean().backward()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    assert kept and all(torch.equal(gradient, before) for gradient, before in kept)
    pl.release(model)
