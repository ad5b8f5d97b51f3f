"""A training goes on at another stage among another number of ranks, with the optimizer's states carried over."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import NEAREST_GROUPS, WORLDS, assert_same, data, make, shares, snapshot

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}

States = dict[str, dict[str, Tensor]]
"""By the name of a parameter: what an optimizer keeps for it, whole."""


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, dict[str, Tensor]]]:
    """What this rank's optimizer keeps for its shard of each parameter, and where that begins."""
    engine, found = pl.engine_of(model), {}
    parameters, shards = dict(model.named_parameters()), engine.schedule.shards
    for bucket in engine.layout.buckets:
        for index in bucket.slots:
            slot = engine.layout.slots[index]
            start, stop = engine.layout.shard_of(bucket, index, engine.world.rank % shards, shards)
            if start < stop:
                # What was loaded for no elements was never stepped.
                found[slot.spec.name] = (start - slot.offset, dict(optimizer.state[parameters[slot.spec.name]]))
    return found


def joined(every: list[dict[str, tuple[int, dict[str, Tensor]]]]) -> States:
    """The shards of all ranks put together."""
    whole: States = {}
    for name, parameter in make().named_parameters():
        whole[name] = {}
        for begin, state in (held[name] for held in every if name in held):
            for key, value in state.items():
                if key == "step":
                    whole[name][key] = value
                else:
                    flat = whole[name].setdefault(key, torch.full_like(parameter, torch.nan).detach()).view(-1)
                    flat[begin : begin + value.numel()] = value.flatten()
    return whole


def trained(strategy: Strategy | None, name: str, start: tuple[dict, States] | None, first: int) -> dict[str, Any]:
    """Two steps from `start`: the weights after them, the optimizer's states, the losses of the global batches."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    cls, options = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **options)
    if start is not None:
        # Ranks are given the same memory, which an optimizer would go on to write to.
        weights, states = copy.deepcopy(start)
        model.load_state_dict(weights)
        numbered = {index: states[key] for index, (key, _) in enumerate(model.named_parameters())}
        optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
    losses = []
    for number in range(first, first + 2):
        x, y = data(number, 12)
        if strategy is not None:
            x, y = shares(x), shares(y)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        every = pl.all_gather_json(loss.item()) if strategy is not None else [loss.item()]
        losses.append(sum(every) / len(every))
    plain = {key: (0, dict(optimizer.state[parameter])) for key, parameter in model.named_parameters()}
    held = plain if strategy is None else shards(model, optimizer)
    weights = snapshot(model)
    if strategy is not None:
        pl.release(model)
    return {"weights": weights, "states": held, "losses": losses}


@functools.cache
def by_one(name: str) -> dict[str, Any]:
    """Four steps in one process."""
    begun = trained(None, name, None, 0)
    return trained(None, name, (begun["weights"], joined([begun["states"]])), 2)


def with_each(strategy: Strategy, starts: dict[str, tuple[dict, States]] | None, first: int) -> dict[str, dict]:
    return {name: trained(strategy, name, starts and starts[name], first) for name in OPTIMIZERS}


NAMES = [*WORLDS]
# A shift by seven changes stage and number of ranks at once.
PAIRS = {f"{before} to {after}": (before, after) for before, after in zip(NAMES, NAMES[7:] + NAMES[:7], strict=True)}

PAIRS["zero 3, N=4 to zero 1, N=3"] = "zero 3, N=4", "zero 1, N=3"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            *pair,
            id=name,
            marks=() if pair[0] in NEAREST_GROUPS or pair[1] == "zero 1, N=3" else pytest.mark.other_worlds,
        )
        for name, pair in PAIRS.items()
    ],
)
def test_it_goes_on_as_in_one_process(ranks, before, after) -> None:
    (strategy, n), (other, m) = WORLDS[before], WORLDS[after]
    begun = ranks(n, with_each, strategy, None, 0)
    starts = {
        name: (begun[0][name]["weights"], joined([result[name]["states"] for result in begun])) for name in OPTIMIZERS
    }
    results = ranks(m, with_each, other, starts, 2)
    for name in OPTIMIZERS:
        expected = by_one(name)
        for result in results:
            assert result[name]["losses"] == pytest.approx(expected["losses"], abs=1e-12)
            assert_same(result[name]["weights"], expected["weights"])
        states, wanted = joined([result[name]["states"] for result in results]), joined([expected["states"]])
        for parameter, state in wanted.items():
            assert_same(states[parameter], state)
