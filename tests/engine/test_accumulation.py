"""Micro-batches: every policy gives what one batch gives, however many of them a step has."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import NEAREST_GROUPS, WORLDS, assert_same, data, in_worlds, make, shares, snapshot

# Two and three micro-batches of equal size on each of two, three or four ranks.
SAMPLES = 72


def accumulated(strategy: Strategy | None) -> list[dict]:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, micro_batches in enumerate((1, 3, 2)):
        x, y = data(step, SAMPLES)
        if strategy is None:
            F.mse_loss(model(x), y).backward()
        else:
            parts = zip(shares(x).chunk(micro_batches), shares(y).chunk(micro_batches), strict=True)
            for xs, ys in pl.accumulate(model, list(parts)):
                (F.mse_loss(model(xs), ys) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(snapshot(model))
    if strategy is not None:
        pl.release(model)
    return found


def by_policies(strategy: Strategy, policies: list[str]) -> dict[str, list[dict]]:
    # Parameters that are gathered may be held, too.
    possible = [policy for policy in policies if policy != "hold" or strategy.gathers]
    return {policy: accumulated(replace(strategy, accumulation=policy)) for policy in possible}


@functools.cache
def in_one_batch() -> list[dict]:
    return accumulated(None)


@in_worlds(WORLDS, NEAREST_GROUPS, policies={"each": ["each"], "once": ["defer", "hold"]})
def test_accumulation_policies_equal_one_batch_however_many_micro_batches_a_step_has(
    ranks, strategy, n, policies
) -> None:
    for results in ranks(n, by_policies, strategy, policies):
        for policy, found in results.items():
            for step, (state, wanted) in enumerate(zip(found, in_one_batch(), strict=True)):
                assert_same(
                    {f"{policy}, step {step}, {name}": value for name, value in state.items()},
                    {f"{policy}, step {step}, {name}": value for name, value in wanted.items()},
                )
