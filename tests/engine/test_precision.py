"""Low-precision parameters and gradients, fp32 masters: what N ranks compute equals what one would."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import (
    NEAREST_GROUPS,
    STAGES,
    WORLDS,
    assert_same,
    data,
    every_world,
    in_worlds,
    make,
    shares,
    snapshot,
)
from tests.quick import diagonal

STEPS = 3


def test_a_precision_left_to_the_device_is_known_to_the_engine() -> None:
    model = pl.parallelize(make(), Strategy(precision="auto"))
    assert pl.engine_of(model).strategy == pl.engine_of(model).schedule.strategy == Strategy(precision="float32")
    pl.release(model)


def low(strategy: Strategy, precision: str = "bfloat16", wide: bool = True) -> Strategy:
    return replace(strategy, precision=precision, reduce_in_float32=wide)


def trained(strategy: Strategy, micro_batches: int, scale: float) -> dict[str, Any]:
    """Steps of AdamW on this rank's part of each batch."""
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtypes, norms = set(), []
    for step in range(STEPS):
        x, y = (shares(part).float() for part in data(step, 24))
        for xs, ys in pl.accumulate(model, list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))):
            output = model(xs)
            dtypes.add(output.dtype)
            (F.mse_loss(output.float(), ys) * (scale / micro_batches)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        norms.append(pl.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    rest = {p.dtype for p in model.parameters()}
    # Of a rank whose shard is padding alone there are none.
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} <= {torch.float32}, "what an optimizer sees"
    pl.release(model)
    return {"state": state, "norms": norms, "dtypes": dtypes, "rest": rest}


@functools.cache
def by_one(ranks: int, micro_batches: int, dtype: torch.dtype, wide: bool, scale: float) -> dict[str, Any]:
    """The same in one process and plain PyTorch: copies to compute with, fp32 sums of their gradients."""
    master = make().float()
    copied = make().to(dtype)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        with torch.no_grad():
            for low_one, one in zip(copied.parameters(), master.parameters(), strict=True):
                low_one.copy_(one)
        sums = [torch.zeros_like(p) for p in master.parameters()]
        x, y = (part.float() for part in data(step, 24))
        for part in range(micro_batches):
            parts = [torch.zeros_like(total) for total in sums]
            for rank in range(ranks):
                xs, ys = (t[rank::ranks].chunk(micro_batches)[part] for t in (x, y))
                copied.zero_grad()
                (F.mse_loss(copied(xs.to(dtype)).float(), ys) * (scale / micro_batches)).backward()
                for total, low_one in zip(parts, copied.parameters(), strict=True):
                    total.add_(low_one.grad)
            for total, mine in zip(sums, parts, strict=True):
                mean = mine / ranks
                total.add_(mean if wide else mean.to(dtype) if part or micro_batches == 1 else mean)
        for total, one in zip(sums, master.parameters(), strict=True):
            one.grad = total / scale
        norms.append(torch.nn.utils.clip_grad_norm_(master.parameters(), 0.5).item())
        optimizer.step()
    return {"state": master.state_dict(), "norms": norms}


@in_worlds(WORLDS, NEAREST_GROUPS, micro_batches=[1, 3])
def test_bfloat16_with_fp32_masters_equals_one_process(ranks, strategy, n, micro_batches) -> None:
    expected = by_one(n, micro_batches, torch.bfloat16, wide=True, scale=1.0)
    for result in ranks(n, trained, low(strategy), micro_batches, 1.0):
        assert_same(result["state"], expected["state"], atol=2e-6)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["dtypes"] == {torch.bfloat16}
        assert result["rest"] == {torch.float32}, "by which an optimizer loads its states"


@pytest.mark.parametrize(("strategy", "precision"), diagonal(STAGES, ["bfloat16", "float16"]))
def test_gradients_reduced_as_computed_are_rounded_once(ranks, strategy, precision) -> None:
    scale = 1.0 if precision == "bfloat16" else 128.0
    expected = by_one(2, 1, getattr(torch, precision), wide=False, scale=scale)
    for result in ranks(2, trained, low(strategy, precision, wide=False), 1, scale):
        assert_same(result["state"], expected["state"], atol=2e-6)


def scaled(strategy: Strategy, fused: bool) -> tuple[list[float], list[dict]]:
    """fp16 whose loss overflows on the last rank in the third step."""
    world = pl.init()
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = pl.GradScaler(init_scale=2.0**10, growth_interval=2)
    scales, states = [], []
    for step in range(5):
        x, y = (shares(part).float() for part in data(step, 12))
        loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss * (torch.inf if step == 2 and world.rank == world.world_size - 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        pl.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        states.append(snapshot(model))
    pl.release(model)
    return scales, states


def fused_and_not(strategy: Strategy) -> list[tuple[list[float], list[dict]]]:
    return [scaled(strategy, fused) for fused in (True, False)]


@every_world
def test_an_infinity_on_one_rank_makes_all_skip_and_halves_the_scale(ranks, strategy, n) -> None:
    results = ranks(n, fused_and_not, low(strategy, "float16"))
    for result in results:
        for (scales, states), (_, others) in zip(result, results[0], strict=True):
            assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
            for one, other in zip(states, others, strict=True):
                assert_same(one, other, atol=0)
            assert_same(states[2], states[1], atol=0)
            assert any(not torch.equal(states[4][name], states[2][name]) for name in states[4])


def restarted(strategy: Strategy) -> tuple[bool, dict, dict]:
    """Evaluates inside full_parameters, and goes on with states of one process loaded before the first step."""
    whole = make().float()
    states = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    x, y = (part.float() for part in data(0, 8))
    F.mse_loss(whole(x), y).backward()
    states.step()
    expected = whole(x).detach()
    model = pl.parallelize(whole, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(states.state_dict())
    with pl.full_parameters(model), torch.no_grad():
        evaluated = torch.equal(model(x), expected)
    F.mse_loss(model(shares(x)).float(), shares(y)).backward()
    optimizer.step()
    kinds = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
    after = snapshot(model)
    pl.release(model)
    return evaluated, {"dtypes": kinds}, after


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_states_of_one_process_are_taken_over_in_fp32(ranks, strategy) -> None:
    (evaluated, kinds, state), (_, _, other) = ranks(2, restarted, low(strategy))
    assert evaluated, "inside full_parameters the model is the fp32 one"
    assert kinds["dtypes"] == {torch.float32}
    assert_same(state, other, atol=0)
    assert_same(state, ranks(1, restarted, low(STAGES["zero 0"]))[0][2], atol=2e-4)


def normalised(zero: int) -> tuple[list[float], float]:
    """Losses in bf16 of a model whose weights are divided by their largest singular value, and after its release."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.utils.spectral_norm(nn.Linear(8, 3))
    )
    model = pl.parallelize(model, Strategy(zero=zero, precision="bfloat16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 6)).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, pl.release(model)(torch.ones(2, 6)).square().mean().item()


def test_spectrally_normalised_weights_are_computed_in_low_precision(ranks) -> None:
    first, *others = ranks(2, normalised, 0) + ranks(2, normalised, 3)
    assert all(other == first for other in others)
    losses, released = first
    assert losses[0] > losses[1] > losses[2] > released > 0
