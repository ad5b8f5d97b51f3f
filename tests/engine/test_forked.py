"""A process that a rank forks, such as a DataLoader's worker: it computes with the weights, and is no rank."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import data, make
from tests.quick import full

LIMIT = 10.0


def in_child(answer: Callable[[], Any]) -> Any:
    """What a forked process answers, or raises."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, pickle.dumps(answer()))
        except Exception as error:
            os.write(writing, pickle.dumps(f"{type(error).__name__}: {error}"))
        os._exit(0)
    os.close(writing)
    answered = select.select([reading], [], [], LIMIT)[0]
    if not answered:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        return pickle.loads(pipe.read()) if answered else "hangs"


def evaluated(strategy: Strategy, is_full: bool) -> tuple[list[Any], list[float]]:
    """What a child answers after each of two steps, and the losses of these and another."""
    world = pl.init()
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers, losses = [], []

    def answer() -> list[float]:
        with torch.no_grad():
            return model(data(9, 4)[0].float()).flatten().tolist()

    for step in range(3):
        x, y = (part[world.rank :: world.world_size].float() for part in data(step, 12))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if is_full:
            with pl.full_parameters(model):
                answers.append(in_child(answer))
        elif step < 2:
            answers.append(in_child(answer))
    return answers, losses


CASES = [full(0), 1, full(2)]


@pytest.mark.parametrize("zero", CASES)
def test_a_forked_process_computes_with_all_weights(ranks, zero: int) -> None:
    """Those on their way when it was forked, too: nobody receives them there."""
    (expected, _), *_ = ranks(1, evaluated, Strategy(), False)
    for answers, _ in ranks(2, evaluated, Strategy(zero=zero), False):
        for mine, theirs in zip(answers, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_at_zero_3_it_is_told_that_it_is_no_rank_and_ranks_go_on(ranks) -> None:
    found, plain = ranks(2, evaluated, Strategy(zero=3), False), ranks(2, evaluated, Strategy(), False)
    for (answers, losses), (_, expected) in zip(found, plain, strict=True):
        assert all("no rank" in answer and "pl.full_parameters" in answer for answer in answers)
        assert losses == pytest.approx(expected, abs=1e-6)


def test_where_all_parameters_are_whole_it_computes_at_zero_3(ranks) -> None:
    for answers, _ in ranks(2, evaluated, Strategy(zero=3), True):
        assert all(isinstance(answer, list) for answer in answers)
