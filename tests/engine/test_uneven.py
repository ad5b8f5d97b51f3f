"""Ranks with more or less to do than others, or nothing: each token counts the same, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    assert_all_same,
    assert_same,
    data,
    every_group,
    every_world,
    gradients,
    make,
    several_ranks,
    snapshot,
)
from tests.quick import full

# ---- unevenly many tokens

TOKENS = [(1, 1000, 0, 3), (0, 7, 5, 0)]
"""How many tokens each rank has; fewer ranks have the first of them."""


def weighted(strategy: Strategy, counts: list[tuple[int, ...]]) -> list[dict]:
    world = pl.init()
    model = make()
    engine = pl.engine_of(pl.parallelize(model, replace(strategy, gradients="sum")))
    found = []
    for seed, numbers in enumerate(counts):
        model.zero_grad()
        first = sum(numbers[: world.rank])
        x, y = (part[first : first + numbers[world.rank]] for part in data(seed, sum(numbers)))
        loss = (model(x) - y).square().sum()
        engine.count(len(x), loss)
        loss.backward()
        tokens, total = engine.counts()
        sums = {**gradients(model), "loss": total}
        found.append({"tokens": tokens, **{name: value / tokens.clamp(min=1) for name, value in sums.items()}})
    pl.release(model)
    return found


def weighted_alone(counts: list[tuple[int, ...]]) -> list[dict]:
    found = []
    for seed, numbers in enumerate(counts):
        model, tokens = make(), torch.tensor(sum(numbers), dtype=torch.float64)
        x, y = data(seed, sum(numbers))
        loss = (model(x) - y).square().sum() / tokens.clamp(min=1)
        loss.backward()
        found.append({"tokens": tokens, **gradients(model), "loss": loss.detach()})
    return found


@every_group
def test_uneven_token_counts_give_the_mean_over_all_tokens(ranks, strategy, n) -> None:
    counts = [numbers[:n] for numbers in TOKENS]
    expected = weighted_alone(counts)
    for result in ranks(n, weighted, strategy, counts):
        assert_all_same(result, expected)


@every_world
def test_no_tokens_anywhere_gives_zero_gradients_not_nan(ranks, strategy, n) -> None:
    for (result,) in ranks(n, weighted, strategy, [(0,) * n]):
        assert result.keys() == {"tokens", "loss", *dict(make().named_parameters())}
        assert all(torch.count_nonzero(value) == 0 for value in result.values())


# ---- unevenly many micro-batches

MICRO_BATCHES = [
    [(3, 1, 0, 1), (0, 2, 2, 0), (2, 0, 0, 1)],
    [(0, 1, 2, 0), (1, 0, 0, 2)],
]
"""Each rank's number in step after step, as in `TOKENS`. In one of them rank 0 has nothing in the first."""


