"""Nothing in a step makes the host wait for the GPU, and what a step decides is decided there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.strategy import Strategy
from tests.gpu.devices import on_a_gpu, on_two_gpus, ranks_on_gpus
from tests.gpu.loop import CASES, POLICIES, STEPS, in_parallel, make

pytestmark = on_a_gpu

FIRST = 3
"""Step from which on the host must not wait: before it buffers are laid out and flags written."""


def watch() -> Callable[[int], None]:
    """For `train`: between its first steps and the end, torch raises where the host waits for the GPU."""

    def before_step(step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if FIRST <= step < STEPS else "default")

    return before_step


def without_waiting(strategy: Strategy, dtype: torch.dtype) -> bool:
    try:
        in_parallel(strategy, dtype, watch())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.parametrize("name", CASES)
def test_the_host_of_one_rank_does_not_wait(gpu: torch.device, name: str) -> None:
    assert without_waiting(CASES[name], torch.float32)


@pytest.mark.parametrize("name", POLICIES)
def test_nor_in_bfloat16(gpu: torch.device, name: str) -> None:
    assert without_waiting(replace(POLICIES[name], precision="bfloat16"), torch.float32)


@on_two_gpus
@pytest.mark.parametrize("name", CASES)
def test_nor_do_those_of_two_ranks(name: str) -> None:
    assert ranks_on_gpus(2, without_waiting, CASES[name], torch.float32) == [True, True]


def test_the_mode_does_raise(gpu: torch.device) -> None:
    watch()(FIRST)
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device=gpu).item()
    finally:
        watch()(STEPS)


# ---- copies between host and GPU


def test_batches_in_pinned_memory_are_copied_without_waiting(gpu: torch.device) -> None:
    loader = pytest.importorskip("paceline.data.loader", reason="paceline.data needs msgspec")
    values = [torch.arange(12).view(3, 4).pin_memory() for _ in range(2)]
    assert all(value.is_pinned() for value in values)
    torch.cuda._sleep(100_000_000)
    asked = torch.cuda.Event()
    asked.record()
    watch()(FIRST)
    try:
        found = loader._to(loader.MicroBatch(*values, 12), gpu)
        assert not asked.query(), "the host waited"
    finally:
        watch()(STEPS)
    assert found.inputs.device == gpu and torch.equal(found.inputs.cpu(), values[0])
    assert torch.equal(found.targets.cpu(), values[1]) and found.tokens == 12


def test_a_steps_values_are_read_one_step_later(gpu: torch.device) -> None:
    meter = pytest.importorskip("paceline.train.meter", reason="paceline.train needs msgspec")
    readback = meter.Readback()
    watch()(FIRST)
    try:
        found = [readback.exchange(step, torch.full((2,), step + 0.5, device=gpu)) for step in range(1, 4)]
    finally:
        watch()(STEPS)
    assert found == [(0, [0.0, 0.0]), (1, [1.5, 1.5]), (2, [2.5, 2.5])]


# ---- a step that is left out


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_infinity_leaves_weights_and_the_optimizers_step_as_they_were(gpu: torch.device, precision: Any) -> None:
    optim = pytest.importorskip("paceline.train.optim", reason="paceline.train needs msgspec")
    config = pytest.importorskip("paceline.train.config", reason="paceline.train needs msgspec")
    model = pl.parallelize(make(torch.float32, gpu), Strategy(precision=precision))
    engine = pl.engine_of(model)
    update = optim.Update(model, config.OptimConfig(), 10, gpu)
    tokens, states = torch.full((), 8.0, device=gpu), []
    for step, infinite in enumerate((False, True, False)):
        model(torch.ones(8, 4, device=gpu)).float().square().sum().backward()
        if infinite:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.view(-1)[0] = torch.inf
        watch()(FIRST)
        try:
            update(step, tokens, tokens, engine.grad_norm())
        finally:
            watch()(STEPS)
        kept = [
            *(value.clone() for value in model.state_dict().values()),
            *(value.clone() for state in update.optimizer.state.values() for value in state.values()),
        ]
        states.append(kept)
    pl.release(model)
    assert all(torch.equal(*pair) for pair in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(states[1], states[2], strict=True))
    assert update.skips.tolist() == [1.0, 0.0]
