"""Threads beside the one that trains: what they read has no part in what is computed, and is whole or refused."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, shares, snapshot
from tests.quick import some


def made(strategy: Strategy, middle: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return pl.parallelize(nn.Sequential(nn.Linear(4, 64), middle(), nn.Linear(64, 64), nn.Linear(64, 2)), strategy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = (shares(part).float() for part in data(step, 12))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def weight(model: nn.Module) -> str:
    return str(model[2].weight.detach().shape)


def state(model: nn.Module) -> str:
    try:
        return str(model.state_dict()["2.weight"].shape)
    except EngineError as error:
        assert "in a thread beside the one that trains" in str(error), error
        return "refused"


def trained(strategy: Strategy, read: Callable[[nn.Module], str] | None) -> tuple[dict[str, Tensor], Counter[str]]:
    """Weights after steps, and what a thread has read meanwhile."""
    model, over, found = made(strategy), threading.Event(), Counter[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if read is None:
        over.set()

    def reads() -> None:
        while not over.is_set():
            found[read(model)] += 1

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(reads)
        try:
            for step in range(20):
                train(model, optimizer, step)
        finally:
            over.set()
        reading.result()
    after = snapshot(model)
    pl.release(model)
    return after, found


CASES = {
    **{name: STAGES[name] for name in ("zero 0", "zero 1", "zero 2")},
    "zero 2, low": replace(STAGES["zero 2"], precision="bfloat16"),
    "zero 2, shared parameters": replace(STAGES["zero 2"], share_parameters=True),
}


WHOLE = str(torch.Size([64, 64]))


@pytest.mark.parametrize("name", some(CASES, {"zero 2"}))
def test_one_that_reads_weights_changes_nothing(ranks, name: str) -> None:
    for (after, found), (alone, _) in zip(
        ranks(2, trained, CASES[name], weight), ranks(2, trained, CASES[name], None), strict=True
    ):
        assert found.total() > 20
        assert_same(after, alone, atol=0)


@pytest.mark.parametrize("name", some(["zero 0", "zero 1", "zero 2"], {"zero 2"}))
def test_one_that_takes_states_finds_whole_ones_or_is_refused_and_changes_nothing(ranks, name: str) -> None:
    for (after, found), (alone, _) in zip(
        ranks(2, trained, CASES[name], state), ranks(2, trained, CASES[name], None), strict=True
    ):
        assert found[WHOLE] > 20 and found.keys() <= {WHOLE, "refused"}
        assert found.keys() == {WHOLE} or name != "zero 0"
        assert_same(after, alone, atol=0)


class Read(nn.Module):
    """Has another thread take the model's state amid a forward."""

    model: list[nn.Module]
    found: list[str]

    def forward(self, x: Tensor) -> Tensor:
        if "model" in vars(self):
            thread = threading.Thread(target=lambda: self.found.append(state(self.model[0])))
            thread.start()
            thread.join()
        return x


def reads_amid_forward(strategy: Strategy) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    ends = list[dict[str, Tensor]]()
    for reads in (True, False):
        model = made(strategy, Read)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.05), list[str]()
        if reads:
            model[1].model, model[1].found = [model], found
            taken = found
        for step in range(3):
            train(model, optimizer, step)
        ends.append(snapshot(model))
        pl.release(model)
    return taken, ends[0], ends[1]


HIDDEN = {
    "zero 3": STAGES["zero 3"],
    "zero 0, low": replace(STAGES["zero 0"], precision="bfloat16"),
    "zero 2, low": CASES["zero 2, low"],
}


@pytest.mark.parametrize("name", some([*HIDDEN, "zero 2"], {"zero 3"}))
def test_a_state_that_would_change_what_is_computed_with_is_refused_amid_a_forward(ranks, name: str) -> None:
    for found, after, alone in ranks(2, reads_amid_forward, (HIDDEN | CASES)[name]):
        assert found == [WHOLE if name == "zero 2" else "refused"] * 3
        assert_same(after, alone, atol=0)


def saved_by_another(strategy: Strategy) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """States that the main thread takes while the one that trains is at rest, and those that this takes itself."""
    model = made(strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    others, own = [], []
    with ThreadPoolExecutor(1) as trains:
        for step in range(4):
            trains.submit(train, model, optimizer, step).result()
            others.append(snapshot(model))
            own.append(trains.submit(snapshot, model).result())
    pl.release(model)
    return others, own


@pytest.mark.parametrize("name", some(HIDDEN | CASES, {"zero 2", "zero 3"}))
def test_another_thread_saves_while_the_one_that_trains_is_at_rest(ranks, name: str) -> None:
    for others, own in ranks(2, saved_by_another, (HIDDEN | CASES)[name]):
        for found, expected in zip(others, own, strict=True):
            assert_same(found, expected, atol=0)
        assert not torch.equal(own[0]["2.weight"], own[3]["2.weight"])


@pl.elementwise
class Interrupted(torch.optim.SGD):
    """A signal comes amid its step."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        os.kill(os.getpid(), signal.SIGUSR1)


def taken_by_a_handler(strategy: Strategy) -> tuple[list[str], list[str]]:
    model = made(strategy)
    optimizer, found = Interrupted(model.parameters(), 0.05), list[str]()

    def take(*_: object) -> None:
        try:
            found.append(weight(model) if model.state_dict()["2.weight"].shape == (64, 64) else "a shard")
        except EngineError as error:
            found.append(str(error))

    before = signal.signal(signal.SIGUSR1, take)
    try:
        for step in range(2):
            train(model, optimizer, step)
    finally:
        signal.signal(signal.SIGUSR1, before)
    after = [str(value.shape) for value in snapshot(model).values() if value.dim() == 2]
    pl.release(model)
    return found, after


@pytest.mark.parametrize("name", some(["zero 0", "zero 2", "zero 3"], {"zero 2"}))
def test_a_signals_handler_amid_a_step_takes_a_whole_state_or_is_refused(ranks, name: str) -> None:
    for found, after in ranks(2, taken_by_a_handler, (HIDDEN | CASES)[name]):
        assert WHOLE in after and len(found) == 2
        assert all(each == WHOLE if name == "zero 0" else "amid optimizer.step()" in each for each in found)
