"""Blocks that paceline computes again in backward, and what these are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.idioms.side import WIDTH, Found, Paceline, Side, idiom, state, trained

WRITTEN = tuple(
    (place, "a tensor that its forward is given was written to in place")
    for place in (*(f"zero {zero}" for zero in range(4)), "low")
)


class Block(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(WIDTH, WIDTH), compute

    def forward(self, *given, **named):
        return self.compute(self, *given, **named)


class Model(nn.Module):
    """Blocks one after another, each run with its input and with what is beside that."""

    def __init__(self, compute: Callable[..., Tensor], run: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), run
        self.blocks = nn.ModuleList(Block(compute) for _ in range(3))

    def forward(self, x):
        x, beside = self.first(x).tanh() + 0, torch.zeros(1, dtype=x.dtype)
        for block in self.blocks:
            x = self.run(block, x, beside)
        return self.head(x)


def how(side: Side) -> Literal["unit", "keep_attention"]:
    """Either, as each idiom is run with one micro-batch and with two."""
    return "unit" if side.micro == 1 else "keep_attention"


def recomputed(
    side: Side,
    compute: Callable[..., Tensor],
    run: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda block, x, beside: block(x),
) -> Found:
    if isinstance(side, Paceline):
        side.strategy = replace(side.strategy, recompute=how(side))
    torch.manual_seed(0)
    return trained(side, Model(compute, run))


@idiom(refused=WRITTEN)
def recomputed_blocks_add_to_their_input(side: Side) -> Found:
    return recomputed(side, lambda block, x: x.mul_(0.5).add_(block.linear(x.clone()).tanh()))


@idiom(refused=WRITTEN)
def recomputed_blocks_count_in_what_they_are_given(side: Side) -> Found:
    def compute(block: Block, x: Tensor, counts: list[Tensor]) -> Tensor:
        counts[0].add_(1)
        return block.linear(x).tanh() * counts[0].exp()

    return recomputed(side, compute, lambda block, x, beside: block(x, [beside]))


@idiom(refused=WRITTEN)
def what_recomputed_blocks_are_given_goes_on(side: Side) -> Found:
    """The model counts between them."""

    def run(block: nn.Module, x: Tensor, beside: Tensor) -> Tensor:
        x = block(x, scale=beside)
        beside.add_(0.5)
        return x

    return recomputed(side, lambda block, x, scale: block.linear(x).tanh() * scale.exp(), run)


@idiom()
def recomputed_blocks_write_to_their_own(side: Side) -> Found:
    """Tensors that they make themselves, and the answer of another."""

    def compute(block: Block, x: Tensor) -> Tensor:
        mine = block.linear(x)
        mine.mul_(0.5)
        return mine.add_(x)

    return recomputed(side, compute, lambda block, x, beside: block(x).mul_(0.9))


class Halved(nn.Module):
    """What dropout would do, without chance."""

    def forward(self, x):
        return x if self.training else x / 2


def loop_recomputed(side: Side, model: nn.Module) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """For loops of their own: the model, what is called in its place, and an optimizer."""
    if isinstance(side, Paceline):
        side.strategy = replace(side.strategy, recompute=how(side))
    model = model.to(side.dtype)
    return model, side.parallel(model), torch.optim.SGD(model.parameters(), 0.1)


@idiom()
def recomputed_blocks_evaluated_before_backward(side: Side) -> Found:
    torch.manual_seed(0)
    plain = Model(lambda block, x: x + block.halved(block.linear(x).tanh()), lambda block, x, beside: block(x))
    for block in plain.blocks:
        block.halved = Halved()
    model, net, optimizer = loop_recomputed(side, plain)
    for step in range(3):
        x, y = side.batch(step)
        loss = (net(x) - y).square().mean()
        model.eval()
        with torch.no_grad():
            net(x)
        loss.backward()
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(refused=(("zero 3", r"read or edit it inside `with pl\.full_parameters"),))
def recomputed_blocks_with_parameters_that_are_lent(side: Side) -> Found:
    torch.manual_seed(0)
    plain = Model(lambda block, x: x + block.linear(x).tanh(), lambda block, x, beside: block(x))
    model, _, optimizer = loop_recomputed(side, plain)
    for step in range(3):
        x, y = side.batch(step)
        lent = {name: p * 1.5 for name, p in model.named_parameters() if name.startswith("blocks")}
        (torch.func.functional_call(model, lent, (x,)) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def recomputed_blocks_count_anneal_and_draw(side: Side) -> Found:
    torch.manual_seed(0)

    def compute(block, x):
        block.calls += 1
        block.seen.append(block.calls)
        if block.table is None:
            block.table = torch.linspace(0.5, 1, WIDTH, dtype=x.dtype)
        drawn = torch.rand(WIDTH, generator=block.generator, dtype=torch.float64).to(x.dtype)
        return x * block.table + block.scale / block.calls * drawn * block.linear(x).tanh()

    plain = Model(compute, lambda block, x, beside: block(x))
    for block in plain.blocks:
        block.calls, block.seen, block.table, block.scale = 0, [], None, 1.0
        block.generator = torch.Generator().manual_seed(3)
    model, net, optimizer = loop_recomputed(side, plain)
    for step in range(3):
        x, y = side.batch(step)
        loss = (net(x) - y).square().mean()
        for block in model.blocks:
            block.scale *= 0.5
            block.seen = block.seen[-1:]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    calls = torch.tensor([float(block.calls) for block in model.blocks])
    seen = torch.tensor([float(len(block.seen)) for block in model.blocks])
    return state(model) | {"calls": calls, "seen": seen}


class Lending(nn.Module):
    """Gives its blocks parameters of another module, and of a block that runs later."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(borrowing) for _ in range(3))
        self.run = run

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = self.run(block, x, self.shared.weight if number else self.blocks[2].linear.weight)
        return self.head(x)


def borrowing(block: Block, x: Tensor, weight: Tensor) -> Tensor:
    return x + block.linear(x).tanh() + nn.functional.linear(x, weight).sin()


@idiom()
def recomputed_blocks_are_given_parameters_of_others(side: Side) -> Found:
    if isinstance(side, Paceline):
        side.strategy = replace(side.strategy, recompute=how(side))
    torch.manual_seed(0)
    return trained(side, Lending(lambda block, x, weight: block(x, weight)))


@idiom(refused=(("zero 3", "is given the parameter .* by way of torch's checkpoint"),))
def checkpoints_are_given_parameters_of_others(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, Lending(lambda block, x, weight: checkpoint(block, x, weight, use_reentrant=False)))


@idiom(refused=(("zero 3", "a function is given the parameter head.weight by way of torch's checkpoint"),))
def a_checkpointed_loss_is_given_a_head(side: Side) -> Found:
    """As losses in chunks of rows do, whose logits would take too much."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 2, bias=False)

        def forward(self, x):
            x = self.body(x)
            chunks = [checkpoint(nn.functional.linear, rows, self.head.weight, use_reentrant=False) for rows in x]
            return torch.stack(chunks)

    torch.manual_seed(0)
    return trained(side, Model())
