from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.engine.units import ROOT, find_units, parameter_specs
from paceline.errors import UserError
from paceline.models.presets import preset
from paceline.models.transformer import Transformer


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


def test_a_pattern_without_a_match_and_nested_units_are_errors() -> None:
    with pytest.raises(UserError, match="matches no module"):
        find_units(Vision(), ["layer*"])
    with pytest.raises(UserError, match=r"stages contains stages\.0"):
        find_units(Vision(), ["stages", "stages.0"])
