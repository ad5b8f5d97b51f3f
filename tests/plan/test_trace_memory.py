"""What a trace holds and keeps is what a real pass takes from the allocator."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.layout import ROOT
from paceline.core.strategy import Strategy
from paceline.models.transformer import Transformer
from paceline.models.units import parameter_specs
from paceline.plan.footprint import moments
from paceline.plan.trace import trace
from paceline.plan.work import Work
from tests.plan.test_trace import GATED
from tests.quick import full


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stages = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.stages(x).mean((2, 3)))
        return y


class Encoder(nn.TransformerEncoder):
    """Attention of torch's own layers, whose kernel for CPUs writes all scores where dropout is on."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 6, enable_nested_tensor=False)


class Keeper(nn.Module):
    """Keeps a tensor where no hook of autograd sees it, and a result that nothing needs for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for layer in self.layers:
            x = layer(x).tanh()
            self.seen.append(x + 1)
        return x


class Checkpointed(nn.Module):
    """Blocks that are alike, each in a checkpoint of the model's: it keeps what each is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that the allocator of the CPU gave (and, below zero, got back) one after the other while something ran."""
    # What earlier tests have left in circles would else be given back just then.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            kept = run()
    finally:
        gc.enable()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    given = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    return given


def real_peak(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes that the allocator of the CPU gave at most in a forward and a backward."""

    def run() -> None:
        output = model(*args)
        (output if output.dim() == 0 else output.sum()).backward()

    return max(0, *itertools.accumulate(allocations(run)))


def traced_peak(model: nn.Module, work: Work) -> int:
    """The same of a trace, with gradients that stay as their unit's backward begins."""
    names = [unit.unit for unit in work.units]
    gradients = dict.fromkeys([*names, ""], 0)
    for name, parameter in model.named_parameters():
        gradients[next((each for each in names if each and name.startswith(f"{each}.")), "")] += parameter.nbytes
    alive = peak = 0
    for unit in work.units:
        alive += unit.kept
        peak = max(peak, alive + unit.forward_peak)
    held = 0
    for unit in reversed(work.units):
        held += gradients[unit.unit]
        peak = max(peak, alive + unit.backward_peak + held)
        alive -= unit.kept
    return peak


def test_what_a_transformer_holds_is_what_a_real_pass_takes_from_the_allocator() -> None:
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    model = Transformer(GATED)
    assert traced_peak(model, trace(model, 4, device="cpu")) == pytest.approx(
        real_peak(model, (tokens, tokens)), rel=0.01
    )


@pytest.mark.parametrize(
    ("build", "shape", "off"),
    [
        (Keeper, (64, 128), 0.1),
        (Encoder, (16, 50, 64), 0.03),
        (Convolutions, (16, 8, 64, 64), 0.1),
        full(Checkpointed, (4096, 64), 0.1),
    ],
)
def test_what_other_models_hold_is_near_what_a_real_pass_takes(build: Any, shape: tuple[int, ...], off: float) -> None:
    # Kernels of convolutions on CPUs take memory for other layouts, which no trace sees; and gradients are counted from
    # the beginning of their unit's backward, which shows where they are large beside activations.
    model, x = build(), torch.randn(shape)
    assert traced_peak(model, trace(model, shape[0], inputs=x, device="cpu")) == pytest.approx(
        real_peak(model, (x,)), rel=off
    )


class Rooted(nn.Module):
    """Has matrices of its own, in no module of it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256, 256))
        if tied:
            self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


def test_the_models_own_parameters_have_one_gradient_where_nobody_shares_them() -> None:
    x = torch.randn(16, 256)
    fullest = {}
    for tied in (False, True):
        model = Rooted(tied)
        work = trace(model, 16, inputs=x, device="cpu")
        layout = build_layout(parameter_specs(model, ()), [ROOT], Strategy(), 1)
        fullest[tied] = max(moment.total for moment in moments(work, build_schedule(layout, Strategy(), 1, 0, (ROOT,))))
    assert fullest[False] == pytest.approx(real_peak(Rooted(False), (x,)), rel=0.05)
    # Of a tied one both parts and their sum may be there.
    assert fullest[True] > 1.5 * fullest[False]


@pytest.mark.parametrize("how", ["unit", "keep_attention"])
def test_what_recomputed_units_keep_is_what_the_engine_keeps(how: Any) -> None:
    from paceline.models.recompute import recompute
    from paceline.models.units import find_blocks

    model = Transformer(GATED)
    work = trace(model, 4, device="cpu")
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    recompute([model.get_submodule(name) for name in find_blocks(model)], how, 1)
    real = sum(allocations(lambda: model(tokens, tokens)))
    kept = sum(
        (unit.kept_attention if how == "keep_attention" else unit.kept_input)
        if unit.unit.startswith("blocks.")
        else unit.kept
        for unit in work.units
    )
    # Each checkpoint holds the state of the random numbers, too.
    assert kept + GATED.layers * torch.get_rng_state().nbytes == pytest.approx(real, rel=0.001)
