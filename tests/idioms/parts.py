"""Parts of a model that are moved, left out, wrapped or tied once it is parallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state

STAY = (("zero 3", "after pl.parallelize"),)
"""Where each part's parameters are gathered for it in its place."""

RESHAPED = tuple(
    (place, r"4.weight changed its shape from \(2, 8\) to \(3, 8\) after pl.parallelize: call pl.release")
    for place in (*(f"zero {zero}" for zero in range(4)), "low", "shared parameters")
)


def begun(side: Side) -> tuple[nn.Sequential, object, torch.optim.Optimizer]:
    """A model that has trained for two steps."""
    model = mlp(side, blocks=3)
    net, optimizer = side.parallel(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fit(side, net, optimizer, 2)
    return model, net, optimizer


@idiom(refused=STAY)
def blocks_in_another_order(side: Side) -> Found:
    model, net, optimizer = begun(side)
    model[1], model[3] = model[3], model[1]
    fit(side, net, optimizer, 3)
    return state(model)


@idiom(refused=STAY, unused=True)
def a_block_left_out_for_a_while(side: Side) -> Found:
    model, net, optimizer = begun(side)
    block = model[2]
    model[2] = nn.Identity()
    fit(side, net, optimizer, 2)
    model[2] = block
    fit(side, net, optimizer, 2)
    return state(model)


@idiom(refused=STAY, unused=True)
def a_block_taken_out(side: Side) -> Found:
    model, net, optimizer = begun(side)
    del model[2]
    fit(side, net, optimizer, 3)
    return state(model)


@idiom(refused=tuple((place, "replaced in the model") for place in (*(f"zero {zero}" for zero in range(4)), "low")))
def a_head_is_replaced(side: Side) -> Found:
    """Under DDP its gradients are each rank's own."""
    model, net, optimizer = begun(side)
    model[4] = nn.Linear(WIDTH, 2).to(side.dtype)
    fit(side, net, optimizer, 1)
    return state(model)


@idiom(refused=STAY, unused=True)
def a_frozen_head_takes_the_place_of_the_trained_one(side: Side) -> Found:
    model, net, optimizer = begun(side)
    torch.manual_seed(1)
    model[4] = nn.Linear(WIDTH, 2).to(side.dtype).requires_grad_(False)
    fit(side, net, optimizer, 3)
    return state(model)


@idiom(refused=STAY)
def a_block_wrapped(side: Side) -> Found:
    class Scaled(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            return 0.5 * self.block(x) + x

    model, net, optimizer = begun(side)
    model[2] = Scaled(model[2])
    fit(side, net, optimizer, 3)
    return state(model)


@idiom(refused=STAY, unused=True)
def weights_tied_later(side: Side) -> Found:
    model, net, optimizer = begun(side)
    model[3][0].weight = model[1][0].weight
    fit(side, net, optimizer, 3)
    return state(model)


@idiom(refused=(("zero 3", "data of 4.weight outside of forward|4.weight changed its shape"), *RESHAPED))
def a_head_with_another_row(side: Side) -> Found:
    """As libraries grow embeddings in place, for new tokens."""
    model, net, _ = begun(side)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for p in model[4].parameters():
        p.data = torch.cat([p.data, p.data[:1]])
    fit(side, net, optimizer, 2, lambda x, y: (net(x)[:, :2] - y).square().mean())
    return state(model)


@idiom(refused=RESHAPED)
def a_head_with_another_row_given_where_parameters_are_whole(side: Side) -> Found:
    model, net, _ = begun(side)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with side.whole(model):
        for p in model[4].parameters():
            p.data = torch.cat([p.data, p.data[:1]])
    fit(side, net, optimizer, 2, lambda x, y: (net(x)[:, :2] - y).square().mean())
    return state(model)


@idiom(refused=STAY, unused=True)
def an_auxiliary_head_deleted(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.aux = mlp(side), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = self.body(x)
            return self.head(x) + self.aux(x) if hasattr(self, "aux") else self.head(x)

    torch.manual_seed(WIDTH)
    model = Model().to(side.dtype)
    net, optimizer = side.parallel(model), torch.optim.AdamW(model.parameters(), 0.01)
    fit(side, net, optimizer, 2)
    del model.aux
    fit(side, net, optimizer, 3)
    return state(model)


SHARDED = (("zero 3", "outside of forward"),)


@idiom(refused=SHARDED)
def weights_pruned_half_way(side: Side) -> Found:
    model, net, optimizer = begun(side)
    prune.random_unstructured(model[1][0], "weight", 0.0)
    prune.custom_from_mask(model[2][0], "weight", torch.eye(WIDTH, dtype=side.dtype))
    fit(side, net, optimizer, 3)
    return state(model)


# Torch writes to the weight as it registers the norm.
@idiom(refused=(("shared parameters", "was edited"), *SHARDED), low=False)
def spectral_norm_half_way(side: Side) -> Found:
    """Under DDP, which takes the parameter for unused from then on, its gradients are each rank's own."""
    model, net, optimizer = begun(side)
    torch.manual_seed(1)
    parametrizations.spectral_norm(model[2][0])
    fit(side, net, optimizer, 3)
    return state(model)
