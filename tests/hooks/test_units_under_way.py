"""Which units run inside others: told by begins and ends, also where a forward fails or other threads run units."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.hooks.units_under_way import UnitsUnderWay


def test_what_begins_before_another_ends_is_inside_it() -> None:
    units = UnitsUnderWay()
    units.begin("outer")
    assert not units.is_inside and not units.inner
    units.begin("inner")
    assert units.is_inside and units.inner == {"inner"}
    units.end("inner")
    assert not units.is_inside
    units.end("outer")
    units.begin("next")
    assert not units.is_inside and units.inner == {"inner"}


def test_a_unit_that_runs_itself_is_a_part_of_itself_and_no_other_s() -> None:
    units = UnitsUnderWay()
    units.begin("outer")
    units.begin("outer")
    assert units.is_inside and not units.inner
    units.require_no_circle()


def test_a_circle_is_refused_with_both_names() -> None:
    units = UnitsUnderWay()
    for unit in ("first", "second", "first"):
        units.begin(unit)
    with pytest.raises(EngineError, match="first runs second, another unit, inside its forward, and that runs first"):
        units.require_no_circle()


def test_other_threads_run_units_of_their_own() -> None:
    units = UnitsUnderWay()
    units.begin("here")
    found: list[bool] = []

    def there() -> None:
        units.begin("there")
        found.append(units.is_inside)

    thread = threading.Thread(target=there)
    thread.start()
    thread.join()
    assert found == [False] and not units.inner


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def test_a_forward_that_fails_has_ended() -> None:
    model = pl.parallelize(nn.Sequential(nn.Linear(2, 2), Fails(), nn.Linear(2, 2)))
    units = pl.engine_of(model).forward.under_way
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(torch.ones(1, 2))
        model[2](torch.ones(1, 2))
    assert not units.is_inside and not units.inner
    pl.release(model)
