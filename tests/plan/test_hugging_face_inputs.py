"""What transformers' models of text, images and sound are called with: as many operations as torch counts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.hugging_face_inputs import named_inputs
from paceline.plan.trace import trace

SAMPLES = 2
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDTH = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", {**SMALL, "vocab_size": 50, "max_position_embeddings": 24}),
    "CLIPModel": ("CLIPConfig", {"text_config": SMALL, "vision_config": {**SMALL, "image_size": 32, "patch_size": 8}}),
    "ResNetForImageClassification": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**WIDTH, "decoder_attention_heads": 2, "max_source_positions": 30, "max_target_positions": 12},
    ),
}


def made(name: str, attention: str = "eager") -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config, sizes = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, attn_implementation=attention))
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_as_many_operations_as_torch_counts(name: str) -> None:
    model = made(name)
    named = named_inputs(model, SAMPLES, 0)
    assert named is not None
    real = {
        key: torch.rand(value.shape) if value.is_floating_point() else torch.zeros(value.shape, dtype=torch.int64)
        for key, value in named.arguments.items()
        if isinstance(value, torch.Tensor)
    }
    with FlopCounterMode(display=False) as counter:
        result = model(**(named.arguments | real))
        (result.logits.sum() if result.loss is None else result.loss).backward()
    work = trace(model, SAMPLES, device="cpu")
    assert work.source == "trace" and work.flops == counter.get_total_flops() > 0


def test_what_is_assumed_is_told() -> None:
    named = named_inputs(made("ResNetForImageClassification"), SAMPLES, 0)
    assert named is not None and "224 x 224" in named.doubt
    assert [tuple(each.shape) for each in named.arguments.values()] == [(SAMPLES, 3, 224, 224)]


def test_ten_seconds_of_sound_are_heard() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(**SMALL, conv_dim=[8] * 7, num_feat_extract_layers=7)
    with torch.device("meta"):
        model = transformers.Wav2Vec2ForCTC(config)
    work = trace(model, SAMPLES, precision="bfloat16")
    assert "samples are taken for 10 s of sound at 16 kHz" in work.warnings
    # The convolutions make one frame of 320 numbers, but for what the ends lack.
    assert any(each.shape[1] == SAMPLES * 499 for unit in work.units for each in unit.forward)
