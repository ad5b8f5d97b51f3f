"""Optimizer steps that raise, as by Ctrl-C, and what a loop does then."""

from __future__ import annotations

import torch

import paceline as pl
from tests.idioms.side import Found, Side, fit, idiom, mlp, state


@pl.elementwise
class Interrupted(torch.optim.AdamW):
    """Raises once, as the step begins."""

    due = False

    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        """As AdamW, or nothing."""
        if self.due:
            self.due = False
            raise KeyboardInterrupt
        return super().step(closure)


def _interrupt(side: Side, net: torch.nn.Module, optimizer: Interrupted | Half) -> None:
    x, y = side.batch(7)
    (net(x) - y).square().mean().backward()
    optimizer.due = True
    try:
        optimizer.step()
    except KeyboardInterrupt:
        optimizer.zero_grad()


@idiom()
def saved_after_a_step_that_raised(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = Interrupted(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    _interrupt(side, net, optimizer)
    return state(model)


@idiom()
def trained_on_after_a_step_that_raised(side: Side) -> Found:
    """What is read between backward and the next step is whole."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = Interrupted(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    _interrupt(side, net, optimizer)
    x, y = side.batch(3)
    with torch.no_grad():
        evaluated = side.mean((net(x) - y).square().mean())
    (net(x) - y).square().mean().backward()
    shapes = {f"shape {name}": torch.tensor(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    fit(side, net, optimizer, 1)
    return {"evaluated": evaluated, **shapes, **state(model)}


@pl.elementwise
class Half(torch.optim.SGD):
    """Descent by hand, which raises once when it has updated the first two parameters."""

    due = False

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        """Updates all parameters, or two."""
        for index, p in enumerate(self.param_groups[0]["params"]):
            if self.due and index == 2:
                self.due = False
                raise KeyboardInterrupt
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)


@idiom()
def trained_on_after_half_a_step_that_raised(side: Side) -> Found:
    """What was written counts, on all ranks."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = Half(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    _interrupt(side, net, optimizer)
    fit(side, net, optimizer, 2)
    return state(model)
