from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.optim import Update, learning_rate
from paceline.train.sections import OptimConfig


@given(
    steps=st.integers(1, 300),
    warmup=st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0, 1000.0]),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    final=st.floats(0, 1),
)
def test_the_learning_rate_rises_then_falls_within_its_bounds(
    steps: int, warmup: float, schedule: str, final: float
) -> None:
    config = OptimConfig(lr=2.0, warmup=warmup, schedule=schedule, final_lr_fraction=final)  # type: ignore[arg-type]
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    top = rates.index(max(rates))
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert rates[0] > 0 or final == 0 or warmup > 0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_the_learning_rate_reaches_its_ends() -> None:
    config = OptimConfig(lr=1.0, warmup=10, final_lr_fraction=0.1)
    assert learning_rate(0, 100, config) == pytest.approx(1 / 11)
    assert learning_rate(10, 100, config) == 1.0
    assert learning_rate(99, 100, config) == pytest.approx(0.1)
    linear = OptimConfig(lr=1.0, warmup=0, schedule="linear", final_lr_fraction=0)
    assert learning_rate(50, 101, linear) == pytest.approx(0.5)
    assert learning_rate(99, 100, OptimConfig(lr=1.0, schedule="constant")) == 1.0


@pytest.mark.parametrize("clip", [0.0, 0.01, 100.0])
def test_one_pass_equals_dividing_clipping_and_stepping_apart(clip: float) -> None:
    torch.manual_seed(0)
    config = OptimConfig(lr=1e-2, warmup=0, clip=clip, weight_decay=0.3, schedule="constant")
    model = torch.nn.Linear(5, 3)
    reference = copy.deepcopy(model)
    update = Update(model, config, 4, torch.device("cpu"))
    plain = torch.optim.AdamW(
        [
            {"params": [reference.weight], "weight_decay": 0.3},
            {"params": [reference.bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=config.betas,
        eps=config.eps,
    )
    for step in range(4):
        gradients = [torch.randn_like(p) * 7 for p in model.parameters()]
        for p, q, g in zip(model.parameters(), reference.parameters(), gradients, strict=True):
            p.grad, q.grad = g.clone(), g / 7
        expected = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters()])
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        norm = update(
            step, torch.tensor(7.0, dtype=torch.float64), torch.tensor(14.0), torch.nn.utils.get_total_norm(gradients)
        )
        plain.step()
        torch.testing.assert_close(norm, expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone_and_is_counted() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    config = OptimConfig(warmup=0, schedule="constant")
    updates = [Update(module, config, 9, torch.device("cpu")) for module in (model, twin)]

    def step(module: torch.nn.Module, update: Update, number: int, norm: float) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 if norm == 1.0 else norm)
        update(number, torch.tensor(2.0), torch.tensor(4.0), torch.tensor(norm))

    history = []
    for number, norm in enumerate([1.0, float("nan"), float("inf"), 1.0, float("nan")]):
        before = copy.deepcopy(model.state_dict())
        step(model, updates[0], number, norm)
        if norm == 1.0:
            step(twin, updates[1], number, norm)
        else:
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        history.append(updates[0].skips.tolist())
    assert history == [[0, 0], [1, 1], [2, 2], [2, 0], [3, 1]]
    # Skipped steps leave no trace in the moments either.
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_batch_without_a_target_token_is_skipped_and_leaves_no_nan() -> None:
    model = torch.nn.Linear(4, 4)
    update = Update(model, OptimConfig(warmup=0, schedule="constant"), 9, torch.device("cpu"))
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update(0, torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.0), torch.tensor(0.0))
    assert update.skips.tolist() == [1, 1]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