def uneven(strategy: Strategy, counts: list[tuple[int, ...]], every: int) -> dict:
    """Weights after steps, each `every`-th of which is an update: others are left out, as by a scaler."""
    world = pl.init()
    model = pl.parallelize(make(), replace(strategy, gradients="sum"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, numbers in enumerate(counts):
        x, y = data(step, sum(numbers))
        first = sum(numbers[: world.rank])
        mine = [(x[i : i + 1], y[i : i + 1]) for i in range(first, first + numbers[world.rank])]
        for xs, ys in pl.accumulate(model, mine, uneven=True):
            ((model(xs) - ys).square().sum() / sum(numbers)).backward()
        if step % every == 0:
            optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


def counted(strategy: Strategy) -> list[float]:
    """The sums of a step in which the first rank has no micro-batch, and each other one as many as its number."""
    world = pl.init()
    model = pl.parallelize(make(), strategy)
    engine = pl.engine_of(model)
    for _ in pl.accumulate(model, range(world.rank), uneven=True):
        engine.count(1, torch.tensor(10.0))
        model(data(0, 1)[0]).sum().backward()
    found = engine.counts().tolist()
    pl.release(model)
    return found


@several_ranks
def test_a_rank_without_micro_batches_has_the_sums_of_the_others(ranks, strategy, n) -> None:
    micro_batches = n * (n - 1) / 2
    assert ranks(n, counted, strategy) == [[micro_batches, 10 * micro_batches]] * n


def uneven_often(strategy: Strategy, cases: list[tuple[list[tuple[int, ...]], int]]) -> list[dict]:
    return [uneven(strategy, *case) for case in cases]


def uneven_alone(counts: list[tuple[int, ...]], every: int) -> dict:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, numbers in enumerate(counts):
        x, y = data(step, sum(numbers))
        ((model(x) - y).square().sum() / sum(numbers)).backward()
        if step % every == 0:
            optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@several_ranks
def test_ranks_with_more_or_fewer_micro_batches_or_none_wait_for_nobody(ranks, strategy, n) -> None:
    counts = [[numbers[:n] for numbers in steps] for steps in MICRO_BATCHES]
    cases = [*((steps, 1) for steps in counts), *((steps, 2) for steps in counts)]
    expected = [uneven_alone(*case) for case in cases]
    for states in ranks(n, uneven_often, strategy, cases):
        for state, wanted in zip(states, expected, strict=True):
            assert_same(state, wanted)


def with_a_rank_that_rests(strategy: Strategy) -> list[float]:
    """Weights after steps of which every other leaves one rank without a micro-batch."""
    world = pl.init()
    torch.manual_seed(0)
    model = pl.parallelize(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6))).double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        count = 0 if step % 2 and world.rank == 1 else 1
        for _ in pl.accumulate(model, range(count), uneven=True):
            model(torch.ones(2, 8, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [float(p.detach().sum()) for p in model.parameters()]
    pl.release(model)
    return found


def test_a_parameter_server_compares_weights_once_they_are_here(ranks) -> None:
    """A rank that runs nothing waits for no update before its weights are held against the others'."""
    strategy = Strategy(collective="parameter_server", bucket_mb=0.0005)
    for _ in range(3):
        first, second = ranks(2, with_a_rank_that_rests, strategy)
        assert first == second


# ---- what ranks without a micro-batch could not follow


def layers(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()


def twice(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    model(2 * x).sum().backward()


def through_the_other(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> None:
    other(model(x)).square().sum().backward()


def behind_the_other(model, other, x) -> None:
    model(other(x)).mean().backward()


def through_the_other_frozen(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> None:
    other.requires_grad_(False)
    through_the_other(model, other, x)
    other.requires_grad_(True)


def evaluated(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        target = model(x)
    (model(x) * target).sum().backward()


def alone_on_rank_0(inside, strategy: Strategy | None, is_first: bool = False) -> tuple[str, list, list]:
    """What this rank is told of what the other has no micro-batch for; weights then, and after an ordinary step."""
    models = [layers(seed) for seed in range(2)]
    if strategy is not None:
        models = [pl.parallelize(model, strategy) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def weights() -> list[torch.Tensor]:
        return [value.clone() for model in models for value in model.state_dict().values()]

    def step() -> None:
        other(model(torch.ones(3, 4, dtype=torch.float64))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    told, (other, model), ones = "", models if is_first else models[::-1], torch.ones(3, 4, dtype=torch.float64)
    if not is_first:
        step()
    before = weights()
    if strategy is None:
        inside(*models, ones)
        optimizers[0].step()
    else:
        batches = [ones] if pl.init().rank == 0 else []
        try:
            for x in pl.accumulate(model, batches, uneven=True):
                inside(model, other, x)
            optimizers[0].step()
        except (EngineError, CommunicationError) as error:
            told = str(error)
            for each in models:
                pl.reset(each)
    changed = [after - value for after, value in zip(weights(), before, strict=True)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    step()
    found = weights()
    if strategy is not None:
        for each in models:
            pl.release(each)
    return told, changed, found


REFUSED = [
    (twice, (0, 1, 2), "a second backward of Sequential"),
    (through_the_other, (0, 1, 2), "of Sequential would be reduced in a micro-batch that pl.accumulate gives"),
    (through_the_other, (3,), "is gathered in a micro-batch that pl.accumulate gives to another"),
    (twice, (3,), "a second forward of Sequential"),
    (evaluated, (3,), "a forward without gradients, which gathers all units, while a rank has no micro-batch"),
]


@pytest.mark.parametrize(
    ("inside", "zero", "words"),
    [
        pytest.param(
            *(inside, zero, words),
            marks=() if zero == 2 else pytest.mark.full,
            id=f"{inside.__name__}, zero {zero}",
        )
        for inside, stages, words in REFUSED
        for zero in stages
    ],
)
def test_it_is_refused_before_a_weight_changes_on_any_rank(ranks, inside, zero: int, words: str) -> None:
    (told, *first), (other, *second) = ranks(2, alone_on_rank_0, inside, Strategy(zero=zero, bucket_mb=1e-4))
    assert words in told
    assert other
    assert not any(each.any() for changed, _ in (first, second) for each in changed)
    # And both go on.
    assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("zero", [2, full(0), full(1)])
def test_it_is_refused_in_the_first_step_too_in_which_ranks_agree_on_more(ranks, zero: int) -> None:
    (told, *_, one), (other, *_, two) = ranks(2, alone_on_rank_0, behind_the_other, Strategy(zero=zero), True)
    assert "would be reduced in a micro-batch that pl.accumulate gives" in told and other
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("inside", "zero"),
    [(through_the_other_frozen, 2), full(through_the_other_frozen, 0), full(evaluated, 1)],
)
def test_what_needs_no_other_rank_is_right(ranks, inside, zero: int) -> None:
    _, changed, _ = alone_on_rank_0(inside, None)
    for told, mine, _ in ranks(2, alone_on_rank_0, inside, Strategy(zero=zero, bucket_mb=1e-4)):
        assert not told
        for found, wanted in zip(mine, changed, strict=True):
            # Of two ranks one gives nothing to the mean.
            torch.testing.assert_close(found, wanted / 2)
