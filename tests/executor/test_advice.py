"""A call that one rank makes alone ends on both, saying which call every rank must make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.executor.advice import ADVICE, advised
from tests.ranks import RankPool


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 8))


def enter(model: nn.Module) -> None:
    with pl.full_parameters(model):
        pass


ALONE: dict[str, Callable[[nn.Module], object]] = {
    "forward": evaluate,
    "model.state_dict()": lambda model: model.state_dict(),
    "model.load_state_dict()": lambda model: model.load_state_dict(
        {f"{i}.{name}": torch.zeros((8, 8)[: 2 - (name == "bias")]) for i in range(3) for name in ("weight", "bias")}
    ),
    "pl.full_parameters": enter,
    "pl.clip_grad_norm_": lambda model: pl.clip_grad_norm_(model, 1.0),
    "pl.release": pl.release,
}


def by_one_rank(call: str, zero: int) -> tuple[str, float]:
    """What this rank is told, and its loss of a step after `pl.reset`, if the model is still parallel."""
    world = pl.init()
    torch.manual_seed(0)
    model = pl.parallelize(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), pl.Strategy(zero=zero))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    with pytest.raises(CommunicationError) as told:
        if world.rank == 0:
            ALONE[call](model)
        for _ in range(3):
            step()
    if call == "pl.release":
        return str(told.value), 0.0
    pl.reset(model)
    model.train()
    loss = step()
    pl.release(model)
    return str(told.value), loss


@pytest.mark.parametrize(
    ("call", "zero"),
    [
        ("forward", 3),
        ("model.state_dict()", 3),
        ("pl.clip_grad_norm_", 1),
        *(pytest.param(call, 3, marks=pytest.mark.full) for call in ALONE if call.startswith(("pl", "model.load"))),
        pytest.param("pl.clip_grad_norm_", 2, marks=pytest.mark.full),
    ],
)
def test_what_one_rank_does_alone_says_what_every_rank_must_do(ranks: RankPool, call: str, zero: int) -> None:
    told, losses = zip(*ranks(2, by_one_rank, call, zero), strict=True)
    # Whichever rank finds out first, both read who is where.
    assert any(ADVICE[call] in text or f"for {call}" in text for text in told), told
    assert losses[0] == losses[1]


def test_advice_stands_where_ranks_did_not_meet() -> None:
    met = advised(CommunicationError("rank 1 is gone"), "forward", "0 holds a to b")
    assert str(met) == f"rank 1 is gone; 0 holds a to b. {ADVICE['forward']}"
    both = advised(CommunicationError("rank 1 gave up: ranks disagree"), "forward")
    assert str(both) == f"rank 1 gave up: ranks disagree. {ADVICE['forward']}"
    told = advised(CommunicationError("rank 1 gave up: ValueError"), "forward", "0 holds a to b")
    assert str(told) == "rank 1 gave up: ValueError; 0 holds a to b"
    assert str(advised(CommunicationError("rank 1 is gone"), "pl.parallelize")) == "rank 1 is gone"
