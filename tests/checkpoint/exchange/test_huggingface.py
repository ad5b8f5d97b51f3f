"""Folders that transformers loads, and checkpoints made of such."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paceline as pl
from paceline.checkpoint.exchange.huggingface import write_huggingface
from paceline.checkpoint.folder import read_manifest
from paceline.checkpoint.reader import Reader
from paceline.models import ModelConfig
from paceline.models.transformer import Transformer
from tests.quick import full
from tests.train.processes import called

GPT2 = ModelConfig(layers=2, width=24, heads=3, ff=40, context=16, vocabulary=61)
LLAMA = ModelConfig(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    ff=40,
    context=16,
    vocabulary=61,
    norm="rmsnorm",
    position="rotary",
    activation="swiglu",
    bias=False,
    tied=False,
    rope_theta=5e5,
)
CONFIGS = {
    "gpt2": GPT2,
    "gpt2, published": replace(GPT2, activation="gelu_tanh", ff=0),
    "gpt2, untied": replace(GPT2, tied=False, norm_eps=1e-3),
    "llama": LLAMA,
    "llama, one key": replace(LLAMA, kv_heads=1, tied=True),
    "llama, biases": replace(LLAMA, kv_heads=0, bias=True, rope_theta=1e4),
}
QUICK = ("gpt2, published", "llama")
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 61

configs = pytest.mark.parametrize(
    "config", [config if name in QUICK else full(config) for name, config in CONFIGS.items()]
)


def model_of(config: ModelConfig, seed: int = 0) -> Transformer:
    """Random in every parameter, so that none can be left out or put in another's place."""
    torch.manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def exported(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Makes a checkpoint, and `folder / "there"` of it."""
    plain = model_of(config).to(dtype)
    model = pl.parallelize(model_of(config).to(dtype))
    pl.save(folder / "checkpoint", model, step=3, extra={"model": asdict(config)})
    pl.release(model)
    status, _, err = called(folder, "checkpoint", "export", "checkpoint", "--format", "huggingface", "--out", "there")
    assert (status, err) == (0, "")
    return plain


def imported(folder: Path, there: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The state of a model that has loaded what was made of a folder."""
    status, _, err = called(folder, "checkpoint", "import", str(there), "--out", "back")
    assert (status, err) == (0, "")
    model = pl.parallelize(model_of(config, seed=1))
    loaded = pl.load(folder / "back", model)
    said = ModelConfig(**loaded.extra["model"])
    # Zeros stand for what they stand for.
    assert replace(said, kv_heads=said.key_value_heads, ff=said.feed_forward) == replace(
        config, kv_heads=config.key_value_heads, ff=config.feed_forward
    )
    assert loaded.step == 0 and not loaded.same_random
    state = model.state_dict()
    pl.release(model)
    return state


@pytest.mark.full
@configs
def test_transformers_computes_the_same_logits(tmp_path: Path, config: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported(tmp_path, config)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        expected, found = model(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # What it writes itself comes back too.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    state = imported(tmp_path, tmp_path / "theirs", config)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@configs
def test_it_comes_back_to_the_bit(tmp_path: Path, config: ModelConfig) -> None:
    expected = exported(tmp_path, config).state_dict()
    found = imported(tmp_path, tmp_path / "there", config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_and_values_are_those_of_gpt2(tmp_path: Path) -> None:
    state = exported(tmp_path, replace(GPT2, layers=1)).state_dict()
    found = load_file(tmp_path / "there" / "model.safetensors")
    there = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
    pairs = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    blocks = {f"h.0.{name}.{kind}" for name in pairs for kind in ("weight", "bias")}
    assert there.keys() == {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", *blocks}
    assert all(name.startswith("transformer.") for name in found)
    assert there["wpe.weight"].equal(state["positions.weight"])
    # A layer there is x @ weight + bias, and the three of attention lie side by side.
    x = torch.randn(5, 24)
    block = "blocks.0.attention.qkv"
    expected = torch.nn.functional.linear(x, state[f"{block}.weight"], state[f"{block}.bias"])
    torch.testing.assert_close(x @ there["h.0.attn.c_attn.weight"] + there["h.0.attn.c_attn.bias"], expected)
    assert there["h.0.mlp.c_proj.weight"].shape == (40, 24)
    assert there["h.0.ln_2.bias"].equal(state["blocks.0.feed_forward_norm.bias"])


def test_names_and_values_are_those_of_llama(tmp_path: Path) -> None:
    state = exported(tmp_path, replace(LLAMA, layers=1)).state_dict()
    there = load_file(tmp_path / "there" / "model.safetensors")
    block = "model.layers.0"
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == {
        "model.embed_tokens.weight": (61, 32),
        f"{block}.input_layernorm.weight": (32,),
        f"{block}.self_attn.q_proj.weight": (32, 32),
        f"{block}.self_attn.k_proj.weight": (16, 32),
        f"{block}.self_attn.v_proj.weight": (16, 32),
        f"{block}.self_attn.o_proj.weight": (32, 32),
        f"{block}.post_attention_layernorm.weight": (32,),
        f"{block}.mlp.gate_proj.weight": (40, 32),
        f"{block}.mlp.up_proj.weight": (40, 32),
        f"{block}.mlp.down_proj.weight": (32, 40),
        "model.norm.weight": (32,),
        "lm_head.weight": (61, 32),
    }
    qkv, up = state["blocks.0.attention.qkv.weight"], state["blocks.0.feed_forward.up.weight"]
    assert there[f"{block}.self_attn.k_proj.weight"].equal(qkv[32:48])
    assert there[f"{block}.self_attn.v_proj.weight"].equal(qkv[48:])
    assert there[f"{block}.mlp.gate_proj.weight"].equal(up[:40])
    assert there["lm_head.weight"].equal(state["head.weight"])


@pytest.mark.parametrize("config", [GPT2, full(LLAMA)])
def test_large_weights_are_several_files(tmp_path: Path, config: ModelConfig) -> None:
    expected = exported(tmp_path, config).state_dict()
    manifest = read_manifest(tmp_path / "checkpoint")
    (tmp_path / "shards").mkdir()
    reader = Reader(tmp_path / "checkpoint", manifest.tensors)
    write_huggingface(tmp_path / "shards", config, manifest.tensors, reader, None, shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    sizes = [(tmp_path / "shards" / file).stat().st_size for file in files]
    assert index["metadata"]["total_size"] < sum(sizes) and max(sizes) < 24_000
    found = imported(tmp_path, tmp_path / "shards", config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_low_precision_stays(tmp_path: Path) -> None:
    expected = exported(tmp_path, LLAMA, torch.bfloat16).state_dict()
    assert json.loads((tmp_path / "there" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(
        tensor.dtype == torch.bfloat16 for tensor in load_file(tmp_path / "there" / "model.safetensors").values()
    )
    found = imported(tmp_path, tmp_path / "there", LLAMA)
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)


def edited(folder: Path, edit: Any, config: ModelConfig = GPT2) -> Path:
    """An exported folder with tensors changed by `edit`."""
    exported(folder, config)
    path = folder / "there" / "model.safetensors"
    tensors = load_file(path)
    tensors = edit(tensors) or tensors
    path.unlink()
    save_file(tensors, path)
    return folder / "there"


def test_older_files_without_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    def older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        masks = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    there = edited(tmp_path, older)
    expected, found = model_of(GPT2).state_dict(), imported(tmp_path, there, GPT2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
