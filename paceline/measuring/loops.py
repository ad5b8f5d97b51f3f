"""The plain training loop, in one process alone and with paceline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline import comm
from paceline.core.strategy import Strategy
from paceline.measuring.cases import ADAMW, Case, Precision, Training


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, world: pl.World, autocast: bool
) -> Callable[[], Tensor]:
    """The plain training loop's step; with `autocast`, forward computes in bfloat16 from float32 weights."""
    inputs, targets = case.data(world.rank, world.device)

    def step() -> Tensor:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=autocast):
            loss: Tensor = model(inputs, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def one_process(case: Case, world: pl.World, precision: Precision, compiled: bool = False) -> Training:
    """Trains without communication, each rank for itself: what nothing can beat."""
    model = case.build().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, loop(_called(model, compiled), optimizer, case, world, precision == "bfloat16"))


def meeting(case: Case, world: pl.World, precision: Precision) -> Training:
    """As `one_process`, but ranks wait for each other before every update, as averaging gradients makes them."""
    model = case.build().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def meet(*_: object) -> None:
        if world.device.type == "cpu":
            comm.barrier()
        else:
            pl.barrier()

    optimizer.register_step_pre_hook(meet)
    return Training(model, loop(model, optimizer, case, world, precision == "bfloat16"))


def parallel(strategy: Strategy, case: Case, world: pl.World, _: Precision, compiled: bool = False) -> Training:
    """Trains with a strategy, which says in what precision."""
    model = pl.parallelize(case.build(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = loop(_called(model, compiled), optimizer, case, world, autocast=False)
    return Training(model, step, pl.engine_of(model).settle)


def _called(model: nn.Module, compiled: bool) -> nn.Module:
    """What a loop calls in a model's place."""
    quick: Any = torch.compile(model) if compiled else model
    return quick  # type: ignore[no-any-return]
