from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from paceline.core.errors import UserError
from paceline.models.flops import parameter_count
from paceline.models.presets import PRESETS
from paceline.plan.models import meta_model
from paceline.plan.stages import shapes

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_parameters_that_its_shape_says_and_no_memory(name: str) -> None:
    model = meta_model(name)
    assert shapes(model).numel == parameter_count(PRESETS[name])
    assert all(parameter.is_meta for parameter in model.parameters())


def written(folder: Path, config: dict) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_hugging_face_configuration_is_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    gpt2 = shapes(meta_model(written(tmp_path, GPT2)))
    assert gpt2.numel == parameter_count(PRESETS["gpt2-124m"])
    assert [unit for unit in gpt2.units if ".h." in unit] == [f"transformer.h.{i}" for i in range(12)]
    llama = meta_model(written(tmp_path, LLAMA))
    assert shapes(llama).numel == 2 * 100 * 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 64
    assert all(parameter.is_meta for parameter in llama.parameters())
    assert len(shapes(meta_model(str(tmp_path))).units) == len(shapes(llama).units), "its folder will do"


@pytest.mark.parametrize(
    ("config", "units", "shared"),
    [
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128},
            ("encoder.block.0", "decoder.block.5"),
            "shared.weight",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 48},
            (".11",),
            "",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"], "torch_dtype": "bfloat16"},
            (".3",),
            "",
        ),
    ],
)
def test_a_file_may_name_a_class_that_is_no_causal_language_model(
    tmp_path: Path, config: dict, units: tuple[str, ...], shared: str
) -> None:
    pytest.importorskip("transformers")
    model = meta_model(written(tmp_path, config))
    assert type(model).__name__ == config["architectures"][0]
    assert all(any(unit.endswith(ending) for unit in shapes(model).units) for ending in units)
    names = [name for name, _ in model.named_parameters()]
    assert names.count(shared) == bool(shared) and len(names) == len({id(p) for p in model.parameters()})
    wanted = getattr(torch, config.get("torch_dtype", "float32"))
    assert {p.dtype for p in model.parameters()} == {wanted} and all(p.is_meta for p in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "model_type"),
        ("no json", "not a valid JSON"),
        (json.dumps({"model_type": "vit"}), "ViTConfig"),
        (json.dumps({"model_type": "gpt2", "architectures": ["MyOwnModel"]}), "names MyOwnModel, which transformers"),
        (json.dumps({"model_type": "gpt2", "architectures": "MyOwnModel"}), "MyOwnModel"),
        (json.dumps({"model_type": "gpt2", "n_embd": "wide"}), "n_embd"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": -1}), "num_hidden_layers: expected 1 or more, got -1"),
        (json.dumps({"model_type": "llama", "quantization_config": {"bits": 4}}), "quantization_config"),
    ],
)
def test_a_file_that_describes_no_model_says_why(tmp_path: Path, text: str, words: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="transformers makes no model of it") as caught:
        meta_model(str(tmp_path / "config.json"))
    assert words in str(caught.value)
    # Said of files alone of which it is true.
    assert ("names no class in architectures" in str(caught.value)) == ("vit" in text)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[huggingface\]'"):
        meta_model(written(tmp_path, GPT2))


MODULE = """
import torch
from torch import nn

def huge():
    return nn.Sequential(nn.Linear(10**6, 10**6), nn.Embedding(10**6, 10**6))

def beside():
    model = nn.Linear(4, 4)
    model.register_buffer("real", torch.empty(8, device="cpu").normal_())
    return model

def number():
    return 3

def empty():
    return nn.ReLU()

def frozen():
    return nn.Linear(4, 4).requires_grad_(False)

def lazy():
    return nn.LazyLinear(3)

def sized(width):
    return nn.Linear(width, width)

def chatty():
    print("reading my settings")
    return nn.Linear(4, 4)

def broken():
    return helped({})

def helped(settings):
    return nn.Linear(settings["width"], 4)

shape = (1, 2)

built = nn.Linear(4, 4)

def leaves():
    raise SystemExit(2)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the current folder."""
    name = f"models_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


def test_a_function_builds_a_model_of_any_size(mine: str) -> None:
    assert shapes(meta_model(f"{mine}:huge")).numel == 2 * 10**12 + 10**6


def test_what_has_memory_is_drawn_as_ever(mine: str) -> None:
    real = meta_model(f"{mine}:beside").get_buffer("real")
    assert real.device == torch.device("cpu")
    assert real.unique().numel() == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}:number", "expected the function to return an nn.Module, or one and what it is called with"),
        ("{}:missing", "has no function 'missing'"),
        ("{}:shape", "has no function 'shape'"),
        ("{}:built", "expected a function that builds the model, got a Linear that is built already"),
        ("{}:leaves", "leaves(), which builds it on the meta device (shapes without values), raised SystemExit: 2"),
        ("{}:empty", "ReLU has no parameters"),
        ("{}:frozen", "all parameters are frozen"),
        ("{}:lazy", "weight has no shape before the model is called"),
        ("{}:sized", "expected a function that takes nothing (missing a required argument: 'width')"),
        ("no_such_module:build", "there is no module no_such_module"),
        ("llama_70b", "did you mean llama-70b?"),
        ("no/such/config.json", "there is no such file"),
        ("what", "expected a preset (nano, tiny"),
    ],
)
def test_a_name_that_leads_to_no_model_says_what_was_expected(mine: str, name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        meta_model(name.format(mine))
    assert words in str(caught.value)


def test_what_a_users_function_raises_is_told_with_its_own_lines_alone(mine: str) -> None:
    with pytest.raises(UserError) as caught:
        meta_model(f"{mine}:broken")
    first, _, traced = str(caught.value).partition("\n\n")
    assert first.startswith(f"--model {mine}:broken: broken(), which builds it on the meta device")
    assert first.endswith("raised KeyError: 'width'")
    assert "in broken" in traced and "in helped" in traced and traced.endswith("KeyError: 'width'")
    assert "models.py" not in traced.replace(mine, "") and "on_meta" not in traced


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_installed_anywhere\n", "raised ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("def build(: pass\n", "raised SyntaxError: invalid syntax"),
        ("import sys; sys.exit('no arguments')\n", "raised SystemExit: no arguments"),
        ("raise ValueError('no settings')\n", "raised ValueError: no settings"),
    ],
)
def test_a_module_that_cannot_be_imported_says_so_and_where(mine: str, tmp_path: Path, text: str, words: str) -> None:
    name = f"{mine}_broken_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UserError) as caught:
        meta_model(f"{name}:build")
    first, _, traced = str(caught.value).partition("\n\n")
    assert first.startswith(f"--model {name}:build: importing {name} {words}")
    assert f'{name}.py", line 1' in traced and "importlib" not in traced


@pytest.mark.parametrize("name", [":build", "models:"])
def test_half_a_name_asks_for_the_other(name: str) -> None:
    with pytest.raises(UserError, match="expected module:function"):
        meta_model(name)


def test_what_a_model_prints_as_it_is_built_is_not_among_the_numbers(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meta_model(f"{mine}:chatty")
    out, err = capsys.readouterr()
    assert out == "" and err == "reading my settings\n"


def test_what_a_model_checks_of_its_values_as_it_is_built_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_rotations.py").write_text(
        "from torch import nn\ndef build():\n    return nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = meta_model("models_of_rotations:build")
    assert model.weight.is_meta and model.weight.shape == (8, 8)
