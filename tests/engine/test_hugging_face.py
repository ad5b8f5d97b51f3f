"""Small models of many families of `transformers`, made of their configurations, at every stage and in bfloat16."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, snapshot
from tests.quick import full
from tests.ranks import RankPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 48, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
WIDE = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
DEEP = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, **WIDE}
BOTH = {**DEEP, **TEXT, "eos_token_id": 2, "decoder_start_token_id": 1}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 5}

CAUSAL = ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "llama", "phi", "mpt", "olmo", "cohere", "mamba", "biogpt")
CAUSAL_GROUPED = ("mistral", "qwen2", "qwen3", "gemma", "stablelm")
MASKED = (
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta-v2",
    "modernbert",
    "roformer",
    "ernie",
    "nystromformer",
)
SEQ2SEQ = ("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart")
IMAGE = ("vit", "beit", "dinov2", "vit_msn")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(CAUSAL, ("AutoModelForCausalLM", TEXT)),
    **dict.fromkeys(CAUSAL_GROUPED, ("AutoModelForCausalLM", GROUPED)),
    **dict.fromkeys(MASKED, ("AutoModelForMaskedLM", TEXT)),
    **dict.fromkeys(SEQ2SEQ, ("AutoModelForSeq2SeqLM", BOTH)),
    **dict.fromkeys(IMAGE, ("AutoModelForImageClassification", PATCHES)),
}


def build(family: str, **more: Any) -> nn.Module:
    """The same on every rank, but for what the seeds of their random numbers are afterwards."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(family, **{**settings, **more}))


def batch(family: str, step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2 * step + rank)
    if family in IMAGE:
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (2,), generator=generator)}
    tokens = torch.randint(3, 48, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: what is zero but for rounding must not become a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def trained(family: str, strategy: Strategy, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this rank, and weights after two steps; in evaluation, so that nothing is drawn."""
    rank = pl.init().rank
    model = pl.parallelize(build(family).eval().to(dtype), strategy)
    optimizer, losses = optimizer_of(model), []
    for step in range(2):
        given = batch(family, step, rank)
        if "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"].to(dtype)
        loss = model(**given).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pl.full_parameters(model):
        state = snapshot(model)
    pl.release(model)
    return losses, state


def in_one_process(family: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = build(family).eval().double()
    optimizer, losses = optimizer_of(model), [[], []]  # type: ignore[var-annotated]
    for step in range(2):
        for rank in range(2):
            given = batch(family, step, rank)
            if "pixel_values" in given:
                given["pixel_values"] = given["pixel_values"].double()
            loss = model(**given).loss
            losses[rank].append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, snapshot(model)


SOME = ("vit",)
EVERY_FAMILY = [family if family in SOME else full(family) for family in FAMILIES]
EVERY_STAGE = [(family, index % 4) for index, family in enumerate(FAMILIES)] + [(family, 3) for family in FAMILIES]


@pytest.mark.parametrize(
    ("family", "zero"),
    [
        (family, zero) if family in SOME and zero == 3 else full(family, zero)
        for family, zero in dict.fromkeys(EVERY_STAGE)
    ],
)
def test_training_equals_one_process(ranks: RankPool, family: str, zero: int) -> None:
    losses, state = in_one_process(family)
    for rank, (told, found) in enumerate(ranks(2, trained, family, Strategy(zero=zero), torch.float64)):
        assert told == pytest.approx(losses[rank], abs=1e-12)
        assert_same(found, state, atol=1e-12)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_sharded_model_in_bfloat16_is_a_whole_one_to_the_bit(ranks: RankPool, family: str) -> None:
    whole, sharded = (
        ranks(2, trained, family, Strategy(zero=zero, precision="bfloat16"), torch.float32) for zero in (0, 3)
    )
    for (told, found), (losses, state) in zip(sharded, whole, strict=True):
        assert told == losses
        assert_same(found, state, atol=0)


def transcribed(strategy: Strategy) -> tuple[float, list[int]]:
    """The loss of speech in float32, and what is generated from it by an entry point of its own."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {**DEEP, "vocab_size": 48, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **marks, suppress_tokens=None, begin_suppress_tokens=None)
    model = pl.parallelize(transformers.WhisperForConditionalGeneration(config).eval(), strategy)
    optimizer = optimizer_of(model)
    speech = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(pl.init().rank))
    for _ in range(2):
        loss = model(input_features=speech, labels=torch.tensor([[5, 6, 7], [8, 9, 2]])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Of all ranks the same, which write as many tokens.
    speech = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        tokens = model.generate(input_features=speech, max_new_tokens=6, do_sample=False)
    pl.release(model)
    return loss.item(), tokens.flatten().tolist()


def test_entry_points_other_than_forward_take_float32_in_low_precision(ranks: RankPool) -> None:
    whole, *others = (ranks(2, transcribed, Strategy(zero=zero, precision="bfloat16")) for zero in (0, 1, 3))
    assert all(other == whole for other in others)
    assert len(whole[0][1]) >= 2 * 4


def with_layers_dropped(strategy: Strategy | None) -> dict[str, Tensor]:
    """Weights after six steps in which each rank skips other blocks; without a strategy those of one process."""
    model = build("bart", encoder_layerdrop=0.5, decoder_layerdrop=0.5, dropout=0.0).double().train()
    parts = [0, 1]
    if strategy is not None:
        parts, model = [pl.init().rank], pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        for rank in parts:
            torch.manual_seed(10 * step + rank)
            (model(**batch("bart", step, rank)).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pl.full_parameters(model) if strategy is not None else contextlib.nullcontext():
        return snapshot(model)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Strategy(zero=3), id="zero 3"),
        *(
            pytest.param(strategy, id=name, marks=pytest.mark.full)
            for name, strategy in {
                "zero 0": Strategy(),
                "zero 2": Strategy(zero=2),
                "zero 3, hold": Strategy(zero=3, accumulation="hold"),
            }.items()
        ),
    ],
)
def test_ranks_may_drop_other_layers(ranks: RankPool, strategy: Strategy) -> None:
    expected = with_layers_dropped(None)
    for found in ranks(2, with_layers_dropped, strategy):
        assert_same(found, expected, atol=1e-12)
