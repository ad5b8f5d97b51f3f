"""Elementwise optimizers at every stage equal one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import HYBRID, SHARDED, STAGES, assert_same, data, make, shares, snapshot
from tests.quick import diagonal, full, some

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Two parameter groups, with another rate and decay each."""
    cls, options = OPTIMIZERS[name]
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    vectors = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]
    if name == "Rprop":
        # It knows no decay.
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return cls(groups, **options)


def optimised(strategy: Strategy | None, name: str) -> dict:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = optimizer_for(model, name)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        x, y = data(step, 12)
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        rates.step()
    return snapshot(model)


IN_SHARDS = {**SHARDED, "zero 2, shared parameters": replace(STAGES["zero 2"], share_parameters=True)}


@pytest.mark.parametrize(("name", "strategy"), diagonal(OPTIMIZERS.keys(), IN_SHARDS))
def test_every_elementwise_optimizer_with_groups_and_a_schedule_equals_one_process(ranks, name, strategy) -> None:
    expected = optimised(None, name)
    for state in ranks(3, optimised, strategy, name):
        assert_same(state, expected)


def searched(strategy: Strategy | None, line: str | None, wide: bool) -> dict:
    """Steps of LBFGS, whose length the loss decides, which differs between ranks."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line)
    for step in range(2):
        x, y = data(step, 12)
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        if wide:
            optimizer.step(closure)
        else:
            optimizer.step(closure=closure)
    return snapshot(model)


@pytest.mark.parametrize("wide", [True, False], ids=["positional", "by name"])
@pytest.mark.parametrize("line", [None, "strong_wolfe"])
def test_lbfgs_decides_by_the_loss_of_all_ranks(ranks, line, wide) -> None:
    expected = searched(None, line, wide)
    for state in ranks(3, searched, STAGES["zero 0"], line, wide):
        assert_same(state, expected, atol=1e-8)


def two_optimizers(strategy: Strategy | None) -> dict:
    """One for matrices and one for vectors, which step one after the other."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    names = [name for name, _ in model.named_parameters()]
    by_name = dict(model.named_parameters())
    matrices = torch.optim.AdamW([by_name[name] for name in names if name.endswith("weight")], lr=1e-2)
    vectors = torch.optim.SGD([by_name[name] for name in names if name.endswith("bias")], lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data(step, 12)
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)
        F.mse_loss(model(x), y).backward()
        matrices.step()
        vectors.step()
        matrices.zero_grad()
        vectors.zero_grad()
    return snapshot(model)


@pytest.mark.parametrize("name", some([*STAGES, *HYBRID], {*STAGES, "zero 3, 2 x 2"}))
def test_two_optimizers_may_share_a_model(ranks, name) -> None:
    expected = two_optimizers(None)
    for state in ranks(4, two_optimizers, {**STAGES, **HYBRID}[name]):
        assert_same(state, expected)


@pl.elementwise
class Clamped(torch.optim.AdamW):
    """Changes parameters before and after the step that it inherits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.99)
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.clamp_(-0.3, 0.3)
        return loss


@pl.elementwise
class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and goes back half of the way every second time (Zhang et al. 2019)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.count:
            for p in parameters:
                self.state[p]["slow"] = p.detach().clone()
        loss = self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p in parameters:
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))
        return loss


def nested(strategy: Strategy | None, kind: str, raises: str) -> dict:
    """With an optimizer whose step is a part of another's; perhaps one raises, and "reset" or nothing follows."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    # Torch puts its hooks around a class's step when the first optimizer of that class is built.
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = Clamped(model.parameters(), lr=0.05) if kind == "inherits" else Lookahead(base)
    for step in range(4):
        x, y = data(step, 12)
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)
        F.mse_loss(model(x), y).backward()
        if raises and step == 1:

            def fails() -> None:
                raise KeyError("closure")

            with pytest.raises(KeyError):
                optimizer.step(fails)
            if strategy is not None and raises == "reset":
                pl.reset(model)
            if raises == "stepped again":
                optimizer.step()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


# With "inherits", Clamped has changed parameters before the step that raises inside of it, which nothing undoes.
@pytest.mark.parametrize(
    ("kind", "raises"),
    [("inherits", ""), ("steps", ""), ("steps", "reset"), ("steps", "goes on"), ("steps", "stepped again")],
)
@pytest.mark.parametrize("name", some([*IN_SHARDS, "zero 0"], {"zero 0", "zero 2", "zero 3"}))
def test_an_optimizers_step_may_be_a_part_of_anothers(ranks, name, kind, raises) -> None:
    expected = nested(None, kind, raises)
    for state in ranks(2, nested, {**IN_SHARDS, **STAGES}[name], kind, raises):
        assert_same(state, expected)


def test_groups_of_ranks_that_shard_and_replicate_equal_one_process(ranks) -> None:
    expected = optimised(None, "AdamW")
    for strategy in HYBRID.values():
        for state in ranks(4, optimised, strategy, "AdamW"):
            assert_same(state, expected)


@pl.elementwise
class Failing(torch.optim.SGD):
    """Raises in its second step, once some parameters are updated."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.steps += 1
        for number, p in enumerate(self.param_groups[0]["params"]):
            if self.steps == 2 and number == 2:
                raise KeyError("mine")
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def failed(strategy: Strategy | None) -> dict:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = Failing(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = data(step, 12) if strategy is None else map(shares, data(step, 12))
        F.mse_loss(model(x).double(), y).backward()
        try:
            optimizer.step()
        except KeyError:
            if strategy is not None:
                pl.reset(model)
        optimizer.zero_grad()
        if step == 2:
            model.state_dict()
    return snapshot(model)


@pytest.mark.parametrize("name", ["zero 0", full("zero 1"), "zero 2", full("zero 3")])
def test_a_loop_goes_on_in_low_precision_after_a_step_that_raised(ranks, name: str) -> None:
    expected = failed(None)
    for found in ranks(2, failed, replace(STAGES[name], precision="bfloat16")):
        assert_same(found, expected, 0.05)
