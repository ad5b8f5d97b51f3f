"""Generators that a loop draws from go on where they were saved, with as many ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from tests.checkpoint.test_values import parallel


def generators(seed: int) -> list[Any]:
    return [
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed),
        np.random.RandomState(seed),
        random.Random(seed),
    ]


def drawn(own: list[Any]) -> list[float]:
    tensors, numpy, legacy, python = own
    return [torch.rand((), generator=tensors).item(), numpy.random(), legacy.random_sample(), python.random()]


def with_generators(path: Path, saves: bool) -> tuple[list[float], bool]:
    model, own = parallel(), generators(pl.init().rank if saves else 9)
    if saves:
        drawn(own)
        pl.save(path / "at 1", model, step=1, rng=own)
        return drawn(own), True
    loaded = pl.load(path / "at 1", model, rng=own)
    return drawn(own), loaded.same_random


def test_generators_of_a_loop_s_own_go_on_with_as_many_ranks(ranks, tmp_path: Path) -> None:
    expected = ranks(2, with_generators, tmp_path, True)
    assert expected[0] != expected[1]
    assert ranks(2, with_generators, tmp_path, False) == expected
    fresh = drawn(generators(9))
    assert ranks(3, with_generators, tmp_path, False) == [(fresh, False)] * 3


def test_what_is_no_generator_or_another_one_is_refused(tmp_path: Path) -> None:
    model = parallel()
    with pytest.raises(pl.UserError, match=r"rng: expected generators of torch, NumPy or Python, .* got a int"):
        pl.save(tmp_path / "at 1", model, step=1, rng=3)  # type: ignore[arg-type]
    pl.save(tmp_path / "at 1", model, step=1, rng=np.random.default_rng(0))
    with pytest.raises(pl.UserError, match=r"the states of 1 generators; pl\.load was given 4"):
        pl.load(tmp_path / "at 1", model, rng=generators(0))
    with pytest.raises(pl.UserError, match="generator does not take its state"):
        pl.load(tmp_path / "at 1", model, rng=random.Random(0))
    pl.load(tmp_path / "at 1", model)
