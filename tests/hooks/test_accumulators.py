"""Nobody holds where autograd accumulates: it belongs to a stream, on a GPU that of the forward that made it."""

from __future__ import annotations

import gc

import pytest

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.hooks.parameters import accumulator
from tests.engine.models import STAGES, loss_on, make
from tests.quick import some


def held_after_a_step(strategy: Strategy) -> list[bool]:
    """Of each parameter, whether its accumulator is there when its graph is not, and (last) while it is."""
    model = pl.parallelize(make(), strategy)
    parameters = list(model.parameters())
    loss_on(model, 0).backward()
    loss = loss_on(model, 1)
    for parameter in parameters:
        accumulator(parameter).metadata["seen"] = True
    there = all("seen" in accumulator(parameter).metadata for parameter in parameters)
    loss.backward()
    del loss
    gc.collect()
    found = ["seen" in accumulator(parameter).metadata for parameter in parameters]
    pl.release(model)
    return [*found, there]


@pytest.mark.parametrize("name", some(STAGES, ["zero 2"]))
def test_an_accumulator_is_gone_with_its_graph(ranks, name: str) -> None:
    for found in ranks(2, held_after_a_step, STAGES[name]):
        *after, there = found
        assert there and not any(after)
