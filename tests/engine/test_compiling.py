"""torch.compile around a training step: the same numbers as one process without it, whatever is compiled and when.

What code a compiler makes is not in question, but what it looks at while it reads a model: `backend="eager"`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, snapshot
from tests.quick import fewest, full
from tests.ranks import RankPool

WIDTH = 6


class Block(nn.Module):
    """With a weight that is cut to shards in the middle, and a bias that one rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


Compiled = Callable[[Model, Strategy | None], nn.Module]
"""Makes a model parallel, where there is a strategy, and compiles it; returns what is called in its place."""


def parallel(model: Model, strategy: Strategy | None) -> Model:
    return model if strategy is None else pl.parallelize(model, strategy)


def forwards(model: Model, strategy: Strategy | None, **options: bool) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager", **options)  # type: ignore[method-assign]
    return parallel(model, strategy)


def forwards_of_one_graph(model: Model, strategy: Strategy | None) -> nn.Module:
    return forwards(model, strategy, fullgraph=True, dynamic=True)


def forwards_afterwards(model: Model, strategy: Strategy | None) -> nn.Module:
    parallel(model, strategy)
    return forwards(model, None)


def blocks(model: Model, strategy: Strategy | None) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return parallel(model, strategy)


def wrapped_blocks(model: Model, strategy: Strategy | None) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return parallel(model, strategy)


def whole_in_place(model: Model, strategy: Strategy | None) -> nn.Module:
    parallel(model, strategy).compile(backend="eager")
    return model


def whole(model: Model, strategy: Strategy | None) -> nn.Module:
    return torch.compile(parallel(model, strategy), backend="eager", dynamic=False)  # type: ignore[return-value]


def whole_before(model: Model, strategy: Strategy | None) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    return parallel(compiled, strategy)  # type: ignore[arg-type]


WAYS: list[Compiled] = [
    forwards,
    forwards_of_one_graph,
    forwards_afterwards,
    blocks,
    wrapped_blocks,
    whole_in_place,
    whole,
    whole_before,
]


def data(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(rows, 2, generator=generator, dtype=torch.float64),
    )


def trained(way: Compiled, strategy: Strategy | None, micro: int) -> dict[str, Tensor]:
    """Weights after steps in which everything that is compiled is read anew while gradients are there."""
    rank, ranks = (0, 1) if strategy is None else (pl.init().rank, pl.init().world_size)
    torch._dynamo.reset()
    model = build()
    called = way(model, strategy)
    net = called if hasattr(called, "no_sync") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Batches of other sizes are compiled anew, in the midst of a step and while p.grad holds what the last one left.
    rows = iter([4, 6, 6, 4, 8, 10])
    for step in range(3):
        if step == 2:
            optimizer.zero_grad(set_to_none=False)
        for index in range(micro):
            last = strategy is None or index == micro - 1
            with nullcontext() if last else net.no_sync():  # type: ignore[operator]
                x, y = (part[rank::ranks] for part in data(10 * step + index, next(rows)))
                (called(x) - y).square().mean().div(micro).backward()
        with torch.no_grad():
            called(data(5, 2)[0])
        optimizer.step()
    found = {name.replace("_orig_mod.", ""): value for name, value in snapshot(model).items()}
    if strategy is not None:
        pl.release(called if way is whole_before else model)
    return found


MICRO = {"2 micro-batches": 2, "1 micro-batch": 1, "defer": 2, "hold": 2, "each": 2}
"""How many micro-batches a step has, by how they are accumulated."""

BESIDE = {"": {}, "shared parameters": {"share_parameters": True}, "recomputed": {"recompute": "unit"}}


def case(zero: int, micro: str, beside: str) -> tuple[Strategy, int]:
    accumulation = micro if micro in ("defer", "hold", "each") else "auto"
    return Strategy(zero=zero, bucket_mb=1e-4, accumulation=accumulation, **BESIDE[beside]), MICRO[micro]


def is_one(zero: int, micro: str, beside: str) -> bool:
    """Whether there is such a strategy."""
    return (micro != "hold" or (zero == 3 and beside != "shared parameters")) and (
        zero > 0 or beside != "shared parameters"
    )


CASES = fewest(
    (each for each in product([way.__name__ for way in WAYS], range(4), MICRO, BESIDE) if is_one(*each[1:])),
    lambda each: ((each[0], each[1]), (each[0], each[3]), *combinations(enumerate(each[1:]), 2)),
    # Where parameters come and go within each pass.
    first=[(way.__name__, 3, "2 micro-batches", "") for way in WAYS],
)
"""Whatever is compiled at every stage and beside all else, and every accumulation with both. All at once they are for
the checker to prove: a compiler sees no more of them than hooks, parameters and gradients."""

