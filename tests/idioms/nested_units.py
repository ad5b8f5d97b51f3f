"""Blocks that call another unit inside their forward: a position bias, a router, a shared network."""

from __future__ import annotations

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, idiom, trained

REFUSED = (("zero 3", "a unit of its own, inside its forward"),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shared):
        return self.after(shared(self.before(x).tanh()).sigmoid())


class Model(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, self.shared)
        return self.head(x)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


@idiom(refused=REFUSED)
def blocks_call_a_layer_that_they_are_given(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Model(nn.Linear(WIDTH, WIDTH)))


@idiom(refused=REFUSED)
def blocks_call_a_network_that_they_are_given(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Model(network()))


class Bias(nn.Module):
    """So small that it stays for the whole step at zero 3."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)

    def forward(self, x):
        return x + self.table(torch.arange(len(x)) % 3 * 0)


@idiom(refused=REFUSED)
def blocks_share_a_small_part_that_is_theirs(side: Side) -> Found:
    torch.manual_seed(0)
    model = Model(Bias())
    for block in model.blocks:
        block.bias = model.shared
    return trained(side, model)
