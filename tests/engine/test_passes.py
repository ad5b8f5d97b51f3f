"""Several forwards or backwards before a step, a loss on some outputs, evaluation in between: in every world."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import SYSTEMS, Strategy
from tests.engine.models import (
    NEAREST_GROUPS,
    WORLDS,
    Stack,
    assert_all_same,
    assert_same,
    data,
    every_world,
    gradients,
    in_parallel,
    in_worlds,
    loss_on,
    make,
    rows,
    several_ranks,
    snapshot,
)

Found = list[dict[str, Any]]

WITH_SERVER = {**WORLDS, "parameter server": (SYSTEMS["parameter server"], 2)}


def two_backwards(model: nn.Module) -> Found:
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for set_to_none in (True, False):
        for seed in (0, 1):
            loss_on(model, seed).backward()
        found.append(gradients(model))
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_on(model, 2).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


@in_worlds(WITH_SERVER, NEAREST_GROUPS)
def test_two_backwards_before_a_step_both_count(ranks, strategy, n) -> None:
    results = ranks(n, in_parallel, strategy, Stack, two_backwards)
    for found in results if strategy.collective == "all_reduce" else results[:1]:
        assert_all_same(found, two_backwards(make()))


def two_forwards(model: nn.Module) -> Found:
    found = []
    for both in (True, False, True):
        model.zero_grad()
        first, second = loss_on(model, 0), loss_on(model, 1)
        (first + second if both else second).backward()
        found.append(gradients(model))
    return found


@every_world
def test_two_forwards_then_one_backward(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, two_forwards):
        assert_all_same(found, two_forwards(make()))


def in_threads(model: nn.Module) -> Found:
    """A backward of forwards that each ran in a thread of their own, which autograd does in turns."""
    losses: list[torch.Tensor] = []
    errors: list[Exception] = []

    def forward(seed: int) -> None:
        try:
            losses.append(loss_on(model, seed))
        except EngineError as error:
            errors.append(error)

    for seed in (0, 1, 2):
        thread = threading.Thread(target=forward, args=(seed,))
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    sum(losses, torch.zeros(())).backward()
    return [gradients(model)]


def in_threads_or_refused(strategy: Strategy) -> str | Found:
    try:
        return in_parallel(strategy, Stack, in_threads)
    except EngineError as error:
        return str(error)


@several_ranks
def test_forwards_in_threads_of_their_own(ranks, strategy, n) -> None:
    for found in ranks(n, in_threads_or_refused, strategy):
        if strategy.zero == 3 and strategy.accumulation != "hold" and not strategy.share_parameters:
            assert "more than one thread" in found and "zero to 2 or less" in found
        else:
            assert_all_same(found, in_threads(make()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.inner(x))))


def normed(model: nn.Module, rank: int, n: int) -> Found:
    """Gradients and running statistics: first of one batch for all ranks, then of this rank's rows."""
    found = []
    for own in (False, True):
        model.zero_grad()
        losses = []
        for seed in (2 * own, 2 * own + 1):
            x, y = (part[rank::n] if own else part for part in data(seed, 12))
            losses.append(F.mse_loss(model(x), y))
        sum(losses).backward()
        found += [gradients(model), dict(model.named_buffers())]
        found[-1] = {name: buffer.clone() for name, buffer in found[-1].items()}
    return found


def normed_in_parallel(strategy: Strategy) -> Found:
    world = pl.init()
    return in_parallel(strategy, Normed, normed, world.rank, world.world_size)


@every_world
def test_two_forwards_through_batch_norm_then_one_backward(ranks, strategy, n) -> None:
    alone = [normed(make(Normed), rank, n) for rank in range(n)]
    mean = {name: sum(found[2][name] for found in alone) / n for name in alone[0][2]}
    for found, expected in zip(ranks(n, normed_in_parallel, strategy), alone, strict=True):
        assert_all_same(found, [expected[0], expected[1], mean, expected[3]])
        assert found[3]["norm.num_batches_tracked"] == 4


class TwoHeads(Stack):
    """Returns a mapping of two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return {"a": self.head(x), "b": self.other(x)}


def some_outputs(model: nn.Module, choices: tuple[str, ...]) -> Found:
    found = []
    for step, which in enumerate(choices):
        x, y = rows(model, step)
        model.zero_grad()
        F.mse_loss(model(x)[which[pl.init().rank]], y).backward()
        found.append(gradients(model))
    return found


def in_turn(strategy: Strategy, orders: list[tuple[str, ...]]) -> list[Found]:
    return [in_parallel(strategy, TwoHeads, some_outputs, choices) for choices in orders]


@every_world
def test_a_loss_on_some_outputs_completes_and_unused_parameters_keep_no_gradient(ranks, strategy, n) -> None:
    # Which output each rank's loss is of, step after step.
    orders = [("aaaa", "aaaa", "abab"), ("baaa", "abab")]
    for results in ranks(n, in_turn, strategy, orders):
        for choices, found in zip(orders, results, strict=True):
            for step, which in enumerate(choices):
                expected = make(TwoHeads)
                x, y = data(step, 12)
                for rank in range(n):
                    (F.mse_loss(expected(x[rank::n])[which[rank]], y[rank::n]) / n).backward()
                assert_same(found[step], gradients(expected))


def decayed(model: nn.Module) -> Found:
    """Weights and states of the head that no rank's loss is of, but in the second step, with weight decay on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    found = []
    for step, which in enumerate("abaa"):
        x, y = rows(model, step)
        optimizer.zero_grad()
        F.mse_loss(model(x)[which], y).backward()
        optimizer.step()
        states = [optimizer.state[p] for p in model.other.parameters() if p in optimizer.state]
        moments = [state["exp_avg"].as_subclass(torch.Tensor).clone() for state in states]
        with pl.full_parameters(model) if hasattr(model, "_paceline_engine") else contextlib.nullcontext():
            weights = {name: value.detach().clone() for name, value in model.other.named_parameters()}
        found.append({**weights, "moments": torch.cat([m.flatten() for m in moments]) if moments else None})
    return found


@every_world
def test_what_no_rank_uses_is_neither_decayed_nor_moved(ranks, strategy, n) -> None:
    expected = decayed(make(TwoHeads))
    for found in ranks(n, in_parallel, strategy, TwoHeads, decayed):
        for step, (mine, one) in enumerate(zip(found, expected, strict=True)):
            weights = {name: value for name, value in one.items() if name != "moments"}
            assert_same({name: mine[name] for name in weights}, weights)
            before = found[step - 1] if step else None
            if step != 1 and before is not None:
                assert torch.equal(mine["weight"], before["weight"]), "not decayed"
                assert (mine["moments"] is None) == (before["moments"] is None)
                assert mine["moments"] is None or torch.equal(mine["moments"], before["moments"])
    assert not torch.equal(expected[1]["weight"], expected[0]["weight"])


def evaluated_between(model: nn.Module, evaluates: bool = True) -> Found:
    found = []
    for step, grad in enumerate((False, True, False)):
        model.zero_grad()
        loss = loss_on(model, step)
        if evaluates:
            model.eval()
            with torch.set_grad_enabled(grad):
                model(data(9, 3)[0])
            model.train()
        loss.backward()
        found += [gradients(model), snapshot(model)]
    return found


@every_world
def test_an_evaluation_between_forward_and_backward_changes_nothing(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, evaluated_between):
        assert_all_same(found, evaluated_between(make(), evaluates=False))
