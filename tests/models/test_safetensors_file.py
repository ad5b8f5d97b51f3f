from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.core.errors import UserError
from paceline.models import ModelConfig
from paceline.models.safetensors_file import load_model, load_weights, save_weights
from paceline.models.transformer import Transformer
from tests.models.test_transformer import GPT, batch, shapes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_weights(Transformer(GPT).state_dict(), path, GPT)
    return path


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_model_comes_back_bit_for_bit(config: ModelConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Transformer(config).to(dtype)
    save_weights(model.state_dict(), tmp_path / "w", config)
    state, shape = load_weights(tmp_path / "w")
    assert shape == config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    loaded = load_model(tmp_path / "w")
    tokens, targets = batch(config)
    assert torch.equal(loaded(tokens, targets), model(tokens, targets))
    assert (loaded.head.weight is loaded.embedding.weight) == config.tied


def test_tied_tensors_are_stored_once(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        assert ("head.weight" in file.keys()) + ("embedding.weight" in file.keys()) == 1  # noqa: SIM118
    state, _ = load_weights(saved)
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


def test_views_of_one_flat_buffer_are_stored_apart(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    state = {"a": flat[:4], "b": flat[4:].view(2, 4), "c": flat[4:].view(4, 2).t(), "d": flat[:2]}
    save_weights(state, tmp_path / "w", GPT)
    loaded, _ = load_weights(tmp_path / "w")
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_only_the_file_is_left_behind_and_an_older_one_is_replaced(saved: Path) -> None:
    model = Transformer(GPT)
    save_weights(model.state_dict(), saved, GPT)
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]
    assert torch.equal(load_weights(saved)[0]["positions.weight"], model.positions.weight)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_the_file_is_as_the_umask_says(tmp_path: Path, mask: int) -> None:
    former = os.umask(mask)
    try:
        save_weights({"x": torch.ones(3)}, tmp_path / "w.safetensors", GPT)
    finally:
        os.umask(former)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_failed_write_names_the_path_and_keeps_the_older_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match=r"model\.safetensors: .*No space left"):
        save_weights(Transformer(GPT).state_dict(), saved, GPT)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent/w"):
        save_weights(Transformer(GPT).state_dict(), tmp_path / "absent" / "w", GPT)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file_is_refused_by_name(saved: Path, keep: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        load_weights(saved)


@pytest.mark.parametrize("place", [-1, -1000, -20_000])
def test_one_flipped_bit_in_the_data_is_refused(saved: Path, place: int) -> None:
    data = bytearray(saved.read_bytes())
    data[place] ^= 4
    saved.write_bytes(data)
    with pytest.raises(UserError, match="does not match its checksum"):
        load_weights(saved)


def test_foreign_or_absent_file_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(UserError, match=r"foreign holds tensors but not 'paceline\.config'"):
        load_weights(tmp_path / "foreign")
    with pytest.raises(UserError, match=r"no weights at .*absent"):
        load_weights(tmp_path / "absent")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    state = Transformer(GPT).state_dict()
    del state["norm.weight"]
    save_weights(state, tmp_path / "w", GPT)
    with pytest.raises(UserError, match=r"(?s)do not fit.*norm\.weight"):
        load_model(tmp_path / "w")
