from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.core.errors import UserError
from paceline.core.strategy import SHARDING, SYSTEMS, Strategy


def test_fsdp_names_become_stages() -> None:
    assert {name: Strategy(zero=name, shard=4 if "HYBRID" in name else 0).zero for name in SHARDING} == {
        "NO_SHARD": 0,
        "SHARD_GRAD_OP": 2,
        "FULL_SHARD": 3,
        "HYBRID_SHARD": 3,
    }
    assert replace(Strategy(zero="FULL_SHARD"), zero=1).stage == 1


def test_units_given_as_a_list_become_a_tuple_so_that_equal_choices_are_equal() -> None:
    assert Strategy(units=["blocks.*"]) == Strategy(units=("blocks.*",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero": 4}, "strategy.zero: expected one of 0, 1, 2, 3, NO_SHARD"),
        ({"zero": "HYBRID"}, "got 'HYBRID'"),
        ({"synchronize": "never"}, "strategy.synchronize: expected one of overlap, after"),
        ({"packing": "box"}, "strategy.packing: expected one of bucket, parameter, flat"),
        ({"collective": "gossip"}, "strategy.collective: expected one of all_reduce, parameter_server"),
        ({"gradients": "max"}, "strategy.gradients: expected one of mean, sum"),
        ({"precision": "fp8"}, "strategy.precision: expected one of auto, float32, bfloat16, float16"),
        ({"accumulation": "last"}, "strategy.accumulation: expected one of auto, each, defer, hold"),
        ({"recompute": "all"}, "strategy.recompute: expected one of none, unit, keep_attention"),
        ({"recompute_every": 0}, "expected 1 or more, got 0"),
        ({"zero": 3, "prefetch": -1}, "expected 0 or more units, got -1"),
        ({"zero": 2, "prefetch": 2}, "zero=2 none are"),
        ({"zero": 3, "prefetch": 0, "accumulation": "hold"}, "hold keeps all"),
        ({"recompute_every": 2}, "recompute=none keeps all activations"),
        ({"reduce_in_float32": False}, "set precision to bfloat16 or float16"),
        ({"bucket_mb": 0}, "above 0 MiB, got 0"),
        ({"bucket_mb": -1.0}, "set strategy.packing to parameter"),
        ({"bucket_mb": float("nan")}, "above 0 MiB"),
        ({"bucket_mb": float("inf")}, "packing"),
        ({"zero": "HYBRID_SHARD"}, "say with strategy.shard"),
        ({"shard": 2}, "zero=0 shards nothing"),
        ({"zero": 3, "shard": -1}, "strategy.shard: expected 0 or more, got -1"),
        ({"collective": "parameter_server", "zero": 1}, "set zero to 0 and precision to float32"),
        ({"collective": "parameter_server", "precision": "bfloat16"}, "whole fp32 replicas"),
        ({"collective": "parameter_server", "accumulation": "each"}, "reduces once a step"),
        ({"zero": 2, "packing": "flat"}, "leave packing at bucket and synchronize at overlap"),
        ({"zero": 3, "packing": "parameter"}, "zero=3 frees gradients"),
        ({"zero": 2, "synchronize": "after"}, "or set zero to 1"),
        ({"zero": 2, "accumulation": "hold"}, "which zero=2 never reshards"),
        ({"zero": 3, "accumulation": "hold", "share_parameters": True}, "with share_parameters none are gathered"),
        ({"accumulation": "defer", "precision": "float16", "reduce_in_float32": False}, "set reduce_in_float32"),
    ],
)
def test_a_choice_that_does_not_go_together_says_what_to_change(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=r"^strategy") as caught:
        Strategy(**settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({}, False),
        ({"zero": 1}, False),
        ({"zero": 2}, True),
        ({"zero": 3}, True),
        ({"precision": "bfloat16"}, False),
        ({"precision": "bfloat16", "reduce_in_float32": False}, True),
        ({"zero": 3, "accumulation": "hold"}, True),
        ({"zero": 3, "accumulation": "defer"}, False),
        ({"accumulation": "each"}, True),
    ],
)
def test_auto_defers_only_where_full_gradients_of_enough_precision_are_held_anyway(settings: dict, each: bool) -> None:
    assert Strategy(**settings).reduces_every_micro_batch is each


def test_shards_are_all_ranks_unless_groups_are_asked_for() -> None:
    assert Strategy().shards(8) == 1
    assert Strategy(zero=1).shards(8) == 8
    assert Strategy(zero=3, shard=2).shards(8) == 2
    assert Strategy(zero=3, shard=1).shards(8) == 1


@pytest.mark.parametrize(("shard", "ranks"), [(3, 8), (4, 2), (8, 12)])
def test_groups_that_do_not_divide_the_ranks_are_refused(shard: int, ranks: int) -> None:
    with pytest.raises(UserError, match=f"{ranks} ranks cannot form groups of {shard}"):
        Strategy(zero=2, shard=shard).shards(ranks)


def test_the_historical_systems_reduce_once_a_step_and_shard_nothing() -> None:
    assert all(strategy.stage == 0 and not strategy.reduces_every_micro_batch for strategy in SYSTEMS.values())


@pytest.mark.parametrize(
    ("named", "precision"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), (torch.bfloat16, "bfloat16")],
)
def test_precisions_go_by_their_short_names_and_dtypes(named: object, precision: str) -> None:
    strategy = Strategy(precision=named)
    assert strategy == Strategy(precision=precision) and strategy.precision == precision
