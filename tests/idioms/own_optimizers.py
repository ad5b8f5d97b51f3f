"""Optimizers of a user's own: what they take for granted of parameters, gradients and states."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import paceline as pl
from tests.idioms.side import Found, Side, fit, idiom, mlp, state


@pl.elementwise
class Unasking(torch.optim.Optimizer):
    """Takes every parameter to have a gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.3), alpha=group["lr"])


@pl.elementwise
class Listing(Unasking):
    """Keeps states of its own, made when it is built."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.means = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p, mean in zip(self.param_groups[0]["params"], self.means, strict=True):
            if p.grad is not None:
                p.sub_(mean.lerp_(p.grad, 0.3), alpha=0.05)


def with_states_put_back(side: Side, net: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Found:
    fit(side, net, optimizer, 2)
    kept = copy.deepcopy(optimizer.state_dict())
    fit(side, net, optimizer, 1)
    optimizer.load_state_dict(kept)
    fit(side, net, optimizer, 1)
    return state(model)


@idiom()
def an_optimizer_that_asks_for_no_missing_gradient(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    return with_states_put_back(side, net, model, Unasking(model.parameters()))


@pl.elementwise
class Signed(torch.optim.SGD):
    """One of torch's with a step of its own, which takes every parameter to have a gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.3).tanh(), alpha=group["lr"])


@pl.elementwise
class Decaying(torch.optim.Adam):
    """One of torch's that changes gradients before the step that it has from there."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p.detach(), alpha=0.1)
        super().step(closure)


@idiom()
def an_optimizer_made_of_torchs_with_a_step_of_its_own(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, Signed(model.parameters(), lr=0.05), 3)
    return state(model)


@idiom()
def an_optimizer_made_of_torchs_that_changes_gradients_first(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    return with_states_put_back(side, net, model, Decaying(model.parameters(), lr=0.01))


LISTED = tuple((place, r"Listing\.means has a tensor for each") for place in ("zero 3", "low"))


@idiom(refused=LISTED)
def an_optimizer_that_lists_its_states(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, Listing(model.parameters()))
    return state(model)


@pl.elementwise
class Replacing(Unasking):
    """Puts new data in a parameter's place, twice in a step, and does not write to it."""

    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p.data))
            self.state[p]["mean"] = 0.7 * mean + 0.3 * p.grad.data
            p.data = p.data - 0.05 * self.state[p]["mean"]
            p.data = 0.99 * p.data


@idiom(off=1e-2)
def an_optimizer_that_puts_new_data_in_place_of_the_old(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, Replacing(model.parameters()))
    return state(model)


class Averaging(torch.optim.Optimizer):
    """Trains one sequence of weights and evaluates their average, as schedule-free descent does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
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
        ("zero 3", "pl.elementwise|was edited"),
        ("low", "was edited"),
        ("shared parameters", "was edited"),
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
