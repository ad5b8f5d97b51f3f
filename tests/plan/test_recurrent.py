"""Recurrent layers planned for a GPU: as many operations as torch counts of one that computes, steps one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.trace import trace
from tests.quick import full

STEPS, SAMPLES, FEATURES, WIDTH = 7, 3, 6, 5

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(FEATURES, WIDTH, 2, batch_first=True, dropout=0.1),
    "lstm both ways": lambda: nn.LSTM(FEATURES, WIDTH, 2, batch_first=True, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(FEATURES, WIDTH, batch_first=True, proj_size=2),
    "lstm without biases": lambda: nn.LSTM(FEATURES, WIDTH, batch_first=True, bias=False),
    "gru": lambda: nn.GRU(FEATURES, WIDTH, 3, batch_first=True),
    "rnn": lambda: nn.RNN(FEATURES, WIDTH, batch_first=True, nonlinearity="relu"),
    "time first": lambda: nn.GRU(FEATURES, WIDTH),
}


class Model(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Linear(FEATURES, FEATURES)
        rows = layer.num_layers * (1 + layer.bidirectional)
        self.state = nn.Parameter(torch.zeros(rows, 1, layer.proj_size or WIDTH))
        self.cell = nn.Parameter(torch.zeros(rows, 1, WIDTH)) if isinstance(layer, nn.LSTM) else None

    def forward(self, x: Tensor) -> Tensor:
        samples = x.shape[0 if self.layer.batch_first else 1]
        state = self.state.repeat(1, samples, 1)
        states = state if self.cell is None else (state, self.cell.repeat(1, samples, 1))
        result, after = self.layer(self.first(x), states)
        loss: Tensor = result.square().mean() + (after[1] if isinstance(after, tuple) else after).square().mean()
        return loss


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("precision", ["float32", full("bfloat16")])
def test_as_many_operations_as_torch_counts(name: str, precision: str) -> None:
    model = Model(LAYERS[name]())
    example = torch.randn(SAMPLES, STEPS, FEATURES)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(example).backward()
    work = trace(model, SAMPLES, inputs=example, precision=precision)
    assert work.flops == counter.get_total_flops()


def test_each_step_waits_for_the_one_before() -> None:
    work = trace(Model(LAYERS["gru"]()), SAMPLES, inputs=torch.randn(SAMPLES, STEPS, FEATURES))
    steps = [each for unit in work.units for each in unit.forward if each.name == "recurrent_steps"]
    assert [each.count for each in steps] == [STEPS] * 3
    assert {each.shape for each in steps} == {(1, SAMPLES, WIDTH, 3 * WIDTH)}


def test_gates_cells_and_results_are_kept_for_backward() -> None:
    def kept(steps: int) -> int:
        work = trace(nn.LSTM(FEATURES, WIDTH, batch_first=True), SAMPLES, inputs=torch.randn(SAMPLES, steps, FEATURES))
        return sum(unit.kept for unit in work.units)

    # And the input, turned round.
    assert kept(STEPS + 1) - kept(STEPS) == SAMPLES * (FEATURES + 4 * WIDTH + WIDTH + WIDTH) * 4


def test_a_cpu_computes_with_its_own_kernels() -> None:
    work = trace(Model(LAYERS["lstm"]()), SAMPLES, inputs=torch.randn(SAMPLES, STEPS, FEATURES), device="cpu")
    assert "recurrent_steps" not in {each.name for unit in work.units for each in unit.forward}
