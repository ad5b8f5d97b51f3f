"""What a trace counts of a model's operations, and what it says of a model that cannot be traced."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.calibrate.timed_pass import timed_pass
from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.plan import slow_work
from paceline.plan.models import meta_model
from paceline.plan.rough_work import traced_or_rough
from paceline.plan.trace import trace
from paceline.plan.transformer_work import transformer_work
from paceline.plan.work import Work
from tests.quick import diagonal

GATED = ModelConfig(
    layers=5, width=64, heads=4, kv_heads=2, ff=96, context=32, vocabulary=320,
    norm="rmsnorm", position="rotary", activation="swiglu", bias=False, tied=False,
)  # fmt: skip


def flops(work: Work, kind: str, backward: bool = False) -> float:
    return sum(
        each.flops * each.count
        for unit in work.units
        for each in (unit.backward if backward else unit.forward)
        if each.kind == kind
    )


@pytest.mark.parametrize(
    ("name", "device"),
    diagonal(["nano", "llama-70b", "gated"], ["cpu", "cuda"], quick={("nano", "cpu"), ("gated", "cuda")}),
)
def test_a_transformers_operations_are_those_of_the_formula(name: str, device: Any) -> None:
    with torch.device("meta"):
        model = Transformer(GATED) if name == "gated" else meta_model(name)
    assert isinstance(model, Transformer)
    traced = trace(model, 2, precision="bfloat16", device=device)
    formula = transformer_work(model.config, 2, dtype="bfloat16")
    for kind in ("matmul", "attention"):
        for backward in (False, True):
            assert flops(traced, kind, backward) == flops(formula, kind, backward)
    assert {unit.unit for unit in formula.units} <= {unit.unit for unit in traced.units}
    assert (traced.source, traced.warnings, traced.tokens) == ("trace", (), formula.tokens)


def test_products_of_an_odd_vocabulary_are_counted() -> None:
    with torch.device("meta"):
        model = Transformer(replace(PRESETS["nano"], vocabulary=1001))
    traced = trace(model, 2, precision="bfloat16", device="cuda")
    assert traced.warnings == ()
    for backward in (False, True):
        # The output layer pads rows of logits, by 7 at most.
        expected = flops(transformer_work(model.config, 2, dtype="bfloat16"), "matmul", backward)
        assert expected <= flops(traced, "matmul", backward) <= expected * (1 + 7 / 1001)


def test_a_model_is_left_as_it_was() -> None:
    model = Transformer(GATED)
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    trace(model, 2, precision="bfloat16")
    assert all(each is before[name] for name, each in model.named_parameters())
    assert all("forward" not in part.__dict__ and not part._forward_pre_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)[x[:, 0].unique().long()])
        return y


def test_an_operator_that_depends_on_values_is_named_and_the_matrices_are_counted_instead() -> None:
    with pytest.raises(UserError, match=r"Selects cannot be traced: aten\._unique2"):
        trace(Selects(), 2, inputs=torch.empty(3, 8))
    work = traced_or_rough(Selects(), 2, inputs=torch.empty(3, 8))
    assert work.source == "rough" and "cannot be traced" in work.warnings[0]
    assert work.flops == 6 * 2 * (8 * 4 + 4 * 2)
    assert "times and activations are rough, mostly too small" in work.warnings[0]


def test_a_result_that_no_gradient_comes_from_is_told(recwarn: pytest.WarningsRecorder) -> None:
    class Recomputing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return y

    work = traced_or_rough(Recomputing(4, 8), inputs=torch.empty(1, 4))
    assert "nothing that it returns has a gradient" in work.warnings[0]
    assert work.flops == 3 * 2 * 4 * 8
    with pytest.raises(UserError, match="all of them are frozen"):
        trace(nn.Linear(4, 8).requires_grad_(False), inputs=torch.empty(1, 4))


def test_the_matrices_of_a_model_that_is_one_layer_are_counted_too() -> None:
    assert traced_or_rough(nn.Linear(3, 5), 2).flops == 6 * 2 * 3 * 5


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print("a block")
            time.sleep(0.05)
        return x


def test_a_trace_that_takes_long_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_work, "FIRST", 0.02)
    lines: list[str] = []
    with slow_work.told_to(lines.append):
        trace(Slow(), 2, inputs=torch.empty(1, 8))
    told = r"tracing Slow with 2 samples: in {} of .*, [{}-3] of 3 units begun, \d+ operators so far"
    assert any(re.fullmatch(told.format("forward", 1), line) for line in lines)
    assert all(re.fullmatch(told.format("(forward|backward)", 0), line) for line in lines)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    lines.clear()
    trace(Slow(), 1, inputs=torch.empty(1, 8))
    assert not lines, "nobody listens"


def test_what_a_model_prints_as_it_is_traced_is_not_among_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    trace(Slow(), 1, inputs=torch.empty(1, 8))
    out, err = capsys.readouterr()
    assert out == "" and "a block" in err


@pytest.mark.parametrize("how", ["unit", "keep_attention"])
def test_what_recomputed_units_run_again_is_what_the_engine_runs_again(how: Any) -> None:
    from paceline.models.recompute import recompute
    from paceline.models.units import find_blocks

    model = Transformer(GATED)
    work = trace(model, 4, device="cpu")
    expected = sum(
        unit.flops
        + sum(
            each.flops * each.count
            for each in (unit.again or ())
            if unit.unit.startswith("blocks.") and (how == "unit" or each.kind != "attention")
        )
        for unit in work.units
    )
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    recompute([model.get_submodule(name) for name in find_blocks(model)], how, 1)
    ran = timed_pass(model, (tokens, tokens), 1)
    assert sum(each.operation.flops * each.operation.count for each in ran.calls) == expected


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def test_torch_s_own_layers_attend_as_gpus_do_with_dropout_too() -> None:
    plain, drops = (trace(Attends(rate), 2, inputs=torch.empty(1, 96, 64), precision="bfloat16") for rate in (0.0, 0.1))
    for work in (plain, drops):
        found = [each for unit in work.units for each in unit.forward if each.kind == "attention"]
        assert [each.name for each in found] == ["_scaled_dot_product_flash_attention"]
        assert found[0].flops == 4 * 2 * 4 * 96**2 * 16
    assert flops(plain, "matmul") == flops(drops, "matmul")


class Recomputes(Attends):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return result


def test_what_checkpoints_compute_again_attends_alike() -> None:
    before = torch.nn.functional.scaled_dot_product_attention
    work = trace(
        nn.Sequential(Recomputes(0.1), Recomputes(0.1)), 2, inputs=torch.empty(1, 96, 64), precision="bfloat16"
    )
    names = [each.name for unit in work.units for each in unit.backward if each.kind == "attention"]
    assert work.source == "trace" and len(names) == 4
    assert names.count("_scaled_dot_product_flash_attention") == 2
    assert torch.nn.functional.scaled_dot_product_attention is before


class Returns(nn.Module):
    def __init__(self, makes: Any) -> None:
        super().__init__()
        self.layer, self.makes = nn.Linear(8, 40), makes

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        return self.makes(logits.square().mean(), logits)


def test_of_a_loss_beside_results_backward_begins_at_the_loss() -> None:
    alone, beside, both = (
        trace(Returns(makes), 4, inputs=torch.empty(1, 8))
        for makes in (
            lambda loss, logits: loss,
            lambda loss, logits: (loss, logits),
            lambda loss, logits: (logits, loss),
        )
    )
    assert beside.units[-1].backward == alone.units[-1].backward
    # What does not begin with a loss has two gradients of its results, and their sum.
    assert len(both.units[-1].backward) == len(alone.units[-1].backward) + 1


def test_torchscript_is_told_and_its_matrices_planned() -> None:
    work = traced_or_rough(torch.jit.script(nn.Linear(3, 5)), 2, inputs=torch.empty(1, 3))
    assert work.source == "rough" and "has TorchScript in it" in work.warnings[0]
