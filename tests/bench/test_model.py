from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.bench.model import SHAPES, ModelShape, bench_model
from paceline.models import preset

NANO = ModelShape("nano", preset("nano"), batch=2)


@pytest.mark.full
def test_each_case_gives_a_row_per_system() -> None:
    threads = torch.get_num_threads()
    ours, plain = bench_model([NANO], rounds=2, threads=1)
    assert torch.get_num_threads() == threads
    assert (ours.system, plain.system, plain.ratio) == ("paceline", "plain", 1.0)
    assert 0 < ours.ratio < 10
    assert ours.median_ms > 0


@pytest.mark.full
def test_reference_model_needs_less_memory_than_the_plain_one() -> None:
    ours, plain = bench_model([NANO], rounds=2)
    gradients = 4 * 136_960
    assert gradients < ours.peak_bytes < plain.peak_bytes < 40 * gradients


@pytest.mark.parametrize("change", [{"bias": False}, {"tied": False}, {"norm": "rmsnorm"}, {"kv_heads": 1}])
def test_shape_that_the_plain_model_lacks_is_refused(change: dict) -> None:
    shape = dataclasses.replace(NANO, config=dataclasses.replace(NANO.config, **change))
    with pytest.raises(ValueError, match="nano: the plain model has GPT-2's form only"):
        bench_model([shape], rounds=2)


def test_one_round_has_no_spread() -> None:
    with pytest.raises(ValueError, match="at least 2 rounds, got 1"):
        bench_model(SHAPES, rounds=1)
