"""Weights that modules and loops write to by hand."""

from __future__ import annotations

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


@idiom(refused=(("zero 3", r"convert it after pl\.release"),))
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
