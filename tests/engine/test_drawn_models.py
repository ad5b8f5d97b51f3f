"""Models drawn at random, of parameters that layouts stumble over: N ranks equal one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import WORLDS, assert_same, every_world, shares, snapshot

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# What is summed in another order, and rounded in steps of a 256th.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Described:
    """A parameter of a drawn model."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    blocks: tuple[int, ...] = (0,)
    """That use it: the model itself is -1. With more than one it is tied."""
    order: tuple[int, ...] = ()
    """Of its dimensions in memory, the last one being the fastest; empty: contiguous."""
    gaps: bool = False
    """Whether its elements lie apart."""
    trainable: bool = True


def built(described: Described, seed: int) -> nn.Parameter:
    """The parameter, with values of its own."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(described.shape, generator=generator, dtype=torch.float64).to(DTYPES[described.dtype])
    order = described.order or tuple(range(len(described.shape)))
    back = sorted(range(len(order)), key=order.__getitem__)
    values = values.permute(order).contiguous().permute(back)
    if described.gaps:
        values = torch.stack([values, values], -1)[..., 0]
    return nn.Parameter(values, requires_grad=described.trainable)


def passed(module: nn.Module, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Every parameter changes the stream of its dtype, each element with another weight."""
    found = {x.dtype: x for x in streams}
    for parameter in module._parameters.values():
        weights = torch.arange(1, parameter.numel() + 1, dtype=parameter.dtype).cos().view(parameter.shape)
        x = found[parameter.dtype]
        found[parameter.dtype] = x + torch.tanh(x + (parameter * weights).sum())
    return tuple(found.values())


class Block(nn.Module):
    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return passed(self, streams)


class Drawn(nn.Module):
    """A value for each sample and dtype, which nothing of another dtype reaches."""

    def __init__(self, parameters: list[Described]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(1 + max(max(each.blocks) for each in parameters)))
        for index, each in enumerate(parameters):
            parameter = built(each, index)
            for block in each.blocks:
                (self if block < 0 else self.blocks[block]).register_parameter(f"p{index}", parameter)

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        streams = passed(self, streams)
        for block in self.blocks:
            streams = block(*streams)
        return streams


def trained(parameters: list[Described], strategy: Strategy | None) -> dict[str, Tensor]:
    """Two steps of SGD."""
    model = Drawn(parameters)
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = torch.randn(2, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if strategy is not None:
            x, y = shares(x), shares(y)
        streams = model(*(x.to(dtype) for dtype in DTYPES.values()))
        sum((stream - y.to(stream.dtype)).square().mean().double() for stream in streams).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    if strategy is not None:
        pl.release(model)
    return state


def assert_equal_one_process(results: list[dict[str, Tensor]], parameters: list[Described]) -> None:
    expected = trained(parameters, None)
    for result in results:
        assert_same(result, results[0], atol=0)
        for dtype, atol in TOLERANCE.items():
            names = [name for name, value in expected.items() if value.dtype == dtype]
            assert_same({name: result[name] for name in names}, {name: expected[name] for name in names}, atol=atol)
        assert {name: value.dtype for name, value in result.items()} == {n: v.dtype for n, v in expected.items()}


@st.composite
def models(draw: st.DrawFn) -> list[Described]:
    """Up to eight parameters in up to four blocks and the model itself."""
    blocks = draw(st.integers(1, 4))
    shapes = st.one_of(
        st.sampled_from([(), (0,), (1,), (3, 0), (61,), (4, 3, 3, 3)]), st.lists(st.integers(1, 7), max_size=4)
    )
    parameters = []
    for index in range(draw(st.integers(1, 8))):
        shape = tuple(draw(shapes))
        parameters.append(
            Described(
                shape,
                draw(st.sampled_from(["float64", "float32"])),
                tuple(draw(st.lists(st.integers(-1, blocks - 1), min_size=1, max_size=3, unique=True))),
                tuple(draw(st.permutations(range(len(shape))))),
                draw(st.booleans()),
                # Without any there would be nothing to train.
                index == 0 or draw(st.booleans()),
            )
        )
    return parameters


# A rank that raises ends all processes, so that to look for a smaller example would take minutes.
@pytest.mark.full
@settings(derandomize=True, deadline=None, max_examples=30, phases=[Phase.generate])
@given(parameters=models(), world=st.sampled_from([world for world in WORLDS.values() if world[1] < 4]))
def test_drawn_models_equal_one_process(ranks, parameters, world) -> None:
    strategy, n = world
    assert_equal_one_process(ranks(n, trained, parameters, strategy), parameters)


SEVERAL_DTYPES = [
    Described((5,), "float32", (-1,)),
    Described((7, 9), "float64", (0,)),
    Described((7, 9), "float32", (0,), (1, 0)),
    Described((9,), "bfloat16", (0,)),
    Described((64,), "float64", (1,)),
    Described((64,), "float32", (2,)),
    Described((8, 9), "bfloat16", (3,)),
    Described((3,), "float32", (2, 4)),
    Described((11, 6), "float64", (4,), trainable=False),
    Described((11, 6), "float32", (4,)),
    Described((13,), "float64", (4,)),
]

# One element of a larger tensor, nothing, nothing of one dtype, and a scalar that is used twice.
LITTLE = [
    [Described((1,), gaps=True)],
    [Described((0,))],
    [Described((0,), "float32"), Described((5,))],
    [Described((), blocks=(0, 1))],
]


def trained_each(models: list[list[Described]], strategy: Strategy) -> list[dict[str, Tensor]]:
    return [trained(parameters, strategy) for parameters in models]


@every_world
def test_models_of_little_equal_one_process(ranks, strategy, n) -> None:
    results = ranks(n, trained_each, LITTLE, strategy)
    for index, parameters in enumerate(LITTLE):
        assert_equal_one_process([result[index] for result in results], parameters)


@every_world
def test_a_model_of_several_dtypes_equals_one_process(ranks, strategy, n) -> None:
    assert_equal_one_process(ranks(n, trained, SEVERAL_DTYPES, strategy), SEVERAL_DTYPES)