QUICK = {forwards: [(2, "2 micro-batches", ""), (3, "hold", "")]}
"""What a plain `pytest` compiles: blocks where parameters stay and where they are held."""


def on_rank(way: Compiled, cases: list[tuple[int, str, str]]) -> list[dict[str, Tensor]]:
    return [trained(way, *case(*each)) for each in cases]


@pytest.mark.parametrize(
    ("way", "cases"),
    [
        *(pytest.param(way, cases, id=f"{way.__name__}: quick") for way, cases in QUICK.items()),
        *(
            pytest.param(
                way,
                [each for name, *each in CASES if name == way.__name__ and tuple(each) not in QUICK.get(way, ())],
                id=way.__name__,
                marks=pytest.mark.full,
            )
            for way in WAYS
        ),
    ],
)
def test_whatever_is_compiled_computes_as_one_process(
    ranks: RankPool, way: Compiled, cases: list[tuple[int, str, str]]
) -> None:
    alone = {micro: trained(lambda model, strategy: model, None, micro) for micro in (1, 2)}
    for found in ranks(2, on_rank, way, cases, timeout=400):
        for each, state in zip(cases, found, strict=True):
            try:
                assert_same(state, alone[MICRO[each[1]]], atol=1e-9)
            except AssertionError as error:
                raise AssertionError(f"{way.__name__} at {each}: {error}") from None


def released_inside(zero: int) -> tuple[list[str], bool]:
    """What is left of parallel training on a module that was compiled before, and whether its copy has its weights."""
    model = build()
    compiled = whole_before(model, Strategy(zero=zero))  # type: ignore[arg-type]
    compiled(data(0, 4)[0]).sum().backward()
    copied = copy.deepcopy(compiled)
    pl.release(model)
    same = all(torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True))
    added = ("_paceline_engine", "no_sync", "__deepcopy__", "__reduce_ex__")
    return [name for name in added if name in (*vars(model), *vars(compiled))], same


@pytest.mark.parametrize("zero", [0, 3])
def test_the_module_inside_a_compiled_one_can_be_released(ranks: RankPool, zero: int) -> None:
    assert ranks(2, released_inside, zero) == [([], True)] * 2


def looked_at(zero: int) -> list[Tensor]:
    """How far off gradients are that a compiled function of the loop has scaled."""
    model = pl.parallelize(build(), Strategy(zero=zero, bucket_mb=1e-4))
    x, y = (part[pl.init().rank :: 2] for part in data(0, 8))
    (model(x) - y).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]

    @torch.compile(backend="eager")
    def scale() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    scale()
    after = [p.grad / 0.5 for p in model.parameters()]
    pl.release(model)
    pairs = zip(before, after, strict=True)
    return [(a.as_subclass(Tensor) - b.as_subclass(Tensor)).abs().sum() for a, b in pairs]


@pytest.mark.parametrize("zero", [full(0), 2, 3])
def test_a_compiled_function_of_the_loop_sees_gradients(ranks: RankPool, zero: int) -> None:
    for found in ranks(2, looked_at, zero):
        assert found and all(value == 0 for value in found)


def frames_compiled(blocks: int) -> int:
    """How many frames are read to compile a whole parallel model of so many blocks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build()
    model.blocks = nn.ModuleList(Block() for _ in range(blocks)).double()
    compiled = torch.compile(pl.parallelize(model, Strategy(zero=3, bucket_mb=1e-4)), backend="eager")
    compiled(data(0, 4)[0]).sum().backward()
    pl.release(model)
    return torch._dynamo.utils.counters["frames"]["total"]


@pytest.mark.full
def test_a_whole_models_blocks_are_compiled_once_and_hooks_never(ranks: RankPool) -> None:
    # The model up to its first unit and from each to the next, which is the same place of a loop, and one block.
    few, many = (ranks(2, frames_compiled, blocks)[0] for blocks in (3, 12))
    assert 0 < few == many <= 12


def steps_compiled(strategy: Strategy | None) -> dict[str, Tensor]:
    model = parallel(build(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        rows = x if strategy is None else x.chunk(pl.init().world_size)[pl.init().rank]
        model(rows).square().mean().backward()
        step()
        optimizer.zero_grad()
    return snapshot(model if strategy is None else pl.release(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
def test_a_compiled_step_is_that_of_one_process(ranks: RankPool, zero: int) -> None:
    for found in ranks(2, steps_compiled, Strategy(zero=zero)):
        assert_same(found, steps_compiled(None), atol=1e-12)
