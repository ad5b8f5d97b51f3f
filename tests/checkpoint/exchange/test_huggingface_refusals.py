"""Damaged folders, and shapes that the other side has no words for, are refused, and nothing is left or overwritten."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline as pl
from tests.checkpoint.exchange.test_huggingface import GPT2, edited, exported, imported, model_of
from tests.train.processes import called


def refused(folder: Path, there: Path) -> str:
    status, _, err = called(folder, "checkpoint", "import", str(there), "--out", "back")
    assert status == 2 and err.count("\n") == 1 and not (folder / "back").exists()
    return err


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    def tie(tensors: dict[str, Tensor], by: float) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + by

    assert imported(tmp_path / "1", edited(tmp_path / "1", lambda tensors: tie(tensors, 0)), GPT2)
    there = edited(tmp_path / "2", lambda tensors: tie(tensors, 1))
    assert "config.json ties lm_head.weight" in refused(tmp_path / "2", there)


def damage(there: Path, what: str) -> None:
    path, index = there / "model.safetensors", there / "model.safetensors.index.json"
    match what:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-100])
        case "gone":
            path.rename(there / "pytorch_model.bin")
        case "header":
            path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
        case "outside" | "numbers":
            name = "../checkpoint/rank-00000.safetensors" if what == "outside" else 3
            index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
        case "no map":
            index.write_text("[]")
        case "no file":
            index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "model-1.safetensors"}}))
        case "layers" | "width":
            said = json.loads((there / "config.json").read_text())
            said |= {"n_layer": 10**8} if what == "layers" else {"n_embd": 99_999_999}
            (there / "config.json").write_text(json.dumps(said))
        case "config":
            (there / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", "cannot be read as safetensors"),
        ("gone", "pickles, which may run code"),
        ("header", "cannot be read as safetensors"),
        ("outside", "which is no file beside it"),
        ("numbers", "names 3, which is no file"),
        ("no map", "is no index of safetensors files"),
        ("no file", "cannot be read as safetensors"),
        ("layers", "config.json says 100,000,000 layers"),
        ("width", "does not fit the model; of another shape: transformer.wte.weight ([61, 24] in the file"),
        ("config", "config.json: "),
    ],
)
def test_damaged_and_hostile_folders_are_refused(tmp_path: Path, what: str, words: str) -> None:
    exported(tmp_path, GPT2)
    damage(tmp_path / "there", what)
    assert words in refused(tmp_path, tmp_path / "there")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.__delitem__("transformer.h.1.ln_1.bias"), "missing: transformer.h.1.ln_1.bias"),
        (lambda tensors: tensors.update(score=torch.ones(2)), "not in the model: score"),
        (lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()}, "got I8"),
    ],
)
def test_other_tensors_than_the_shape_has_are_refused(tmp_path: Path, edit: Any, words: str) -> None:
    assert words in refused(tmp_path, edited(tmp_path, edit))


def test_what_has_no_words_there_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for number, (extra, words) in enumerate(
        (
            ({"model": asdict(replace(GPT2, bias=False))}, "bias is False, there True"),
            ({"model": asdict(replace(GPT2, width=48))}, "it is another model's"),
            ({"model": {"layers": "many"}}, "is no shape of a Transformer"),
            (None, "does not say the shape of its model"),
        )
    ):
        model = pl.parallelize(model_of(GPT2))
        pl.save(tmp_path / f"{number}", model, step=1, extra=extra)
        pl.release(model)
        status, _, err = called(tmp_path, "checkpoint", "export", f"{number}", "--format", "huggingface")
        assert status == 2 and words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_importing_never_overwrites(tmp_path: Path) -> None:
    exported(tmp_path, GPT2)
    for out in ("checkpoint", "there"):
        before = sorted(path.name for path in (tmp_path / out).iterdir())
        assert called(tmp_path, "checkpoint", "import", "there", "--out", out)[0] == 2
        assert sorted(path.name for path in (tmp_path / out).iterdir()) == before
