"""Weights that modules and loops write to by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.idioms.side import Found, Side, fit, idiom, mlp, state, trained

EDITED = (("zero 3", "was edited"), ("low", "was edited"), ("shared parameters", "was edited"))


@idiom(refused=EDITED)
def weights_clamped_in_a_hook_of_their_block(side: Side) -> Found:
    """By way of `.data`, as older code does."""
    model = mlp(side)

    def clamp(block: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        block[0].weight.data.clamp_(-0.2, 0.2)

    model[1].register_forward_pre_hook(clamp)
    return trained(side, model)


class Averaging(torch.optim.Optimizer):
    """Trains one sequence of weights and evaluates their average, as schedule-free descent does."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
                self.state[p].setdefault("average", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "average" in self.state[p]:
                kept = p.clone()
                p.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(kept)


@idiom(
    refused=(
        *((f"zero {zero}", "pl.elementwise") for zero in (1, 2, 3)),
        ("low", "was edited"),
        ("parameter server", "different weights"),
    )
)
def weights_swapped_for_their_average(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = Averaging(model.parameters())
    for _ in range(2):
        fit(side, net, optimizer, 2)
        optimizer.swap()
    fit(side, net, optimizer, 1)
    return state(model)


@idiom(refused=(("zero 3", "."),))
def images_channels_last_half_way(side: Side) -> Found:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 2), torch.nn.Flatten(), torch.nn.Linear(4, 2)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    loss_of = lambda x, y: (net(x.view(-1, 2, 2, 2)) - y).square().mean()  # noqa: E731
    fit(side, net, optimizer, 2, loss_of)
    model.to(memory_format=torch.channels_last)
    fit(side, net, optimizer, 2, loss_of)
    return state(model)
