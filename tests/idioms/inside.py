"""Losses on what is computed inside blocks: features that hooks keep, or that blocks put where they are told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.nested_units import Given, network
from tests.idioms.side import WIDTH, Found, Side, evaluated, idiom


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, features=None):
        inside = self.first(x).tanh()
        if features is not None:
            features.append(inside)
        return x + self.second(inside)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 2)

    def forward(self, x, features=None):
        for block in self.blocks:
            x = block(x, features) if features is not None else block(x)
        return self.head(x)


Loss = Callable[[Tensor, Tensor, list[Tensor], int], Tensor]
"""Of an answer, its targets and features in a step."""


def of_features(answer: Tensor, y: Tensor, features: list[Tensor], step: int) -> Tensor:
    return sum((feature.square().mean() for feature in features), torch.zeros((), dtype=y.dtype))


def of_one(answer: Tensor, y: Tensor, features: list[Tensor], step: int) -> Tensor:
    return features[1].square().mean()


def in_turn(answer: Tensor, y: Tensor, features: list[Tensor], step: int) -> Tensor:
    """Of features alone in every other step."""
    loss = of_features(answer, y, features, step)
    return loss + (answer - y).square().mean() if step % 2 else loss


def trained(side: Side, model: nn.Module, loss: Loss, features: list[Tensor], call: Callable[..., Any]) -> Found:
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        for x, y in side.micro_batches(net, step):
            features.clear()
            (loss(call(net, x), y, features, step) / side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    features.clear()
    return evaluated(side, net, model)


def hooked(side: Side, loss: Loss) -> Found:
    torch.manual_seed(0)
    model, features = Model().to(side.dtype), list[Tensor]()
    for block in model.blocks:
        block.first.register_forward_hook(lambda module, args, output: features.append(output))
    return trained(side, model, loss, features, lambda net, x: net(x))


@idiom(unused=True)
def a_loss_of_features_that_hooks_keep(side: Side) -> Found:
    return hooked(side, of_features)


@idiom(unused=True)
def a_loss_of_one_feature_that_a_hook_keeps(side: Side) -> Found:
    return hooked(side, of_one)


@idiom(unused=True)
def a_loss_of_features_and_in_turn_of_answers(side: Side) -> Found:
    return hooked(side, in_turn)


@idiom(unused=True)
def a_loss_of_features_that_other_hooks_change(side: Side) -> Found:
    torch.manual_seed(0)
    model, features = Model().to(side.dtype), list[Tensor]()
    for block in model.blocks:
        block.first.register_forward_hook(lambda module, args, output: features.append(output))
        block.first.register_forward_hook(lambda module, args, output: output.detach() / 2)
        block.second.register_forward_pre_hook(lambda module, args: features.append(args[0].tanh()))
    return trained(side, model, of_features, features, lambda net, x: net(x))


@idiom(unused=True)
def a_loss_of_inputs_that_hooks_keep(side: Side) -> Found:
    torch.manual_seed(0)
    model, features = Model().to(side.dtype), list[Tensor]()
    for block in model.blocks:
        block.second.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    return trained(side, model, in_turn, features, lambda net, x: net(x))


@idiom(unused=True)
def a_loss_of_features_in_a_list_that_blocks_are_given(side: Side) -> Found:
    torch.manual_seed(0)
    features = list[Tensor]()
    return trained(side, Model().to(side.dtype), of_features, features, lambda net, x: net(x, features))


@idiom(unused=True)
def a_loss_of_what_a_network_gives_that_blocks_call(side: Side) -> Found:
    torch.manual_seed(0)
    model, features = Given(network()).to(side.dtype), list[Tensor]()
    model.shared.register_forward_hook(lambda module, args, output: features.append(output))
    return trained(side, model, in_turn, features, lambda net, x: net(x))
