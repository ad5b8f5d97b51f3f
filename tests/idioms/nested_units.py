"""Blocks that call another unit inside their forward: a position bias, a router, a shared network."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.idioms.side import WIDTH, Found, Side, evaluated, fit, idiom, trained


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


@idiom()
def blocks_call_a_layer_that_they_are_given(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Model(nn.Linear(WIDTH, WIDTH)))


@idiom()
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


@idiom()
def blocks_share_a_small_part_that_is_theirs(side: Side) -> Found:
    torch.manual_seed(0)
    model = Model(Bias())
    for block in model.blocks:
        block.bias = model.shared
    return trained(side, model)


class Given(Model):
    """Calls the shared network by itself before the blocks do, and after."""

    def forward(self, x):
        x = self.shared(self.first(x))
        for block in self.blocks:
            x = x + block(x, self.shared)
        return self.head(self.shared(x))


@idiom()
def a_network_is_called_alone_and_by_blocks(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Given(network()))


@idiom()
def an_evaluation_before_the_first_step_of_blocks_that_call_a_network(side: Side) -> Found:
    torch.manual_seed(0)
    model = Given(network()).to(side.dtype)
    net = side.parallel(model)
    before = evaluated(side, net, model.train())["loss"]
    model.train()
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return {**evaluated(side, net, model), "before": before}


class Checkpointed(Model):
    def __init__(self, shared: nn.Module, reentrant: bool) -> None:
        super().__init__(shared)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.shared(self.first(x))
        for block in self.blocks:
            x = x + checkpoint(block, x, self.shared, use_reentrant=self.reentrant)
        return self.head(x)


@idiom()
def blocks_that_call_a_network_are_computed_again(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Checkpointed(network(), reentrant=False))


@idiom()
def blocks_that_call_a_network_are_computed_again_reentrantly(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Checkpointed(network(), reentrant=True))


class Failing(Model):
    """Raises in the middle of a block, where it is told to."""

    fails = False

    def forward(self, x):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = x + block(x, self.broken if self.fails and index == 1 else self.shared)
        return self.head(x)

    def broken(self, x):
        raise ArithmeticError("a batch that cannot be used")


@idiom()
def an_evaluation_fails_inside_a_block_that_calls_a_network(side: Side) -> Found:
    torch.manual_seed(0)
    model = Failing(network()).to(side.dtype)
    net, optimizer = side.parallel(model), torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model.fails = True
        with torch.no_grad(), contextlib.suppress(ArithmeticError):
            net(side.batch(50)[0])
        model.fails = False
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluated(side, net, model)


class Runner(nn.Module):
    """A module with a weight of its own that runs all others' layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x, layers):
        for layer in layers:
            x = x + (layer(x) @ self.scale).tanh()
        return x @ self.scale


class Run(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.runner, self.head = Runner(), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(network() for _ in range(3))

    def forward(self, x):
        return self.head(self.runner(x, self.layers))


@idiom()
def a_module_runs_all_layers_that_it_is_given(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Run())


@idiom()
def a_network_that_blocks_call_calls_another(side: Side) -> Found:
    torch.manual_seed(0)
    model = Model(network())
    inner = nn.Linear(WIDTH, WIDTH)
    model.inner = inner
    model.shared[1].register_forward_hook(lambda module, args, output: output + inner(args[0][:, :WIDTH]).repeat(1, 2))
    return trained(side, model)
