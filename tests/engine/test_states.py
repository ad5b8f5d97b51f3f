"""What sharding must not change: states, evaluation, copies. What it refuses: to take shards for whole parameters."""

from __future__ import annotations

import copy
import itertools
import time

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    SEVERAL,
    WORLDS,
    Stack,
    assert_all_same,
    assert_same,
    data,
    every_group,
    every_world,
    in_parallel,
    in_worlds,
    loss_on,
    make,
    shares,
    snapshot,
)

IN_SHARDS = {name: (strategy, n) for name, (strategy, n) in SEVERAL.items() if strategy.stage}

in_shards = in_worlds(IN_SHARDS)

# ---- states, copies, evaluation


def stated(strategy: Strategy) -> tuple[dict, dict, dict, list[bool]]:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        x, y = (shares(part) for part in data(seed, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    first = snapshot(model)
    part = {f"blocks.1.{name}": value.clone() for name, value in model.blocks[1].state_dict().items()}
    copied = copy.deepcopy(model)
    evaluated = []
    with torch.no_grad():
        x = data(5, 3)[0]
        evaluated.append(torch.equal(model(x), copied(x)))
        evaluated.append(torch.equal(model.blocks[2](x.repeat(1, 2)[:, :6]), copied.blocks[2](x.repeat(1, 2)[:, :6])))
    step(1)
    model.load_state_dict(first)
    step(1)
    again = snapshot(model)
    with pl.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    step(2)
    halved = snapshot(model)
    evaluated.append(all(torch.equal(value, first[name]) for name, value in part.items()))
    evaluated.append(all(torch.equal(value, first[name]) for name, value in copied.state_dict().items()))
    whole = pl.full_state_dict(model)
    if pl.init().rank == 0:
        evaluated.append(list(whole) == list(halved) and all(torch.equal(whole[name], halved[name]) for name in halved))
    else:
        evaluated.append(whole == {})
    pl.release(model)
    return first, again, halved, evaluated


@every_group
def test_states_have_whole_parameters_and_what_is_loaded_or_edited_counts(ranks, strategy, n) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for seed in range(3):
        if seed == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        x, y = data(seed, 12)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(snapshot(model))
    for *states, evaluated in ranks(n, stated, strategy):
        for state, expected in zip(states, wanted, strict=True):
            assert_same(state, expected)
        assert evaluated == [True] * 5


def edited_late(strategy: Strategy) -> list[bool]:
    """Halves all parameters, one rank after another; whether each saw them as they were, and as they became."""
    model = pl.parallelize(make(), strategy)
    first = snapshot(model)
    time.sleep(0.03 * pl.init().rank)
    found = [all(torch.equal(value, first[name]) for name, value in snapshot(model).items())]
    with pl.full_parameters(model), torch.no_grad():
        found.append(all(torch.equal(parameter, first[name]) for name, parameter in model.named_parameters()))
        for parameter in model.parameters():
            parameter.mul_(0.5)
    found.append(all(torch.equal(value, first[name] / 2) for name, value in snapshot(model).items()))
    pl.release(model)
    return found


@every_world
def test_what_a_rank_edits_reaches_no_other_before_that_one_edits_too(ranks, strategy, n) -> None:
    assert ranks(n, edited_late, strategy) == [[True] * 3] * n


# So wide that each of four ranks has a shard of some gradient: one without has nothing to refuse.
WIDTH = 24


def edited(strategy: Strategy) -> list[str]:
    """What is said, at once or before a forward pass, a step and a state, where weights were edited."""
    x, y = (shares(part) for part in data(0, 12))
    messages = []
    points = ("forward", "step", "state_dict")
    for before, how in itertools.product(points, ("in place", "data", "by gradient")):
        model = pl.parallelize(make(Stack, WIDTH), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.mse_loss(model(x), y).backward()
        if before == "state_dict" and how != "by gradient":
            optimizer.step()
            optimizer.zero_grad()
            # Where ranks share memory, one that still steps would take another's edit for what it updated.
            pl.barrier()
        what = {"forward": lambda m=model: m(x), "step": optimizer.step, "state_dict": model.state_dict}[before]
        with pytest.raises(EngineError) as caught:
            edit(model, how)
            what()
        messages.append(str(caught.value))
        pl.reset(model)
        model(x)
        pl.release(model)
    return messages


def edit(model: torch.nn.Module, how: str) -> None:
    """Changes weights beside the engine, as loops without an optimizer do."""
    if how == "in place":
        with torch.no_grad():
            model.head.weight.zero_()
        return
    # All of them, as each rank sees only its own shards.
    for parameter in model.parameters():
        if how == "data":
            parameter.data.clamp_(-1e-3, 1e-3)
        elif parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad


EDITS_ARE_LOST = in_worlds(
    {name: (s, n) for name, (s, n) in SEVERAL.items() if s.shards(n) > 1 and (s.gathers or s.share_parameters)}
)


@EDITS_ARE_LOST
def test_an_edit_that_would_be_lost_is_an_error_that_names_the_parameter(ranks, strategy, n) -> None:
    names = [name for name, _ in Stack().named_parameters()]
    for messages in ranks(n, edited, strategy):
        for message in messages:
            assert any(name in message for name in names)
            assert "pl.full_parameters(model)" in message


def edited_by_all(model: torch.nn.Module) -> list[dict]:
    """Weights after steps between which all ranks change them alike."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(4):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            edit(model, "data" if step == 1 else "in place")
        found.append(snapshot(model))
    return found


EDITS_COUNT = in_worlds({name: (s, n) for name, (s, n) in WORLDS.items() if s.zero < 3 and not s.share_parameters})


@EDITS_COUNT
def test_edits_that_all_ranks_make_count_as_in_one_process(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, edited_by_all):
        assert_all_same(found, edited_by_all(make()))


def updated_by_hand(model: torch.nn.Module) -> list[dict]:
    """Weights after steps without an optimizer."""
    found = []
    for step in range(3):
        loss_on(model, step).backward()
        edit(model, "by gradient")
        model.zero_grad(set_to_none=step % 2 == 0)
        found.append(snapshot(model))
    return found


@EDITS_COUNT
def test_updates_by_hand_are_those_of_one_process(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, updated_by_hand):
        assert_all_same(found, updated_by_hand(make()))


# ---- what looks at whole gradients


def clipped_by_torch(strategy: Strategy | None) -> list[float]:
    model = make(Stack, WIDTH)
    x, y = data(0, 12)
    if strategy is not None:
        pl.parallelize(model, strategy)
        x, y = shares(x), shares(y)
    F.mse_loss(model(x), y).backward()
    found = [
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")),
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ]
    if strategy is not None:
        found.append(pl.clip_grad_norm_(model, 1.0))
        pl.release(model)
    return [norm.item() for norm in found]


@in_shards
def test_torchs_clipping_takes_whole_gradients_norms_also_of_edited_ones(ranks, strategy, n) -> None:
    wanted = clipped_by_torch(None)
    for found in ranks(n, clipped_by_torch, strategy):
        assert found == pytest.approx([*wanted, wanted[-1]], rel=1e-6)


def given_by_hand(model: torch.nn.Module, backward: bool) -> tuple[list[float], list[dict]]:
    """Gradients of parameters' own shapes that every rank has made alike, clipped and stepped with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        if backward:
            loss_on(model, step).backward()
        for place, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.grad = (numbers + place + step).reshape(parameter.shape)
        norm = pl.clip_grad_norm_(model, 0.5) if hasattr(model, "no_sync") else None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) if norm is None else norm
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [snapshot(model)]


@in_worlds(SEVERAL, backward=(False, True))
def test_gradients_of_whole_shape_given_by_hand_have_the_norm_of_one_process(ranks, strategy, n, backward) -> None:
    norms, weights = given_by_hand(make(Stack, WIDTH), backward)
    for found, states in ranks(n, clipped_by_hand, strategy, backward):
        assert found == pytest.approx(norms, rel=1e-12)
        assert_all_same(states, weights)


def clipped_by_hand(strategy: Strategy, backward: bool) -> tuple[list[float], list[dict]]:
    model = pl.parallelize(make(Stack, WIDTH), strategy)
    found = given_by_hand(model, backward)
    pl.release(model)
    return found


def scaled_by_torch(model: torch.nn.Module) -> list[dict]:
    """Weights after steps of which one has an infinite gradient on some rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for step in range(3):
        loss = loss_on(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(snapshot(model))
    return found


@in_shards
def test_torchs_gradient_scaler_decides_by_whole_gradients(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, scaled_by_torch):
        assert_all_same(found, scaled_by_torch(make()))
