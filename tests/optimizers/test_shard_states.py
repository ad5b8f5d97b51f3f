"""States of optimizers, made from whole parameters or from shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, data, make, sharded, shares, snapshot


def made_before(strategy: Strategy | None, before: bool) -> dict:
    model = make()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5) if before else None
    if strategy is not None:
        pl.parallelize(model, strategy)
    if optimizer is None:
        # Shapes are the model's own when groups are made from them.
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)
    for step in range(3):
        x, y = data(step, 8) if strategy is None else map(shares, data(step, 8))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.parametrize("before", [True, False])
@sharded
def test_states_and_groups_made_from_whole_parameters_serve_shards(ranks, strategy, before) -> None:
    expected = made_before(None, before)
    for state in ranks(2, made_before, strategy, before):
        assert_same(state, expected)


def saved_and_loaded(strategy: Strategy, states: list[dict] | None) -> dict | str:
    """States after a step; or what is said where they are loaded on the other rank."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    if states is None:
        optimizer.step()
        found = copy.deepcopy(optimizer.state_dict())
        pl.release(model)
        return found
    optimizer.load_state_dict(copy.deepcopy(states[1 - pl.init().rank]))
    with pytest.raises(pl.UserError) as caught:
        optimizer.step()
    pl.release(model)
    return str(caught.value)


@sharded
def test_states_of_another_ranks_shards_are_refused(ranks, strategy) -> None:
    states = ranks(2, saved_and_loaded, strategy, None)
    first, second = ranks(2, saved_and_loaded, strategy, states)
    assert "Adam holds states of shard 1 of 2, but this rank updates shard 0 of 2" in first
    assert "Adam holds states of shard 0 of 2, but this rank updates shard 1 of 2" in second
    assert "load on each rank what that rank saved" in first


