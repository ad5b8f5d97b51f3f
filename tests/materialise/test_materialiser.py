"""Models on the meta device are made unit by unit: the same as elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, WORLDS, Stack, assert_same, in_worlds, snapshot, stages, train
from tests.materialise.meta_models import Plain, Turned, Varied, built, everything, on_meta, refused
from tests.quick import diagonal


def made_and_trained(strategy: Strategy, cls: Callable[[], nn.Module], **given: Any) -> tuple[Any, ...]:
    model = on_meta(cls)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pl.parallelize(model, strategy, **given)
    same = all(parameters[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    trains = [p.requires_grad for p in parameters.values()]
    before = everything(model)
    (after,) = train(model, 2) if cls is not Varied else ({},)
    pl.release(model)
    return same, trains, before, after


@in_worlds(WORLDS, cls={cls.__name__: cls for cls in (Varied, Plain)})
def test_it_is_the_model_that_its_constructor_makes_elsewhere(ranks, strategy, n, cls) -> None:
    reference = built(cls)
    trains = [p.requires_grad for _, p in reference.named_parameters(remove_duplicate=False)]
    made = everything(reference)
    (trained,) = train(reference, 2) if cls is not Varied else ({},)
    for same, found, before, after in ranks(n, made_and_trained, strategy, cls):
        assert same and found == trains
        assert_same(before, made, atol=0)
        assert_same(after, trained)


def small_normal(module: nn.Module) -> None:
    """Like Hugging Face's `_init_weights`: by way of `data`, and to a part of a part."""
    for name, parameter in module.named_parameters():
        if name == "out.weight":
            parameter.data.normal_(std=0.01)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight)
        module.in_proj_bias.zero_()
    elif isinstance(module, Turned):
        module.angle = torch.arange(len(module.angle), dtype=torch.float64)
    elif hasattr(module, "scale"):
        nn.init.constant_(module.scale, 0.5)
        if isinstance(module, Varied):
            module.steps.fill_(3)


@in_worlds({name: (strategy, n) for name, strategy in STAGES.items() for n in (1, 2)})
def test_a_function_initialises_as_model_apply_does(ranks, strategy, n) -> None:
    reference = built(Plain)
    torch.manual_seed(0)
    with torch.no_grad():
        reference.apply(small_normal)
    expected = everything(reference)
    for _, _, before, _ in ranks(n, given_init, strategy):
        assert_same(before, expected, atol=0)


def given_init(strategy: Strategy) -> tuple[Any, ...]:
    return made_and_trained(strategy, Plain, init=small_normal)


# ---- weights


def stored(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """Weights of `Plain` on disk, in one file or two with an index, tied ones once; and what they are."""
    model = built(Plain, seed=5)
    state = snapshot(model)
    tensors = {name: value.contiguous() for name, value in state.items() if name != "before.weight"}
    if kind == "file":
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors", everything(model)
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    if kind == "index":
        save_file({"inner.weight": torch.ones(1)}, folder / "other.safetensors")
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, everything(model)


@pytest.mark.parametrize(("strategy", "kind"), diagonal(STAGES, ["file", "folder", "index"]))
def test_weights_are_read_from_disk(ranks, tmp_path: Path, strategy, kind) -> None:
    path, expected = stored(tmp_path, kind)
    reference = built(Plain)
    reference.load_state_dict(expected, strict=False)
    (trained,) = train(reference, 2)
    for n in (1, 2):
        for same, _, before, after in ranks(n, from_disk, strategy, path):
            assert same
            assert_same(before, expected, atol=0)
            assert_same(after, trained)


def from_disk(strategy: Strategy, path: Path) -> tuple[Any, ...]:
    # Only rank 0 reads.
    given = path if pl.init().rank == 0 else "nowhere"
    return made_and_trained(strategy, Plain, weights=given)


def test_weights_that_do_not_fit_are_named_on_every_rank(ranks, tmp_path: Path) -> None:
    path, _ = stored(tmp_path, "file")
    tensors = {name: value for name, value in snapshot(built(Plain)).items() if name != "before.weight"}
    del tensors["inner.bias"], tensors["head.weight"]
    tensors |= {"inner.weight": torch.ones(3), "left.over": torch.ones(1)}
    save_file(tensors, path)
    for message in ranks(2, refused, Plain, {"weights": path}):
        assert "missing: inner.bias, before.weight" in message
        assert "not in the model: left.over" in message
        assert "of another shape: inner.weight ([3] in the file, [6, 4] in the model)" in message


def test_weights_that_are_not_there_twice_there_or_damaged_are_errors(ranks, tmp_path: Path) -> None:
    assert "no safetensors file" in ranks(1, refused, Plain, {"weights": tmp_path})[0]
    path, _ = stored(tmp_path, "file")
    (tmp_path / "copy.safetensors").write_bytes(path.read_bytes())
    assert "is in" in ranks(1, refused, Plain, {"weights": tmp_path})[0]
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read as safetensors" in ranks(1, refused, Plain, {"weights": path})[0]


# ---- in part, in low precision


def made_in(strategy: Strategy, device: Callable[[int], str]) -> dict[str, Tensor]:
    rank = pl.init().rank
    model = built(Plain, device(rank), seed=rank)
    torch.manual_seed(rank)
    pl.parallelize(model, strategy)
    state = everything(model)
    pl.release(model)
    return state


def only_rank_0(rank: int) -> str:
    return "meta" if rank else "cpu"


def not_rank_0(rank: int) -> str:
    return "cpu" if rank else "meta"


@pytest.mark.parametrize(
    ("strategy", "device"), diagonal(STAGES, {"only rank 0": only_rank_0, "not rank 0": not_rank_0})
)
def test_some_ranks_may_have_values_already(ranks, strategy, device) -> None:
    expected = everything(built(Plain))
    for found in ranks(3, made_in, strategy, device):
        assert_same(found, expected, atol=0)


def with_real_buffers(strategy: Strategy) -> dict[str, Tensor]:
    model = built(Plain)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = meta
    model.before.weight = model.head.weight
    with torch.no_grad():
        for block in model.blocks:
            block.turned.angle.fill_(7)
    # What is here already is not initialised.
    for block in model.blocks:
        block.turned.reset_parameters = None
    torch.manual_seed(0)
    pl.parallelize(model, strategy)
    state = everything(model)
    pl.release(model)
    return state


@stages
def test_buffers_that_have_values_keep_them(ranks, strategy) -> None:
    reference = built(Plain)
    for block in reference.blocks:
        block.turned.angle.fill_(7)
    for found in ranks(2, with_real_buffers, strategy):
        assert_same(found, everything(reference), atol=0)


def made_in_fp32(strategy: Strategy) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Stack()
    torch.manual_seed(pl.init().rank)
    pl.parallelize(model, strategy)
    state = snapshot(model)
    pl.release(model)
    return state


@stages
def test_masters_have_the_values_in_full(ranks, strategy) -> None:
    torch.manual_seed(0)
    expected = snapshot(Stack())
    for n in (1, 2):
        for found in ranks(n, made_in_fp32, replace(strategy, precision="bfloat16")):
            assert_same(found, expected, atol=0)
