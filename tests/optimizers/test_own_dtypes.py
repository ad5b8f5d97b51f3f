"""States have the dtype that an optimizer chose in its step, or that of the update where it was built with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, snapshot
from tests.quick import full

KINDS = {
    "start": torch.float32,
    "total": torch.float32,
    "momentum": torch.bfloat16,
    "moved": torch.bool,
    "count": torch.int8,
}


class Choosing(torch.optim.Optimizer):
    """Makes some states when it is built, as MADGRAD does, and others in its steps, in dtypes of its own."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})
        for p in self.param_groups[0]["params"]:
            self.state[p].update(start=p.data.clone(), total=torch.zeros_like(p.data))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["moved"] = torch.zeros_like(p, dtype=torch.bool)
                state["count"] = torch.zeros_like(p, dtype=torch.int8)
            state["total"].addcmul_(p.grad, p.grad)
            state["momentum"].mul_(0.9).add_(p.grad)
            state["moved"].logical_or_(p.grad > 0)
            state["count"].add_((p.grad > 0).to(torch.int8))
            scale = 1 + 0.1 * state["count"] + 0.1 * state["moved"]
            p.sub_(scale * state["momentum"].float() / (1 + state["total"]), alpha=0.05)
            p.lerp_(state["start"], 0.01)


@pl.elementwise
class Vouched(Choosing):
    """The same, on shards."""


def train(strategy: Strategy, cls: type[Choosing], steps: int = 4, folder: Path | None = None) -> tuple[dict, dict]:
    """Weights, and dtypes of the states of all parameters on this rank. With a folder it goes on from a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    pl.parallelize(model, strategy)
    optimizer = cls(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        if folder is not None and step == steps // 2:
            pl.save(folder, model, optimizer, step=step)
            optimizer = cls(model.parameters())
            pl.load(folder, model, optimizer)
        model(torch.randn(4, 6, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [optimizer.state[p] for p in model.parameters() if optimizer.state[p]]
    return snapshot(model), {name: {state[name].dtype for state in held if name in state} for name in KINDS}


LOW = {name: replace(strategy, precision="bfloat16") for name, strategy in STAGES.items()}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("zero 0", Choosing),
        ("zero 1", Choosing),
        full("zero 2", Choosing),
        full("zero 1", Vouched),
        ("zero 2", Vouched),
    ],
)
@pytest.mark.filterwarnings("ignore:Choosing may need")
def test_states_keep_their_dtypes_where_masters_are_wider(ranks, name: str, cls: type[Choosing]) -> None:
    alone, kinds = ranks(1, train, LOW["zero 0"], cls)[0]
    assert {name: {dtype} for name, dtype in KINDS.items()} == kinds
    for weights, found in ranks(2, train, LOW[name], cls):
        assert {name: {dtype} for name, dtype in KINDS.items()} == found
        assert_same(weights, alone, 1e-6)


@pytest.mark.parametrize("name", [full("zero 0"), "parameter server", full("zero 1")])
@pytest.mark.filterwarnings("ignore:Choosing may need")
def test_and_where_parameters_are_in_float32(ranks, name: str) -> None:
    strategy = Strategy(collective="parameter_server") if name == "parameter server" else STAGES[name]
    alone, _ = ranks(1, train, Strategy(), Vouched)[0]
    found = ranks(2, train, strategy, Vouched)
    assert found[0][1] == {name: {dtype} for name, dtype in KINDS.items()}
    for weights, _ in found:
        assert_same(weights, alone, 1e-6)


@pytest.mark.parametrize(("name", "cls"), [full("zero 0", Choosing), ("zero 1", Choosing), full("zero 2", Vouched)])
@pytest.mark.parametrize("precision", [full("float32"), "bfloat16"])
@pytest.mark.filterwarnings("ignore:Choosing may need")
def test_a_checkpoint_goes_on_to_the_bit(ranks, tmp_path: Path, name: str, cls: type[Choosing], precision: str) -> None:
    strategy = replace(STAGES[name], precision=precision)  # type: ignore[arg-type]
    through, kinds = ranks(2, train, strategy, cls)[0]
    on, found = ranks(2, train, strategy, cls, 4, tmp_path / "step")[0]
    assert found == kinds
    assert_same(on, through, 0.0)
