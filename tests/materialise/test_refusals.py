"""What would leave a model half made is refused, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.transport import CommunicationError
from tests.engine.models import Stack
from tests.materialise.meta_models import Varied, on_meta, refused

# ---- what is refused


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.register_buffer("turns", torch.ones(2), persistent=False)


class Whole(Stack):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def half(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
        module.weight[0].fill_(1)


def not_integers(module: nn.Module) -> None:
    if not isinstance(module, Varied):
        (getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", int))()
    else:
        nn.init.ones_(module.scale)


def another_parameter(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight, module.bias = nn.Parameter(torch.ones_like(module.weight)), None


def too_late(module: nn.Module) -> None:
    if isinstance(module, Varied):
        nn.init.zeros_(module.blocks[0].out.bias)
        module.reset_parameters()
    else:
        not_integers(module)


def raises(module: nn.Module) -> None:
    raise pl.UserError("no such distribution")


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "nothing": (Bare, {}, "nothing gives the model (Bare) its turns, as it has no reset_parameters()"),
    "the whole model": (Whole, {}, "reset_parameters of the model (Whole) is about several units"),
    "in part": (Stack, {"init": half}, "init left inner.weight without values"),
    "integers": (Varied, {"init": not_integers}, "init left steps without values"),
    "another": (Stack, {"init": another_parameter}, "init put another parameter in the place of inner."),
    "too late": (Varied, {"init": too_late}, "init wrote to blocks.0.out.bias when its unit was done"),
    "raises": (Stack, {"init": raises}, "no such distribution\nwhile inner (Linear) was initialised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_leave_a_model_half_made_is_refused(ranks, case) -> None:
    cls, given, expected = REFUSED[case]
    for n in (1, 2):
        for message in ranks(n, refused, cls, given):
            assert expected in message


def with_values(given: dict[str, Any]) -> str:
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(Stack(), **given)
    return str(caught.value)


def some_ranks() -> str:
    given = {"weights": "nowhere"} if pl.init().rank == 0 else {}
    return refused(Stack, given)


def test_arguments_that_contradict_each_other_are_errors(ranks) -> None:
    for given in ({"init": raises}, {"weights": "nowhere"}):
        assert "this one has values" in ranks(1, with_values, given)[0]
    for message in ranks(2, some_ranks):
        assert "weights are given on some ranks only" in message


def fails_on_rank_1() -> str:
    def init(module: nn.Module) -> None:
        if pl.init().rank == 1:
            raise ValueError("out of luck")
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with pytest.raises((CommunicationError, ValueError)) as caught:
        pl.parallelize(on_meta(Stack), init=init)
    return str(caught.value)


def test_ranks_are_told_that_one_could_not_initialise(ranks) -> None:
    others, own = ranks(2, fails_on_rank_1)
    assert own == "out of luck"
    assert "rank 1 gave up: ValueError: out of luck" in others
