from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from paceline.models import PRESETS, ModelConfig, flops_per_token, parameter_count, peak_flops
from paceline.models.transformer import Transformer


def counted(config: ModelConfig) -> int:
    with torch.device("meta"):
        model = Transformer(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("nano", 136_960),
        ("tiny", 873_600),
        ("small", 5_853_184),
        ("gpt2-124m", 124_439_808),
        ("gpt2-350m", 354_823_168),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama2-7b", 6_738_415_616),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, parameters: int) -> None:
    assert counted(PRESETS[name]) == parameters
    assert parameter_count(PRESETS[name]) == parameters


def test_seventy_billion_parameters_build_on_the_meta_device_in_two_seconds() -> None:
    start = time.perf_counter()
    with torch.device("meta"):
        Transformer(PRESETS["llama-70b"])
    assert time.perf_counter() - start < 30


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return ModelConfig(
        layers=draw(st.integers(1, 3)),
        width=heads * 2 * draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        ff=draw(st.integers(1, 50)),
        context=draw(st.integers(1, 20)),
        vocabulary=draw(st.integers(1, 50)),
        norm=draw(st.sampled_from(("layernorm", "rmsnorm"))),
        position=draw(st.sampled_from(("learned", "rotary"))),
        activation=draw(st.sampled_from(("gelu", "swiglu"))),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


@given(configs())
@settings(deadline=None)
def test_closed_form_counts_every_shapes_parameters(config: ModelConfig) -> None:
    assert parameter_count(config) == counted(config)


@given(configs(), st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_flops_per_token_equal_those_of_the_executed_products(config: ModelConfig, batch: int) -> None:
    # Of as many tokens as need no columns beside them.
    config = replace(config, vocabulary=4 * config.vocabulary)
    model = Transformer(config)
    tokens = torch.zeros(batch, config.context, dtype=torch.int64)
    # The math kernel runs attention as plain products, all of the scores included.
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == batch * config.context * flops_per_token(config, config.context)


def test_causal_flops_count_half_of_attention() -> None:
    config = PRESETS["gpt2-124m"]
    whole = flops_per_token(config, 1024)
    assert whole - flops_per_token(config, 1024, causal=True) == 6 * 12 * 768 * 1024
    assert whole == 6 * (124_439_808 - 1024 * 768 - 12 * 13 * 768 - 2 * 768) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.05),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_is_known_by_the_drivers_device_name(name: str, tera: float) -> None:
    assert peak_flops(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    ["cpu", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H100", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D"],
)
def test_peak_of_an_unlisted_device_is_none(name: str) -> None:
    assert peak_flops(name) is None


def test_the_peak_is_that_of_the_precision_computed_in() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert peak_flops(name) == peak_flops(name, "float16") == 989.4e12
    assert peak_flops(name, "float32") == 67e12
    assert peak_flops(name, "tf32") == pytest.approx(peak_flops(name) / 2)
    assert peak_flops("NVIDIA H100 PCIe", "float32") == 51e12
    assert peak_flops("NVIDIA B200", "tf32") is None
    # Made before bf16 and TF32.
    assert [peak_flops("Tesla V100-SXM2-32GB", each) for each in ("float16", "bfloat16", "tf32")] == [
        125e12,
        None,
        None,
    ]
