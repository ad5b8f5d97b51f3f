"""After an exception and `pl.reset` training goes on as if the failed step had never begun."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError
from paceline.core.ops import Op
from paceline.core.strategy import SYSTEMS
from paceline.engine.engine import Engine
from tests.engine.models import (
    SEVERAL,
    Fragile,
    assert_all_same,
    every_group,
    every_world,
    in_parallel,
    in_worlds,
    loss_on,
    make,
    rows,
    snapshot,
    train,
)


def with_failures(model: nn.Module, *failures: Callable[[nn.Module], None]) -> list[dict]:
    """`train`, with steps before and between the others that come to nothing.

    A rank that resets ends what others wait in. So where all are to fail by themselves, they meet after it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if step < len(failures):
            failures[step](model)
            pl.reset(model)
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model)]


def fail_in_backward_of_a_micro_batch(model: nn.Module) -> None:
    model.fails_at = 0
    with pytest.raises(ValueError, match="middle of backward"):
        halves(model, fails=False)
    model.fails_at = None
    with pytest.raises(EngineError, match=r"call pl\.reset"):
        loss_on(model, 9)
    pl.barrier()


def fail_in_the_loop(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="middle of the loop"):
        halves(model, fails=True)
    pl.barrier()


def halves(model: nn.Module, fails: bool) -> None:
    x, y = rows(model, 9)
    half = len(x) // 2
    for part in pl.accumulate(model, [slice(0, half), slice(half, None)]):
        loss = F.mse_loss(model(x[part]), y[part])
        if fails:
            raise ValueError("in the middle of the loop")
        loss.backward()


@every_group
def test_after_an_exception_and_reset_the_next_step_equals_a_clean_run(ranks, strategy, n) -> None:
    failures = (fail_in_the_loop, fail_in_backward_of_a_micro_batch, fail_in_the_loop)
    for found in ranks(n, in_parallel, strategy, Fragile, with_failures, *failures):
        assert_all_same(found, train(make(Fragile)))


def send_updates_late(engine: Engine) -> None:
    quick = engine.program.work

    def slow(op: Op) -> Callable[[], Traffic]:
        work = quick(op)

        def later() -> Traffic:
            time.sleep(0.005 * (op.phase == "update"))
            return work()

        return later

    # Also for the executor that a reset makes.
    engine.program.work = engine.program.executor._work = slow  # type: ignore[method-assign]


def reset_after_a_step(model: nn.Module) -> list[dict]:
    """As where loading a batch raises."""
    send_updates_late(pl.engine_of(model))
    return with_failures(model, lambda _: None, lambda _: None)


@every_world
def test_a_reset_right_after_a_step_waits_for_the_weights_that_were_on_their_way(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Fragile, reset_after_a_step):
        assert_all_same(found, train(make(Fragile)))


def fail_where_others_do_not(model: nn.Module) -> None:
    # The third rank does not fail by itself.
    model.fails_at = (2, 0, None, 1)[pl.init().rank]
    # Where whole gradients are few, or all is well here, this rank's backward cannot go on alone: others have
    # failed, or have come as far as pl.reset already.
    with pytest.raises(
        (ValueError, pl.CommunicationError), match=r"middle|gave up: pl\.reset there|: pl\.reset\. Every"
    ):
        loss_on(model, 9).backward()
    model.fails_at = None


SEVERAL_WITH_SERVER = {**SEVERAL, "parameter server": (SYSTEMS["parameter server"], 2)}


@in_worlds(SEVERAL_WITH_SERVER)
def test_ranks_that_failed_in_different_places_go_on_after_reset(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Fragile, with_failures, *[fail_where_others_do_not] * 2):
        assert_all_same(found, train(make(Fragile)))
