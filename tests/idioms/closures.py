"""What loops do inside the closure that an optimizer's step calls, as Lightning's trainer does all of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import paceline as pl
from tests.idioms.side import Found, Side, idiom, mlp, state

Inside = Callable[[Side, nn.Module, Tensor], None]


def stepped(side: Side, inside: Inside) -> Found:
    """Three steps by AdamW, in whose closures gradients come of one forward, by `inside`."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    losses = []
    for step in range(3):
        x, y = side.batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            inside(side, model, loss)
            return loss

        losses.append(side.mean(optimizer.step(closure)))
    return {**state(model), "losses": torch.stack(losses)}


@idiom()
def a_closure_that_clips(side: Side) -> Found:
    def inside(side: Side, model: nn.Module, loss: Tensor) -> None:
        loss.backward()
        side.clip(model, 0.1)

    return stepped(side, inside)


@idiom()
def a_closure_that_clips_by_torch(side: Side) -> Found:
    def inside(side: Side, model: nn.Module, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return stepped(side, inside)


@idiom()
def a_closure_of_two_losses(side: Side) -> Found:
    def inside(side: Side, model: nn.Module, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()

    return stepped(side, inside)


@idiom()
def a_closure_that_looks_at_the_weights(side: Side) -> Found:
    """After its backward."""
    seen = []

    def inside(side: Side, model: nn.Module, loss: Tensor) -> None:
        loss.backward()
        with side.whole(model):
            seen.append(sum(p.detach().double().square().sum() for p in model.parameters()))

    return {**stepped(side, inside), "seen": torch.stack(seen)}


@idiom()
def a_closure_that_evaluates(side: Side) -> Found:
    """After its backward, and instead of one."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    losses = []
    for step in range(4):
        x, y = side.batch(step)

        def trained(x: Tensor = x, y: Tensor = y) -> None:
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()

        def closure(step: int = step, train: Callable[[], None] = trained) -> Tensor:
            if step % 2:
                train()
            with torch.no_grad():
                x, y = side.batch(99)
                return (net(x) - y).square().mean()

        if not step % 2:
            trained()
        losses.append(side.mean(optimizer.step(closure)))
    return {**state(model), "losses": torch.stack(losses)}


@pl.elementwise
class LooksAhead(torch.optim.Optimizer):
    """Takes the gradient of each step where the weights would be after a first one."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.sub_(p.grad, alpha=self.defaults["lr"])
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old).sub_(p.grad, alpha=self.defaults["lr"])
        return loss


@idiom()
def a_closure_that_runs_twice_in_a_step(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = LooksAhead(model.parameters(), 0.1)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            for x, y in side.micro_batches(net, step):
                loss = (net(x) - y).square().mean() / side.micro
                loss.backward()
            side.clip(model, 0.5)
            return loss

        losses.append(side.mean(optimizer.step(closure)))
    return {**state(model), "losses": torch.stack(losses)}
