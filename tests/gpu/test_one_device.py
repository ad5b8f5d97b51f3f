"""Two ranks on one GPU equal one process, with collectives that are late, and under torch's sanitizer of streams."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.strategy import Strategy
from tests.gpu.devices import late_collectives, on_a_gpu
from tests.gpu.loop import CASES, POLICIES, assert_same, in_parallel, make, train
from tests.gpu.one_device import ranks_on_one_gpu

pytestmark = on_a_gpu

RANKS = 2


def each(strategies: Mapping[str, Strategy], sanitize: bool) -> dict[str, dict[str, Any] | str]:
    """What a rank finds with each strategy, or what it raises; in one job, as starting one takes long."""
    if sanitize:
        # Not where this file is read: from then on what torch raises in that process is lost on its way.
        import torch.cuda._sanitizer as sanitizer

        sanitizer.enable_cuda_sanitizer()
    found: dict[str, dict[str, Any] | str] = {}
    for seed, (name, strategy) in enumerate(strategies.items()):
        try:
            with late_collectives(seed):
                found[name] = in_parallel(strategy, torch.float64)
        except Exception as error:
            # The other rank does not get further either.
            return {**found, **{other: f"{name}: {error!r}" for other in strategies if other not in found}}
    return found


@functools.cache
def found(sanitize: bool) -> list[dict[str, dict[str, Any] | str]]:
    return ranks_on_one_gpu(RANKS, each, POLICIES if sanitize else CASES, sanitize)


@functools.cache
def expected() -> dict[str, Any]:
    device = torch.device("cuda", 0)
    return train(make(torch.float64, device), torch.float64, device)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_late_collectives_equal_a_plain_model(name: str) -> None:
    for rank in found(sanitize=False):
        assert not isinstance(rank[name], str), rank[name]
        assert_same(rank[name], expected(), atol=1e-11)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_the_sanitizer_sees_no_memory_that_two_streams_use_at_once(name: str) -> None:
    for rank in found(sanitize=True):
        assert not isinstance(rank[name], str), rank[name]
        assert_same(rank[name], expected(), atol=1e-11)  # type: ignore[arg-type]


def places_of_a_state(strategy: Strategy) -> str:
    model = pl.parallelize(make(torch.float32, pl.init().device), strategy)
    place = model.state_dict()["head.weight"].device.type
    pl.release(model)
    return place


@pytest.mark.parametrize(("zero", "place"), [(0, "cuda"), (2, "cuda"), (3, "cpu")])
def test_a_state_is_where_the_model_is_but_at_zero_3_on_the_host(zero: Any, place: str) -> None:
    assert ranks_on_one_gpu(RANKS, places_of_a_state, Strategy(zero=zero, precision="bfloat16")) == [place] * RANKS
