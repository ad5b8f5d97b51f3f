"""What config.json says of a model is what is computed, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.checkpoint.exchange.huggingface_config import from_huggingface, to_huggingface
from paceline.core.errors import UserError
from paceline.models import PRESETS, ModelConfig

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back(name: str) -> None:
    config = PRESETS[name]
    found = from_huggingface(json.dumps(to_huggingface(config, "float32", None)).encode())
    assert replace(found, kv_heads=config.kv_heads) == config and found.key_value_heads == config.key_value_heads


def test_published_files_are_understood() -> None:
    assert from_huggingface(json.dumps(GPT2).encode()) == replace(PRESETS["gpt2-124m"], activation="gelu_tanh")
    found = from_huggingface(json.dumps(LLAMA).encode())
    assert (found.key_value_heads, found.rope_theta, found.norm_eps, found.tied) == (4, 10_000.0, 1e-6, False)
    old = from_huggingface(json.dumps(LLAMA | {"rope_theta": 5e5, "rope_scaling": None}).encode())
    new = from_huggingface(
        json.dumps(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).encode()
    )
    assert old == new and new.rope_theta == 5e5


def test_biases_of_all_linear_layers_have_words() -> None:
    said = to_huggingface(replace(PRESETS["llama-1b"], bias=True), "bfloat16", 3)
    assert said["attention_bias"] and said["mlp_bias"]
    assert (said["torch_dtype"], said["eos_token_id"]) == ("bfloat16", 3)
    assert from_huggingface(json.dumps(said).encode()).bias


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm"}, "GPT-2, from which this model differs: norm is rmsnorm, there layernorm"),
        ({"bias": False}, "bias is False, there True"),
        ({"kv_heads": 2}, "key_value_heads is 2, there 4"),
        ({"activation": "swiglu", "ff": 64}, "activation is swiglu, there gelu or gelu_tanh"),
        ({"position": "rotary"}, "Llama, .* norm is layernorm, there rmsnorm, activation is gelu, there swiglu"),
    ],
)
def test_a_model_without_words_there_is_refused_with_what_differs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        to_huggingface(replace(ModelConfig(), **changes), "float32", None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral': expected gpt2 or llama"),
        ({}, "model_type is None"),
        ({"model_type": ["gpt2"]}, "model_type is"),
        ({"model_type": "gpt2"}, "missing required field `vocab_size`"),
        (GPT2 | {"n_embd": "wide"}, "Expected `int`, got `str` - at `\\$.n_embd`"),
        (GPT2 | {"n_embd": 2.5}, "n_embd"),
        (GPT2 | {"n_embd": 10**30}, "n_embd|at most"),
        (GPT2 | {"n_layer": 0}, "layers must be at least 1"),
        (GPT2 | {"n_head": 7}, "width must be a multiple of heads"),
        (GPT2 | {"activation_function": "relu"}, "activation_function is 'relu': expected gelu or gelu_new"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2 | {"quantization_config": {"bits": 4}}, "quantization_config is"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu': expected 'silu'"),
        (LLAMA | {"attention_bias": True}, "mlp_bias is False: expected True"),
        (LLAMA | {"head_dim": 32}, "head_dim is 32: expected 16"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has rope_type 'llama3'"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"rope_parameters": {"rope_theta": "far"}}, "rope_theta is 'far'"),
        (LLAMA | {"rope_theta": -1.0}, "rope_theta must be positive"),
        (LLAMA | {"num_key_value_heads": 3}, "kv_heads must divide heads"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_huggingface(json.dumps(values).encode())


@pytest.mark.parametrize("text", [b"", b"no json", b"[1]", b"{" * 100_000, b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(UserError):
        from_huggingface(text)
