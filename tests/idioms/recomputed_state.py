"""What blocks that paceline computes again change beside tensors: it changes once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tests.idioms.recomputed import Model, how, recomputed
from tests.idioms.side import WIDTH, Found, Paceline, Side, idiom, state, trained


class Counting(nn.Module):
    """Computes with how often it has run, by a number and a buffer, and with random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("runs", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        self.calls += 1
        self.runs += 0.5
        noise = torch.rand((), generator=self.generator, dtype=torch.float64).to(x.dtype)
        return self.linear(x / self.calls + self.runs * noise).tanh()


class Given(Model):
    def __init__(self, compute: Callable[..., Tensor], run: Callable[..., Tensor]) -> None:
        super().__init__(compute, run)
        self.counting = Counting()

    def forward(self, x):
        x = self.first(x).tanh()
        for block in self.blocks:
            x = self.run(block, x, self.counting)
        return self.head(x)


def given(side: Side, compute: Callable[..., Tensor], run: Callable[..., Tensor], held: bool = False) -> Found:
    if isinstance(side, Paceline):
        side.strategy = replace(side.strategy, recompute=how(side))
    torch.manual_seed(0)
    model = Given(compute, run)
    if held:
        for block in model.blocks:
            block.others = (model.counting,)
    found = trained(side, model)
    return {**found, "calls": torch.tensor(float(model.counting.calls))}


@idiom()
def blocks_computed_again_call_a_counting_module_that_they_are_given(side: Side) -> Found:
    return given(side, lambda block, x, other: block.linear(other(x)), lambda block, x, other: block(x, other))


@idiom()
def blocks_computed_again_call_a_counting_module_by_name(side: Side) -> Found:
    return given(
        side, lambda block, x, by: block.linear(by(x)), lambda block, x, other: block(x, by=lambda x: other(x))
    )


@idiom()
def blocks_computed_again_call_a_counting_module_that_they_refer_to(side: Side) -> Found:
    return given(side, lambda block, x: block.linear(block.others[0](x)), lambda block, x, other: block(x), held=True)


@idiom()
def blocks_computed_again_make_a_hook_and_take_it_away(side: Side) -> Found:
    def compute(block: nn.Module, x: Tensor) -> Tensor:
        hook = block.linear.register_forward_hook(lambda module, args, output: output / 2)
        answer = block.linear(x).tanh() + x
        hook.remove()
        return block.linear(answer)

    return recomputed(side, compute)


@idiom()
def blocks_computed_again_put_a_hook_in_the_place_of_their_last(side: Side) -> Found:
    def compute(block: nn.Module, x: Tensor) -> Tensor:
        if hasattr(block, "hook"):
            block.hook.remove()
        block.hook = block.linear.register_forward_hook(lambda module, args, output: output / 2)
        return block.linear(x).tanh() + block.linear(x)

    return recomputed(side, compute)


@idiom()
def blocks_computed_again_draw_from_a_generator_in_a_dictionary(side: Side) -> Found:
    def compute(block: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(block, "state"):
            block.state = {"random": torch.Generator().manual_seed(3)}
        noise = torch.rand((), generator=block.state["random"], dtype=torch.float64).to(x.dtype)
        return block.linear(x * noise).tanh() * noise

    return recomputed(side, compute)


@dataclass
class Meter:
    calls: int = 0
    seen: list[list[int]] = field(default_factory=lambda: [[0]])


@idiom()
def blocks_computed_again_count_in_objects_and_nested_collections(side: Side) -> Found:
    def compute(block: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(block, "meter"):
            block.meter, block.counts = Meter(), {"calls": defaultdict(int), "others": (Meter(),)}
        block.meter.calls += 1
        block.meter.seen[0][0] += 2
        block.counts["calls"]["all"] += 3
        block.counts["others"][0].calls += 1
        total = block.meter.calls + block.meter.seen[0][0] + block.counts["calls"]["all"]
        return block.linear(x / total).tanh() * block.counts["others"][0].calls

    return recomputed(side, compute)


@idiom()
def blocks_computed_again_count_in_an_object_that_they_are_given(side: Side) -> Found:
    meter = Meter()

    def compute(block: nn.Module, x: Tensor, counts: Meter) -> Tensor:
        counts.calls += 1
        return block.linear(x / counts.calls).tanh()

    found = recomputed(side, compute, lambda block, x, beside: block(x, meter))
    return {**found, "calls": torch.tensor(float(meter.calls))}


@idiom()
def blocks_computed_again_are_frozen_for_forward_or_backward_alone(side: Side) -> Found:
    """As a discriminator is for a generator's forward; torch's own checkpoint raises."""
    if isinstance(side, Paceline):
        side.strategy = replace(side.strategy, recompute=how(side))
    torch.manual_seed(0)
    made, judge = (Model(lambda block, x: block.linear(x).tanh(), lambda block, x, beside: block(x)) for _ in range(2))
    for each in (made, judge):
        each.head = nn.Linear(WIDTH, WIDTH)
        each.to(side.dtype)
    net, judges = side.parallel(made), side.parallel(judge)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01, eps=1e-3) for each in (made, judge)]
    for step in range(3):
        x, _ = side.batch(step)
        judge.requires_grad_(False)
        loss = (judges(net(x)) - 1).square().mean()
        judge.requires_grad_(True)
        loss.backward()
        optimizers[0].step()
        loss = judges(x).square().mean()
        judge.blocks[0].requires_grad_(False)
        loss.backward()
        judge.requires_grad_(True)
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return {**state(made, "made."), **state(judge, "judge.")}
