from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.config import ModelConfig
from paceline.plan.megatron import MIB, Megatron

SMALL = ModelConfig(layers=12, width=512, heads=8, context=1024, vocabulary=50304)
"""Of Megatron-LM's functional tests."""


def test_parameters_are_counted_one_by_one() -> None:
    one = Megatron(SMALL, samples=4)
    block = 4 * 512**2 + 4 * 512 + 8 * 512**2 + 5 * 512 + 4 * 512
    assert one.parameters == 50304 * 512 + 1024 * 512 + 12 * block + 1024 == 64_109_568
    # The last of four stages: its blocks, the final norm, and the embedding again, tied to the first's.
    assert replace(one, pipeline=4).parameters == 3 * block + 1024 + 50304 * 512
    # Of tensor-parallel ranks each has its part of matrices and of most biases, and all of the norms.
    assert (
        replace(one, tensor=4).parameters
        == (50304 * 512 + 12 * (12 * 512**2 + 7 * 512)) // 4 + (1024 + 12 * 6) * 512 + 1024
    )


@pytest.mark.parametrize(("shards", "bytes_each"), [(1, 18), (2, 12), (8, 7.5)])
def test_the_distributed_optimizer_takes_6_and_12_divided_by_its_ranks(shards: int, bytes_each: float) -> None:
    run = Megatron(SMALL, samples=4, shards=shards)
    assert run.states == bytes_each * run.parameters


def test_recomputed_blocks_leave_their_inputs_and_one_block_at_a_time() -> None:
    kept = Megatron(replace(SMALL, vocabulary=128), samples=4)
    less = replace(kept, recompute=True)
    assert kept.peak - less.peak == pytest.approx(12 * kept.block - 12 * 2 * kept.stream - kept.block + kept.logits)


def test_the_last_stage_holds_a_turn_of_every_piece_but_its_last() -> None:
    run = Megatron(SMALL, samples=4, pipeline=4)
    assert run.in_flight == 3
    assert replace(run, chunks=3).in_flight == 2 * 4 + 1
    assert replace(run, chunks=3, group=5).in_flight == 2 * 5 + 1
    assert replace(run, chunks=2, chunk_layers=1, last_layers=0).in_flight == 4


GOLDEN = {
    # Measured by NVIDIA/Megatron-LM@d98e8a64d, tests/functional_tests: steady and peak bytes of the last rank.
    "dist_optimizer A100": (
        Megatron(SMALL, 4, shards=8, attention="flash", deterministic=True),
        552128512,
        2711714304,
    ),
    "dist_optimizer H100": (
        Megatron(SMALL, 4, shards=8, deterministic=True, architecture="hopper"),
        581489664,
        2691792384,
    ),
    "full recompute, unfused": (
        Megatron(SMALL, 4, recompute=True, attention="unfused", deterministic=True),
        1232487936,
        2534070272,
    ),
    "pipeline of 4, 3 pieces each, unfused": (
        Megatron(SMALL, 4, pipeline=4, chunks=3, shards=2, attention="unfused", deterministic=True),
        522845696,
        3912607232,
    ),
    "own attention, fp16": (
        Megatron(
            SMALL,
            4,
            shards=8,
            dtype="float16",
            transformer_engine=False,
            attention="unfused",
            deterministic=True,
        ),
        518880768,
        4607767040,
    ),
    "7B, tensor 4, H100": (
        Megatron(
            ModelConfig(layers=32, width=4096, heads=32, kv_heads=8, context=8192, vocabulary=131584, tied=False),
            2,
            tensor=4,
            shards=2,
            deterministic=True,
            architecture="hopper",
        ),
        20663519232,
        57143791616,
    ),
    "7B, pipeline of 4, 8 pieces each, H100": (
        Megatron(
            ModelConfig(layers=32, width=4096, heads=32, kv_heads=8, context=8192, vocabulary=131200, tied=False),
            1,
            pipeline=4,
            chunks=8,
            shards=2,
            deterministic=True,
            architecture="hopper",
        ),
        24808996864,
        60720852992,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_memory(name: str) -> None:
    run, steady, peak = GOLDEN[name]
    assert run.steady == pytest.approx(steady, rel=0.02)
    assert run.peak == pytest.approx(peak, rel=0.015)


def test_queries_and_keys_that_are_normalised_are_kept_twice() -> None:
    run = Megatron(SMALL, 4, tensor=2)
    assert replace(run, norm_in_attention=True).block - run.block == 2 * 2 * 4 * 1024 * 512 / 2


def test_workspaces_are_small_by_default_and_large_on_hopper_or_when_deterministic() -> None:
    run = Megatron(SMALL, 4)
    assert run.workspaces == (2 * 8.125 + 4) * MIB
    assert replace(run, deterministic=True).workspaces == (2 * 32 + 4) * MIB
    assert replace(run, architecture="hopper").workspaces == 3 * 32 * MIB
