"""A process that a rank forks, such as a DataLoader's worker: it computes with the weights, and is no rank."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import data, make
from tests.quick import full, some
from tests.train.processes import program

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


def beside_a_child(strategy: Strategy, forks: bool) -> tuple[list[Any], dict[str, list[float]]]:
    """What a child answers that trains on its own between backward and update, and the parameters in the end."""
    world = pl.init()
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers = []

    def answer() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.mul_(7) if parameter.grad is not None else parameter.data.mul_(7)
        optimizer.step()
        model(data(9, 4)[0].float()).square().mean().backward()

    for step in range(3):
        x, y = (part[world.rank :: world.world_size].float() for part in data(step, 12))
        (model(x) - y).square().mean().backward()
        if forks:
            answers.append(in_child(answer))
        optimizer.step()
        optimizer.zero_grad()
    return answers, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


TRAINS = {
    "zero 0": Strategy(),
    "zero 1": Strategy(zero=1),
    "zero 2": Strategy(zero=2),
    "zero 3": Strategy(zero=3),
    "bfloat16": Strategy(zero=1, precision="bfloat16"),
    "shared parameters": Strategy(zero=1, share_parameters=True),
}


@pytest.mark.parametrize("name", some(TRAINS, {"zero 0", "shared parameters"}))
def test_what_a_forked_process_writes_is_its_own(ranks, name: str) -> None:
    found, alone = (ranks(2, beside_a_child, TRAINS[name], forks) for forks in (True, False))
    for (answers, state), (_, expected) in zip(found, alone, strict=True):
        assert all("Error: " in answer for answer in answers), answers
        assert state == expected


ENDS = """
import os, sys, warnings
import torch
import paceline as pl
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of a fork beside threads
model = pl.parallelize(torch.nn.Linear(4, 4), pl.Strategy(zero=1))
model(torch.ones(2, 4)).mean().backward()
if (child := os.fork()) == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pl.all_gather_json(1))
"""


@pytest.mark.full
def test_a_forked_process_that_ends_leaves_the_job_to_its_rank(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    common = {
        "WORLD_SIZE": "2",
        "PACELINE_RENDEZVOUS": f"file://{tmp_path}/store",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                program([sys.executable, "ends.py"], tmp_path, {**common, "RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "01"
        ]
        assert [each.finish() for each in started] == [(0, "3 [1, 1]\n", "")] * 2
