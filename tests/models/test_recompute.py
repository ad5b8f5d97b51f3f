"""Activations computed again in backward: the same gradients, fewer things kept, at every stage."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from tests.engine.models import STAGES, assert_same, gradients, shares, snapshot
from tests.engine.real_models import FAMILIES, loss_of
from tests.quick import diagonal, full

CONFIG = ModelConfig(layers=2, width=16, heads=2, context=8, vocabulary=11)


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).double()


def tokens(seed: int, rank: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (4, 8), generator=generator)[rank::n]


def trained(model: nn.Module, rank: int, n: int, called: nn.Module | None = None) -> tuple[dict, dict]:
    """Gradients of the last step and weights after it, by the names that they have without compiling.

    Args:
        model: What is trained.
        rank: Whose share of the data.
        n: Of how many.
        called: What stands for the model, if not itself.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        x = tokens(step, rank, n)
        loss = (model if called is None else called)(x, x.roll(-1, 1))
        (loss / (4 / n * 8)).backward()
        found = gradients(model)
        optimizer.step()
    return tuple(  # type: ignore[return-value]
        {name.replace("_orig_mod.", ""): value for name, value in values.items()} for values in (found, snapshot(model))
    )


def recomputed(strategy: Strategy | None) -> tuple[dict, dict, list[int]]:
    world = pl.init()
    model = build()
    rank, n = (0, 1) if strategy is None else (world.rank, world.world_size)
    runs = [0] * CONFIG.layers
    for index, block in enumerate(model.blocks):

        def count(module: nn.Module, args: tuple, index: int = index) -> None:
            runs[index] += 1

        block.feed_forward.register_forward_pre_hook(count)
    if strategy is not None:
        pl.parallelize(model, strategy)
    return *trained(model, rank, n), runs


HOW = {"unit": ("unit", 1), "every other unit": ("unit", 2), "keep_attention": ("keep_attention", 1)}


@pytest.mark.parametrize(("strategy", "recompute"), diagonal(STAGES, HOW))
def test_recomputed_activations_give_the_same_training(ranks, strategy, recompute) -> None:
    how, every = recompute
    expected, weights, _ = ranks(1, recomputed, None)[0]
    for found, state, runs in ranks(2, recomputed, replace(strategy, recompute=how, recompute_every=every)):
        assert_same(found, expected)
        assert_same(state, weights)
        assert runs == [6 if (index + 1) % every == 0 else 3 for index in range(CONFIG.layers)]


def test_blocks_that_are_named_by_the_list_that_holds_them_are_recomputed_too(ranks) -> None:
    for _, _, runs in ranks(2, recomputed, replace(STAGES["zero 3"], recompute="unit", units=("blocks",))):
        assert runs == [6] * CONFIG.layers


def kept(how: str) -> int:
    """Bytes that autograd keeps between forward and backward, in fp32, where attention is one operation."""
    model = pl.parallelize(build().float(), Strategy(recompute=how))
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = tokens(0, 0, 1)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, x)
    loss.backward()
    pl.release(model)
    return sum(size for address, size in found.items() if address not in parameters)


def test_less_is_kept_between_forward_and_backward(ranks) -> None:
    nothing_again, all_again = (ranks(1, kept, how)[0] for how in ("none", "unit"))
    assert all_again < 0.5 * nothing_again


class Attentions(TorchDispatchMode):
    """Counts how often attention is computed forwards."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def attentions(how: str) -> int:
    model = pl.parallelize(build().float(), Strategy(recompute=how))
    x = tokens(0, 0, 1)
    with Attentions() as mode:
        model(x, x).backward()
    pl.release(model)
    return mode.count


def test_attention_that_is_kept_is_not_computed_again(ranks) -> None:
    counts = {how: ranks(1, attentions, how)[0] for how in ("none", "keep_attention", "unit")}
    assert counts == {"none": CONFIG.layers, "keep_attention": CONFIG.layers, "unit": 2 * CONFIG.layers}


def with_a_cache(name: str, how: str) -> dict:
    """Gradients of a model of transformers that keeps keys and values, with rows that are padded."""
    family = FAMILIES[name]
    model = pl.parallelize(family.make(), Strategy(zero=3, recompute=how))  # type: ignore[arg-type]
    batch = family.batch(0, 2)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    loss_of(model, batch).backward()
    found = gradients(model)
    pl.release(model)
    return found


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_keys_and_values_are_computed_again_from_the_cache_as_it_was(ranks, name: str) -> None:
    (expected, _), found = (ranks(2, with_a_cache, name, how) for how in ("none", "unit"))
    for each in found:
        assert_same(each, expected)


def copied_and_released() -> list[bool]:
    model = pl.parallelize(build(), Strategy(zero=3, recompute="unit"))
    average = copy.deepcopy(model)
    x = tokens(0, 0, 1)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
        same = torch.equal(model(x), build()(x))
        zeroed = not average(x).any()
    pl.release(model)
    return [same, zeroed, "forward" not in model.blocks[0].__dict__]


def test_a_copy_recomputes_with_its_own_parameters_and_release_ends_it(ranks) -> None:
    assert ranks(2, copied_and_released) == [[True] * 3] * 2


class Adapted(nn.Module):
    """Hooks its blocks' layers for the length of a forward, with what that was given, as libraries of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        hooks = [block[0].register_forward_hook(lambda *given: given[2] * scale) for block in self.blocks]
        hooks += [
            block[2].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + scale,), kwargs), with_kwargs=True)
            for block in self.blocks
        ]
        try:
            for block in self.blocks:
                x = x + block(x)
            return x
        finally:
            for hook in hooks:
                hook.remove()


def adapted(strategy: Strategy | None) -> dict[str, torch.Tensor]:
    model = Adapted().double()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x if strategy is None else shares(x), 2.0 + step).square().mean().backward()
        # Others are there when it is evaluated, or none.
        optimizer.step()
        optimizer.zero_grad()
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, nn.Linear))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("zero", [0, full(2), 3])
@pytest.mark.parametrize("how", ["unit", full("keep_attention")])
def test_hooks_that_were_there_for_a_forward_are_there_when_it_is_computed_again(ranks, zero: int, how: str) -> None:
    expected = adapted(None)
    for found in ranks(2, adapted, Strategy(zero=zero, recompute=how)):  # type: ignore[arg-type]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0)
