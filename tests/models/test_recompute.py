"""Activations computed again in backward: the same gradients, fewer things kept, at every stage."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from tests.engine.models import STAGES, assert_same, gradients, snapshot
from tests.engine.real_models import FAMILIES, loss_of
from tests.quick import diagonal, some

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


def compile_forwards(model: Transformer) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def compile_in_place(model: Transformer) -> None:
    for block in model.blocks:
        block.compile()


def replace_by_compiled(model: Transformer) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)  # type: ignore[assignment]


COMPILED = {
    "forward": (compile_forwards, [STAGES["zero 0"], replace(STAGES["zero 3"], recompute="unit")]),
    "in place": (compile_in_place, [STAGES["zero 1"], STAGES["zero 3"]]),
    "replaced": (replace_by_compiled, [STAGES["zero 2"], STAGES["zero 3"]]),
}
"""Each way where parameters come and go and where they stay, and each stage: what is made of them is the same code. All
ways at all stages, without such code, are in tests/engine/test_compiling.py."""


def compiled(compile_blocks: Callable[[Transformer], None], strategies: list[Strategy]) -> list[tuple[dict, dict, int]]:
    """Gradients and weights by each strategy, in one job as compiling takes long, and how many graphs were compiled."""
    world = pl.init()
    results = []
    for strategy in strategies:
        # What was compiled for another model counts towards how often a function may be.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build()
        compile_blocks(model)
        pl.parallelize(model, strategy)
        found, state = trained(model, world.rank, world.world_size)
        pl.release(model)
        results.append((found, state, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for CPUs needs a C++ compiler")
@pytest.mark.parametrize("way", some(COMPILED, set()))
def test_units_may_be_compiled(ranks, way: str) -> None:
    expected, weights, _ = ranks(1, recomputed, None)[0]
    for results in ranks(2, compiled, *COMPILED[way], timeout=200):
        for found, state, graphs in results:
            assert_same(found, expected, atol=1e-10)
            assert_same(state, weights, atol=1e-8)
            assert graphs == 1, "one serves all blocks in all steps"


def compiled_whole(strategies: list[Strategy], before: bool) -> list[tuple[dict, dict]]:
    world = pl.init()
    results = []
    for strategy in strategies:
        torch._dynamo.reset()
        plain = build()
        # What is in question is whether hooks survive being traced, not what code is made of the rest.
        if before:
            called = parallel = pl.parallelize(torch.compile(plain, backend="eager"), strategy)
        else:
            parallel = pl.parallelize(plain, strategy)
            called = torch.compile(parallel, backend="eager")
        results.append(trained(parallel, world.rank, world.world_size, called))
        pl.release(parallel)
    return results


# A smaller model, also in a plain `pytest`, and at all stages: tests/engine/test_compiling.py.
@pytest.mark.full
@pytest.mark.parametrize(
    ("strategies", "before"),
    [
        pytest.param([STAGES["zero 3"], STAGES["zero 2"]], False, id="after it is made parallel"),
        pytest.param([STAGES["zero 3"], STAGES["zero 1"]], True, id="before it"),
    ],
)
def test_a_whole_model_may_be_compiled(ranks, strategies, before) -> None:
    expected, weights, _ = ranks(1, recomputed, None)[0]
    for results in ranks(2, compiled_whole, strategies, before, timeout=200):
        for found, state in results:
            assert_same(found, expected, atol=1e-10)
            assert_same(state, weights, atol=1e-8)


class Collects(nn.Module):
    """Adds its norm to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, norms: list[torch.Tensor]) -> torch.Tensor:
        x = self.linear(x)
        norms.append(x.square().mean())
        return x


class Collecting(nn.Module):
    """Sums up what its blocks have added, so that their graphs share tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = [torch.zeros(())]
        for block in self.blocks:
            x = block(x, norms)
        return torch.stack(norms).sum()


def compiled_and_not(strategy: Strategy, backend: str) -> list[tuple[float, float]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = pl.parallelize(Collecting(), strategy)
    results = []
    for called in (model, torch.compile(model, backend=backend)):
        loss = called(torch.ones(2, 8))
        loss.backward()
        results.append((loss.item(), pl.engine_of(model).grad_norm().item()))
        model.zero_grad()
    pl.release(model)
    return results


@pytest.mark.full
@pytest.mark.parametrize(("zero", "backend"), [(3, "eager"), (0, "aot_eager"), (3, "aot_eager")])
def test_blocks_that_fill_a_list_may_be_compiled_with_their_model(ranks, zero, backend) -> None:
    for plain, compiled in ranks(2, compiled_and_not, Strategy(zero=zero), backend, timeout=100):
        assert compiled == pytest.approx(plain)
