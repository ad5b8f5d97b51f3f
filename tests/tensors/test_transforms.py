"""Transforms of torch.func over parameters outside of their unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, Stack, assert_all_same, in_parallel, loss_on, make, snapshot, stages
from tests.quick import diagonal


def _squares(row: Tensor) -> Tensor:
    return row.square().sum()


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda weight: torch.vmap(_squares)(weight),
    "vmap of a pair": lambda weight: torch.vmap(torch.dot)(weight, weight),
    "grad": lambda weight: torch.func.grad(_squares)(weight),
    "vjp": lambda weight: torch.func.vjp(torch.sin, weight)[0],
    "jacrev": lambda weight: torch.func.jacrev(_squares)(weight),
    "jvp": lambda weight: torch.func.jvp(torch.sin, (weight,), (torch.ones_like(weight),))[1],
    "hessian": lambda weight: torch.func.hessian(_squares)(weight),
}


def penalised(model: nn.Module) -> list[dict[str, Tensor]]:
    """Steps with a penalty on weights that a transform computes, before and after the forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        if step % 2:
            penalty = torch.vmap(_squares)(model.head.weight).mean()
            loss = loss_on(model, step)
        else:
            loss = loss_on(model, step)
            penalty = torch.vmap(_squares)(model.head.weight).mean()
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(snapshot(model))
    return found


def penalised_or_refused(strategy: Strategy) -> list[dict[str, Tensor]] | str:
    try:
        return in_parallel(strategy, Stack, penalised)
    except EngineError as error:
        return str(error)


@stages
def test_penalties_that_a_transform_computes_are_right_or_refused(ranks, strategy) -> None:
    for found in ranks(3, penalised_or_refused, strategy):
        if strategy.zero == 3:
            # The second step's is computed before its forward.
            assert "torch.func of head.weight outside of forward and backward" in found
        else:
            assert_all_same(found, penalised(make()))


def read(model: nn.Module, kind: str) -> list[dict[str, Tensor]]:
    """What a transform gives of weights right after each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
        found.append({name: TRANSFORMS[kind](p).detach() for name, p in matrices.items()})
    return found


@pytest.mark.parametrize(("stage", "kind"), diagonal(["zero 0", "zero 1", "zero 2"], list(TRANSFORMS)))
def test_a_transform_sees_weights_as_they_are_updated(ranks, stage, kind) -> None:
    for found in ranks(3, in_parallel, STAGES[stage], Stack, read, kind):
        assert_all_same(found, read(make(), kind))


def refused(strategy: Strategy) -> list[str]:
    def messages(model: nn.Module) -> list[str]:
        found = []
        for transform in TRANSFORMS.values():
            with pytest.raises(EngineError) as caught:
                transform(model.head.weight)
            found.append(str(caught.value))
        return found

    return in_parallel(strategy, Stack, messages)


def test_a_transform_of_what_is_sharded_is_an_error(ranks) -> None:
    for messages in ranks(2, refused, STAGES["zero 3"]):
        assert all("head.weight outside of forward and backward" in message for message in messages)
