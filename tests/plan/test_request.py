from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.on_meta import on_meta
from paceline.plan import profiles
from paceline.plan.arguments import PlanArguments
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.hardware import Hardware
from paceline.plan.request import Request, request
from paceline.plan.search import search
from paceline.plan.subject import of_module

MODELS = """
import torch
from torch import nn
def low():
    return nn.Linear(64, 64).to(torch.bfloat16), torch.empty(1, 64, dtype=torch.bfloat16)
def wide():
    return nn.Linear(64, 64), torch.empty(1, 64)
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "precisions"), [("low", ("bfloat16",)), ("wide", ("bfloat16", "float32"))])
def test_float32_is_looked_at_where_it_is_close_and_the_models_own(
    name: str, precisions: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_two_dtypes.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    asked = request(PlanArguments(model=f"models_of_two_dtypes:{name}", hardware="l40s"), 2)
    assert asked.precisions == precisions
    assert request(PlanArguments(model=f"models_of_two_dtypes:{name}", hardware="h100"), 2).precisions == ("bfloat16",)


def test_a_length_is_of_what_the_model_is_called_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_called_with_an_example.py").write_text(
        MODELS + "def words():\n    return nn.Embedding(8, 4), torch.zeros(1, 32, dtype=torch.int64)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def context(name: str, length: int) -> int:
        asked = PlanArguments(model=f"models_called_with_an_example:{name}", hardware="h100", context=length)
        return request(asked, 2).case.subject.context

    assert context("words", 32) == context("words", 0) == 32
    with pytest.raises(UserError, match=r"--context 64: a sample of what .*:words is called with is 32 tokens long"):
        context("words", 64)
    with pytest.raises(UserError, match=r"--context 64: a sample of what .*:wide is called with is no sequence"):
        context("wide", 64)


def test_micro_batches_that_a_model_raises_on_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_with_norms_over_the_batch.py").write_text(
        MODELS
        + """
def pooled():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), head), torch.empty(1, 3, 16, 16)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)

    def planned(samples: int) -> tuple[Request, list[int]]:
        asked = PlanArguments(
            model="models_with_norms_over_the_batch:pooled", hardware="h100", batch_tokens=str(samples)
        )
        made = request(asked, 1)
        found = search(made.case, made.samples, precisions=made.precisions)
        return made, [each.setting.samples for each in found.best]

    many, sizes = planned(8)
    assert min(sizes) >= 2
    told = " ".join(many.warnings)
    assert told.startswith("micro-batches have 2 samples or more: with one, Sequential cannot be traced: it raised")
    assert "Expected more than 1 value per channel" in told and "rough" not in told
    assert all(many.case.subject.work(size, "bfloat16").source != "rough" for size in (2, 3, 8))
    one, sizes = planned(1)
    assert sizes == [1] and "rough" in " ".join(one.warnings)


def test_what_many_samples_cannot_be_traced_with_is_told_to_be_rough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_fixed_pairs.py").write_text(
        MODELS
        + """
class Pairs(nn.Linear):
    def forward(self, x):
        if len(x) > 2:
            raise ValueError("pairs alone")
        return super().forward(x).mean()
def pairs():
    return Pairs(64, 64), torch.empty(1, 64)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    few, many = (
        request(PlanArguments(model="models_of_fixed_pairs:pairs", hardware="h100", batch_tokens=str(samples)), 1)
        for samples in (2, 16)
    )
    assert few.warnings == ()
    assert "pairs alone" in many.warnings[0] and "times and activations are rough" in many.warnings[0]


def test_large_results_without_a_loss_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_words.py").write_text(
        MODELS
        + """
class Words(nn.Linear):
    def __init__(self, loss):
        super().__init__(64, 50_000)
        self.loss = loss
    def forward(self, x):
        logits = super().forward(x)
        return logits.float().logsumexp(-1).mean() if self.loss else logits
def without():
    return Words(False), torch.empty(1, 32, 64)
def inside():
    return Words(True), torch.empty(1, 32, 64)
def few():
    return nn.Linear(64, 10), torch.empty(1, 64)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)

    def told(name: str) -> tuple[str, ...]:
        return request(PlanArguments(model=f"models_of_words:{name}", hardware="h100", batch_tokens="16"), 1).warnings

    assert told("inside") == told("few") == ()
    (warning,) = told("without")
    assert (
        warning.startswith("Words returns 1 x 32 x 50000 numbers and no loss") and "forward returns the loss" in warning
    )


def test_what_no_low_precision_computes_is_planned_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_waves.py").write_text(
        MODELS
        + """
class Waves(nn.Linear):
    def forward(self, x):
        return torch.fft.rfft(super().forward(x)).abs()
def waves():
    return Waves(64, 64), torch.empty(1, 64)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = request(PlanArguments(model="models_of_waves:waves", hardware="h100"), 2)
    assert asked.precisions == ("float32",) and asked.case.subject.work(8, "float32").source == "trace"
    (told,) = asked.warnings
    assert told.startswith("float32 is planned, as in bfloat16 Waves cannot be traced") and "BFloat16" in told


def test_samples_that_are_longer_than_the_model_is_made_for_are_told() -> None:
    def warnings(context: int) -> tuple[str, ...]:
        return request(PlanArguments(model="llama-8b", hardware="h100", context=context), 8).warnings

    assert warnings(0) == warnings(4096) == ()
    assert warnings(16384) == ("the model is made for samples of 8,192 tokens, and 16,384 are planned",)


def test_a_model_that_is_left_in_its_own_dtype_counts_against_that_dtypes_peak() -> None:
    low = on_meta(lambda: nn.Linear(64, 64).to(torch.bfloat16))
    case = Case(of_module("low", low, torch.empty(1, 64, dtype=torch.bfloat16)), profiles.hardware("h100"), 2)
    assert case.estimate(Setting(Strategy(), 1, 1)).peak_flops == 989.4e12


def test_what_is_said_of_measuring_is_not_among_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(ranks: int, *, report: Callable[[str], object]) -> Hardware:
        report(f"measuring this machine with {ranks} ranks")
        return profiles.hardware("h100")

    monkeypatch.setattr("paceline.calibrate.machine.here", here)
    request(PlanArguments(model="nano", here=True, json="-"), 2)
    out, err = capsys.readouterr()
    assert out == "" and err == "measuring this machine with 2 ranks\n"


def test_a_slip_in_the_models_name_is_told_before_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.calibrate.machine.here", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UserError, match="did you mean gpt2-350m"):
        request(PlanArguments(model="gpt2", here=True), 2)


def test_a_batch_that_is_not_the_presets_is_told() -> None:
    def warnings(devices: int, tokens: str = "") -> tuple[str, ...]:
        return request(PlanArguments(model="nano", hardware="h100", batch_tokens=tokens), devices).warnings

    assert warnings(4) == warnings(8) == ()
    for devices, planned in ((3, "6"), (64, "64")):
        (told,) = warnings(devices)
        assert f"has 8 samples, which {devices} devices cannot share equally: {planned} are planned" in told
    assert warnings(3, "384") == ()
