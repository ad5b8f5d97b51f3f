from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.models.flops import flops_per_token
from paceline.models.on_meta import on_meta
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.plan.subject import Kernels, extended, grouped, of_module, transformer
from paceline.plan.trace import trace
from tests.quick import diagonal


@pytest.mark.parametrize(
    ("preset", "kernels"),
    diagonal(
        ["tiny", "small", "gpt2-124m", "llama-1b"], ["cuda", "cpu"], quick={("gpt2-124m", "cuda"), ("tiny", "cpu")}
    ),
)
def test_the_work_of_many_samples_is_that_of_a_trace_of_them(preset: str, kernels: Kernels) -> None:
    config, context = PRESETS[preset], 0 if preset == "tiny" else 128
    subject = transformer(preset, config, context, kernels)
    model = on_meta(lambda: Transformer(config))
    one, two = (trace(model, each, length=context, precision="bfloat16", device=kernels) for each in (1, 2))
    # More samples than parameters' gradients are large: another moment is the fullest.
    traced = trace(model, 16, length=context, precision="bfloat16", device=kernels)
    assert extended(one, two, 16) == traced
    assert subject.work(16, "bfloat16") == grouped(traced)


def test_a_model_of_ones_own_is_planned_by_what_it_is_called_with() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    subject = of_module("mine", model, torch.empty(1, 64))
    assert (subject.context, subject.shapes.numel) == (1, 64 * 256 + 256 + 256 * 8 + 8)
    assert subject.work(16, "float32").flops == pytest.approx(16 * subject.work(1, "float32").flops, rel=0.01)


class Contrastive(nn.Module):
    """Each sample with each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        return (y @ y.t()).logsumexp(1).mean()


def test_what_each_sample_has_with_each_other_is_traced() -> None:
    model = on_meta(Contrastive)
    found = of_module("mine", model, torch.empty(1, 64))
    assert found.work(2048, "float32") == grouped(trace(model, 2048, inputs=torch.empty(1, 64), precision="float32"))
    assert found.flops_of(2048, "float32") > 8 * 2048 * found.flops_of(1, "float32")


def test_works_that_compute_other_things_are_not_extended() -> None:
    one = transformer("nano", PRESETS["nano"]).work(1, "float32")
    other = transformer("tiny", PRESETS["tiny"]).work(2, "float32")
    assert extended(one, other, 4) is None


def test_a_module_needs_the_operations_by_which_mfu_is_counted() -> None:
    config = PRESETS["nano"]
    found = of_module("mine", on_meta(lambda: Transformer(config)))
    formula = flops_per_token(config, config.context) * config.context * 8
    assert found.flops_of(8, "bfloat16") == pytest.approx(formula), "scores in whole, backward twice forward"


class Recomputing(nn.Module):
    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.embedding, self.how = nn.Embedding(10, 64), how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
        return x


@pytest.mark.parametrize("how", [False, True])
def test_what_a_model_computes_again_by_itself_takes_time_but_is_not_needed(how: bool) -> None:
    ids = torch.zeros(1, 16, dtype=torch.int64)
    plain = of_module("mine", on_meta(lambda: Recomputing(None)), ids)
    again = of_module("mine", on_meta(lambda: Recomputing(how)), ids)
    assert again.work(4, "float32").flops > 1.1 * plain.work(4, "float32").flops
    assert again.flops_of(4, "float32") == plain.flops_of(4, "float32") == plain.work(4, "float32").flops


class Capacity(nn.Module):
    """Experts that each have places for so many rows, but for four at the least."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(8, 16, 32)), nn.Parameter(torch.empty(8, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        places = max(4, len(x) // 8)
        rows = x.new_zeros(8 * places, 16).index_add(0, torch.arange(len(x)) % (8 * places), x)
        return torch.bmm(torch.bmm(rows.view(8, places, 16), self.up).relu(), self.down)


@pytest.mark.parametrize("samples", [3, 24, 48, 512, 3000])
def test_what_is_more_for_many_samples_alone_is_traced(samples: int) -> None:
    example = torch.empty(2, 16)
    subject = of_module("capacity", Capacity(), example)
    # Two products forward and three backward, as rows need no gradient.
    assert subject.work(samples, "bfloat16").flops == 5 * 2 * 8 * max(4, samples // 8) * 16 * 32


def test_from_two_samples_on_many_are_worked_out_where_one_alone_is_refused() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)))
    subject = of_module("normed", model, torch.empty(1, 16))
    traced = trace(model, 40, inputs=torch.empty(1, 16))
    assert subject.least("float32") == 2
    assert subject.work(40, "float32") == grouped(traced)
    assert of_module("plain", nn.Linear(16, 4, device="meta"), torch.empty(1, 16)).least("float32") == 1
