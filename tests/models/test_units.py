from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.presets import preset
from paceline.models.transformer import Transformer
from paceline.models.units import ROOT, find_blocks, find_units, parameter_specs
from tests.engine.models import WORLDS, Stack, assert_all_same, every_world, in_parallel, in_worlds, make, train


class Vision(nn.Module):
    """A position table on the model itself, nested containers, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3))
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.stages = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))) for _ in range(2)),
        )
        self.body = nn.Module()
        self.body.norm = nn.LayerNorm(2)
        self.body.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def test_a_transformer_is_its_blocks_and_what_is_left() -> None:
    model = Transformer(preset("tiny"))
    assert list(find_units(model)) == ["embedding", "positions", *(f"blocks.{i}" for i in range(3)), "norm", "head"]


def test_outermost_repeated_containers_give_blocks_and_the_rest_its_largest_modules() -> None:
    units = list(find_units(Vision()))
    assert units == ["stem", "stages.0", "stages.1", "body.norm", "body.layers.0", "body.layers.1"]


def test_every_parameter_belongs_to_one_unit_and_direct_ones_to_the_root() -> None:
    model = Vision()
    specs = parameter_specs(model, list(find_units(model)))
    assert [spec.name for spec in specs] == [name for name, _ in model.named_parameters()]
    owners = {spec.name: spec.unit for spec in specs}
    assert owners["position"] == ROOT
    assert owners["body.layers.1.weight"] == "body.layers.1"


def test_units_can_be_named() -> None:
    units = list(find_units(Vision(), ["stages", "body.layers.?"]))
    assert "stages" in units
    assert "stages.0" not in units
    assert "body.layers.0" in units


def test_a_list_that_is_named_stands_for_the_modules_in_it_which_are_what_is_called() -> None:
    assert find_blocks(Vision(), ["body.layers"]) == ["body.layers.0", "body.layers.1"]
    assert list(find_units(Vision(), ["body.layers"])) == list(find_units(Vision(), ["body.layers.?"]))


def test_a_pattern_without_a_match_and_nested_units_are_errors() -> None:
    with pytest.raises(UserError, match="matches no module"):
        find_units(Vision(), ["layer*"])
    with pytest.raises(UserError, match=r"stages contains stages\.0"):
        find_units(Vision(), ["stages", "stages.0"])
    with pytest.raises(UserError, match="name the list that holds the blocks"):
        find_units(Vision(), ["stages.*"])


# ---- training with units that were named


class Scaled(Stack):
    """A parameter of the model itself belongs to no unit, however they are named."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def trained_with_units(strategy: Strategy, cls: type[nn.Module]) -> tuple[list[dict], list[str], set[str]]:
    """Weights after training, the units, and what was gathered."""
    model = pl.parallelize(make(cls), strategy)
    engine = pl.engine_of(model)
    weights = train(model)
    gathered = {event.target for event in engine.drain_events() if event.stream == "gather"}
    units = list(engine.units)
    pl.release(model)
    return weights, units, gathered


NAMED = {
    "two blocks of three": (["blocks.0", "blocks.2"], ["inner", "blocks.0", "blocks.1", "blocks.2", "head"]),
    "a layer of each block": (["blocks.?.0"], ["inner", "blocks.0.0", "blocks.1.0", "blocks.2.0", "head"]),
    "what is no block": (["inner"], ["inner", "blocks.0", "blocks.1", "blocks.2", "head"]),
}


@in_worlds(WORLDS, named=NAMED)
def test_training_with_named_units_equals_one_process(ranks, strategy, n, named) -> None:
    names, units = named
    expected = train(make(Scaled))
    for weights, found, gathered in ranks(n, trained_with_units, replace(strategy, units=names), Scaled):
        assert_all_same(weights, expected)
        assert found == units
        if strategy.gathers and n > 1:
            assert gathered >= set(units)


# ---- a parameter that another module reads


class Body(nn.Module):
    """Uses a layer's weight beside that layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x + F.linear(x, self.layers[0].weight)


class ReadsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.body, self.head = nn.Linear(4, 6), Body(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.inner(x)))


@every_world
def test_a_module_named_as_a_unit_may_read_the_parameters_of_all_it_contains(ranks, strategy, n) -> None:
    expected = train(make(ReadsInside))
    for weights, units, _ in ranks(n, trained_with_units, replace(strategy, units=["body"]), ReadsInside):
        assert_all_same(weights, expected)
        assert units == ["inner", "body", "head"]


@every_world
def test_a_module_may_read_the_parameters_of_another_unit_without_being_named(ranks, strategy, n) -> None:
    expected = train(make(ReadsInside))
    for found in ranks(n, in_parallel, strategy, ReadsInside, train):
        assert_all_same(found, expected)