def stepped_elsewhere(released: bool) -> str:
    """What is said of states of shards where parameters are whole."""
    model = pl.parallelize(make(), Strategy(zero=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    for again in (False, True):
        if again:
            states = optimizer.state_dict()
            model = pl.release(model)
            if not released:
                model = pl.parallelize(model, Strategy())
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
                optimizer.load_state_dict(states)
        F.mse_loss(model(x), y).backward()
        if not again:
            optimizer.step()
    with pytest.raises(pl.UserError) as caught:
        optimizer.step()
    if not released:
        pl.release(model)
    return str(caught.value)


@pytest.mark.parametrize("released", [True, False])
def test_states_of_shards_are_refused_where_parameters_are_whole(ranks, released: bool) -> None:
    for rank, told in enumerate(ranks(2, stepped_elsewhere, released)):
        assert told.startswith(f"Adam holds states of shard {rank} of 2, but parameters are whole now: load")
        assert told.endswith("or make a new optimizer")


def without_states(strategies: list[Strategy | None]) -> dict[str, torch.Tensor]:
    """Weights after a step by each, of one optimizer that holds no states; None is a plain loop over all rows."""
    model, steps = make(), iter(range(len(strategies)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, strategy in zip(steps, strategies, strict=True):
        x, y = data(step, 12)
        if strategy is not None:
            model, (x, y) = pl.parallelize(model, strategy), (shares(part) for part in (x, y))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if strategy is not None:
            model = pl.release(model)
    return snapshot(model)


def test_an_optimizer_without_states_goes_on_where_shards_are_cut_otherwise(ranks) -> None:
    strategies = [Strategy(zero=2), None, Strategy(), Strategy(zero=1), Strategy(zero=3, bucket_mb=0.001), None]
    for state in ranks(3, without_states, strategies):
        assert_same(state, without_states([None] * len(strategies)))


def cut_otherwise(by_file: bool) -> str:
    """What is said where shards have other elements than those that an optimizer has states of, but as many of some."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), *blocks, torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(pl.parallelize(model, Strategy(zero=2)).parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pl.release(model).append(torch.nn.Linear(2, 2, bias=False))
    pl.parallelize(model, Strategy(zero=2))
    if by_file:
        states = optimizer.state_dict()
        optimizer = torch.optim.AdamW([p for block in model[:-1] for p in block.parameters()])
        optimizer.load_state_dict(states)
    optimizer.add_param_group({"params": model[-1].parameters()})
    model(torch.ones(2, 8)).square().mean().backward()
    with pytest.raises(pl.UserError) as raised:
        optimizer.step()
    pl.reset(model)
    pl.release(model)
    return str(raised.value)


@pytest.mark.parametrize("by_file", [False, True])
def test_states_of_other_elements_are_refused_on_every_rank(ranks, by_file: bool) -> None:
    for told in ranks(3, cut_otherwise, by_file):
        assert told.startswith("AdamW holds states of shards that were cut otherwise")


def of_two_models() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))]
    optimizer = torch.optim.Adagrad([p for model in models for p in model.parameters()], lr=0.1)
    if pl.init().world_size > 1:
        models = [pl.parallelize(model, Strategy(zero=1)) for model in models]
    for _ in range(2):
        models[1](models[0](torch.ones(2, 4))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = snapshot(torch.nn.ModuleList(models))
    for model in models if pl.init().world_size > 1 else ():
        pl.release(model)
    return found


def test_one_optimizer_serves_two_models_though_it_holds_states_from_the_start(ranks) -> None:
    (alone,) = ranks(1, of_two_models)
    for state in ranks(2, of_two_models):
        assert_same(state, alone)


STAGES = [Strategy(zero=zero) for zero in range(4)] + [Strategy(zero=1, share_parameters=True)]


def of_models_at(stages: list[tuple[Strategy, Strategy]]) -> list[list[torch.Tensor]]:
    """Weights of two models that one optimizer steps, each at a stage of its own; apart in one process."""
    found = []
    for strategies in stages:
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 2).double()]
        if pl.init().world_size > 1:
            models = [pl.parallelize(model, each) for model, each in zip(models, strategies, strict=True)]
        groups = [{"params": list(models[0].parameters())}, {"params": list(models[1].parameters())}]
        parameters = [parameter for group in groups for parameter in group["params"]]
        optimizer = torch.optim.AdamW(groups if strategies[0].zero % 2 else parameters, 0.1)
        for step in range(3):
            x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            models[1](models[0](shares(x) if pl.init().world_size > 1 else x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if pl.init().world_size > 1:
            models = [pl.release(model) for model in models]
        found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    return found


PAIRS = {
    2: [(one, other) for one in STAGES for other in STAGES if one != other],
    # Groups of ranks that shard, of which one is as large as the world.
    4: [(Strategy(zero=2, shard=2), Strategy(zero=2)), (Strategy(zero=1), Strategy(zero=3, shard=2))],
}


@pytest.mark.parametrize("n", PAIRS)
def test_models_at_different_stages_share_an_optimizer(ranks, n: int) -> None:
    (alone,) = ranks(1, of_models_at, PAIRS[n][:1])[0]
    for found in ranks(n, of_models_at, PAIRS[n]):
        for case, weights in zip(PAIRS[n], found, strict=True):
            for mine, expected in zip(weights, alone, strict=True):
                torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0, msg=str(case))


def one_released(other: int) -> tuple[str, bool]:
    """What is said where one of an optimizer's models is released, and whether weights have changed by then."""
    models = [pl.parallelize(torch.nn.Linear(4, 4), Strategy(zero=zero)) for zero in (other, 2)]
    # One parameter after the other: the first would be updated before torch looks at the last.
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], foreach=False)
    for again in (False, True):
        if again:
            models[1] = pl.release(models[1])
        models[1](models[0](torch.ones(2, 4))).square().mean().backward()
        if not again:
            optimizer.step()
            optimizer.zero_grad()
    before = [value.clone() for value in models[0].state_dict().values()]
    with pytest.raises(pl.UserError) as caught:
        optimizer.step()
    pl.reset(models[0])
    after = models[0].state_dict().values()
    same = all(torch.equal(mine, its) for mine, its in zip(before, after, strict=True))
    pl.release(models[0])
    return str(caught.value), same


@pytest.mark.parametrize("other", [0, 2])
def test_states_of_a_released_model_are_refused_before_another_is_updated(ranks, other: int) -> None:
    for told, same in ranks(2, one_released, other):
        assert "but parameters are whole now" in told and same


class Wrapping(torch.optim.Optimizer):
    """Steps another one, whose groups it shares, as those that look ahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None) -> None:
        self.inner.step()


def wrapped_late() -> list[str]:
    """What is said where an optimizer has stepped on shards before another wraps it, and if weights stayed."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    inner = torch.optim.AdamW(pl.parallelize(model, Strategy(zero=1)).parameters())
    optimizer, said = inner, []
    for _ in range(2):
        model(torch.ones(2, 6)).square().mean().backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            optimizer.step()
        except pl.UserError as error:
            pl.reset(model)
            said += [str(error), str(all(torch.equal(v, before[n]) for n, v in model.state_dict().items()))]
        optimizer.zero_grad()
        optimizer = Wrapping(inner)
    return said


@pytest.mark.filterwarnings("ignore:Wrapping may need")
def test_one_that_stepped_by_itself_is_refused_inside_one_that_is_shown_whole_parameters(ranks) -> None:
    for rank, (told, unchanged) in enumerate(ranks(2, wrapped_late)):
        assert f" holds states of shard {rank} of 2, but parameters are whole now: load" in told
        assert unchanged == "True"
